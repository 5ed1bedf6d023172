"""The optimiser's state is cleared before a batch, as Kimi k1.5 does whenever the old policy is renewed (arXiv 2501.12599)."""
import jax.numpy as jnp

from jaxrl_llm.control.base import Controller, controller


@controller
def fresh_optimizer(*, batches: int = 1) -> Controller:
    """`fresh_optimizer` bool[]: True before batches 0, n, 2 n, ... with n = `batches`.

    The schedule of the learning rate goes on. Raises ValueError for fewer than one batch.
    """
    if batches < 1:
        raise ValueError(f"batches={batches} between fresh states of the optimiser; give 1 or more")
    return Controller(lambda: jnp.int32(0), lambda step: {"fresh_optimizer": step % batches == 0},
                      lambda step, facts: facts["step"] + 1, facts=("step",), knobs=("fresh_optimizer",))
