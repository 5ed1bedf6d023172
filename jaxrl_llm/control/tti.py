"""TTI: the horizon of interaction grows with the iteration (arXiv 2506.07976)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.tools import registry

GROWTHS = ("multiplicative", "additive")


def horizon(iteration: Array, *, least: int, most: int, growth: str) -> Array:
    """i32: `clip(least i, least, most)`, or `clip(least + i, least, most)` for additive growth, in iteration i = 1, 2, ..."""
    return jnp.clip(least * iteration if growth == "multiplicative" else least + iteration, least, most).astype(jnp.int32)


@controller
def tti(*, least: int = 10, most: int = 30, every: int = 1, growth: str = "multiplicative") -> Controller:
    """`max_turns`: the `horizon` of iteration k // every + 1 in step k.

    The defaults are the paper's for web pages; a run has at most `sampling.max_turns`. Both forms are reconstructed. The
    request to check an answer before the end is `environments.tool_use(checks=1)`; the paper makes it of agents that are not
    trained, and its training has none. Three epochs over an iteration are the default of the published loop, whose scripts make
    one. Raises ValueError for an unknown growth, a range without a turn, and iterations without a step.
    """
    registry.one_of("growth of the horizon", growth, GROWTHS)
    if not 1 <= least <= most or every < 1:
        raise ValueError(f"least={least}, most={most}, every={every}; give 1 <= least <= most, and one step or more")
    return Controller(
        lambda: jnp.int32(0),
        lambda step: {"max_turns": horizon(step // every + 1, least=least, most=most, growth=growth)},
        lambda step, facts: facts["step"] + 1, facts=("step",), knobs=("max_turns",))
