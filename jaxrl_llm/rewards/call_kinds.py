"""RAPO's step reward: what kinds of tool calls led to an answer (arXiv 2509.24107)."""
from typing import Any

COUNTS = ("searches", "searches_again", "queries", "queries_again")  # facts of trajectories, `environments.call_kinds`


def step_reward(right: Any, formatted: Any, searches: Any, searches_again: Any, queries: Any, queries_again: Any, *,
                format_weight: float = 0.1, coef: float = 0.2, searches_full: int = 8, queries_full: int = 16) -> Any:
    """The reward of trajectories; arrays of NumPy or JAX of one shape, the first two of 0 and 1, the others counts of calls.

    With the redundant share `rho` of all calls, 0 without calls, it is `format_weight fmt + max(1 - rho, 0.5)` where right.
    Elsewhere it is `format_weight fmt + coef (min(1, (searches - again) / searches_full) + min(1, (queries - again) /
    queries_full))`, which has no lower bound. Queries explore or verify. The numbers are the paper's.
    """
    redundant, total = searches_again + queries_again, searches + searches_again + queries + queries_again
    share = redundant / total.clip(min=1)
    tried = ((searches - searches_again) / searches_full).clip(max=1) + ((queries - queries_again) / queries_full).clip(max=1)
    return format_weight * formatted + right * (1 - share).clip(min=0.5) + (1 - right) * coef * tried
