"""BroRL: the learning rate of a larger batch (arXiv 2510.01180)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


def learning_rate_factor(batch: Array | int, reference: int) -> Array:
    """f32[]: `sqrt(batch / reference)`, the factor of the learning rate when a batch has another number of rollouts."""
    return jnp.sqrt(jnp.float32(batch) / reference)


@controller
def brorl(*, usual: int = 64) -> Controller:
    """`learning_rate`: the `learning_rate_factor` of G rollouts of a prompt, if the configured rate is for `usual` of them.

    The default is the paper's: its batch has 128 prompts, and ProRL's 512 x 16 rollouts would be 64 for each of them. The
    number of minibatches stays. Facts: `step`. Raises ValueError: less than one rollout.
    """
    if usual < 1:
        raise ValueError(f"usual={usual} rollouts of a prompt; give 1 or more")
    return Controller(lambda group: jnp.int32(group), lambda group: {"learning_rate": learning_rate_factor(group, usual)},
                      lambda group, facts: group, facts=("step",), knobs=("learning_rate",))
