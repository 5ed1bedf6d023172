"""ScalingInter-RL: few turns of interaction first, more of them in stages (arXiv 2509.08755)."""
from collections.abc import Sequence

import jax.numpy as jnp

from jaxrl_llm.control.base import Controller, controller


@controller
def scaling_inter_rl(*, turns: Sequence[int] = (10, 20, 30), every: int = 100) -> Controller:
    """`max_turns`: `turns[min(k // every, K - 1)]` in step k, K = len(turns).

    The defaults are the paper's for TextCraft and SciWorld; a run has at most `sampling.max_turns`. Raises ValueError for
    numbers of turns that are not positive or do not grow, and for stages without a step.
    """
    if not turns or min(turns) < 1 or list(turns) != sorted(set(turns)) or every < 1:
        raise ValueError(f"turns={tuple(turns)}, every={every}; give positive numbers that grow, and one step or more")
    limits = jnp.asarray(turns, jnp.int32)
    return Controller(
        lambda: jnp.int32(0), lambda step: {"max_turns": limits[jnp.minimum(step // every, len(turns) - 1)]},
        lambda step, facts: facts["step"] + 1, facts=("step",), knobs=("max_turns",))
