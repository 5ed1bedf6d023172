"""UI-S1's filter: keep tasks whose rollouts already differ in their return at the first step (arXiv 2509.11543)."""
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.maths import masked


def diverse_start(returns_PG: Array, step_PG: Array, valid_PG: Array, *, min_std: float = 0.3) -> Array:
    """bool[P]: population std of `returns` over the rows of step 0 above `min_std`, or a single such row."""
    start = valid_PG & (step_PG == 0)
    spread = masked.std(returns_PG, start, axis=1, ddof=0)
    return (spread > min_std) | (masked.count(start, axis=1) == 1)


@prompt_filter
def ui_s1(*, min_std: float = 0.3) -> Filter:
    """`diverse_start` of `extras["returns"]` f32[P, G] (`advantages.ui_s1.semi_online_return`), `step` i32[P, G]."""

    def keep(rollouts):
        return diverse_start(rollouts.extras["returns"], rollouts.extras["step"], rollouts.valid, min_std=min_std)

    return Filter(keep, needs=("returns", "step"))
