"""SimpleTIR: rollouts with a turn that has neither code nor an answer are not trained on (arXiv 2509.02479)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter


def free_of_void(void_PGT: Array, mask_PGT: Array, valid_PG: Array) -> Array:
    """bool[P, G]: valid rollouts without a trained token of a void turn (`void` marks the tokens of such turns)."""
    return valid_PG & ~jnp.any(void_PGT & mask_PGT, axis=-1)


@prompt_filter
def simpletir_filter(*, overlong: bool = True) -> Filter:
    """Rollouts that are `free_of_void` turns; `extras["void"]` bool[P, G, T] marks the tokens of such turns.

    Without `overlong` rollouts that a limit of the run cuts, `extras["truncated"]` bool[P, G], are left out too: the option
    `remove_clip` of the published code, which is off there.
    """
    def keep(rollouts):
        kept = free_of_void(rollouts.extras["void"], rollouts.mask, rollouts.valid)
        return kept if overlong else kept & ~rollouts.extras["truncated"].astype(bool)

    return Filter(keep, needs=("void",) if overlong else ("void", "truncated"), per="rollout")
