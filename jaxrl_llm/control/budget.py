"""Allocation of a fixed total of rollouts to prompts by the largest marginal gain (arXiv 2602.03584, 2509.25849)."""
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import Array, lax
from ml_collections import ConfigDict

from jaxrl_llm.tools import key_values, registry


def signal_gain(p: Array, n: Array) -> Array:
    """V0's utility: `U(n + 1) - U(n) = q + q^n (n - (n + 1) q)`, q = 1 - p.

    `U(n) = n q (1 - q^(n-1))`, the expected number of wrong rollouts in a group of n with both outcomes. It is not
    concave: its slope rises to q, so the greedy choice fills one prompt to the cap before the next.
    """
    q = 1 - p
    return q + q**n * (n - (n + 1) * q)


def rate_gain(p: Array, n: Array) -> Array:
    """The gain `p q^n` of V0's utility per rollout, `U(n) / n`, which is concave and spreads the budget (not in the paper)."""
    return p * (1 - p) ** n


def knapsack_gain(p: Array, n: Array) -> Array:
    """The gain of Knapsack RL's concave value `(1 - p^n - q^n) p q^2`: probability times value of a mixed group."""
    q = 1 - p
    return (p**n * q + q**n * p) * p * q**2


LEAST = 2  # rollouts below which a prompt has no signal
UTILITIES = {"paper": signal_gain, "per_rollout": rate_gain, "knapsack": knapsack_gain}


def greedy(gain: Callable[[Array], Array], prompts: int, *, total: int, low: int, high: int) -> Array:
    """i32[P], `low` each and then one more at a time where `gain(counts i32[P]) -> f32[P]` is largest, up to `high`.

    Prompts without rollouts get their first two together, each of which gains half of what the second does: a single rollout
    carries no signal. This maximises the sum of utilities if they are concave. Ties go to the lowest index. When no prompt
    gains any more, the rest is spread evenly, so the sum is exactly `total` whenever `P * low <= total <= P * high`, and the
    nearest of these bounds otherwise. O(P total).
    """
    if not 0 <= low <= high:
        raise ValueError(f"low={low}, high={high} rollouts per prompt; they must satisfy 0 <= low <= high")
    most = max(min(total, prompts * high), prompts * low)

    def add(counts):
        left = most - counts.sum()
        pair = (counts == 0) & (left >= LEAST) & (high >= LEAST)
        gains = jnp.where(counts > 0, gain(counts), jnp.where(pair, gain(jnp.ones_like(counts)) / LEAST, 0))
        score = jnp.where(gains > 0, gains, -1.0 - counts)
        best = jnp.argmax(jnp.where(counts < high, score, -jnp.inf))
        return counts.at[best].add(jnp.where(pair[best] & (gains[best] > 0), LEAST, 1))

    return lax.while_loop(lambda counts: counts.sum() < most, add, jnp.full(prompts, low, jnp.int32))


@functools.partial(jax.jit, static_argnames=("total", "low", "high", "utility"))  # every call would compile its loop
def allocate(success_P: Array, *, total: int, low: int = LEAST, high: int = 128, utility: str = "paper") -> Array:
    """i32[P]: rollouts for prompts with these success rates, `greedy` in a utility of `UTILITIES`.

    Prompts that are certain to be solved or failed gain nothing and keep `low` while other prompts gain. The paper's utility
    with its cap of 128 concentrates the budget: a cap of three or four times the average spreads it more.

        allocate([0, 1, .386, .611, .664], total=40)                         # 2 2 32 2 2
        allocate([0, 1, .386, .611, .664], total=40, utility="per_rollout")  # 2 2 17 10 9
    """
    gain = UTILITIES[registry.one_of("utility", utility, UTILITIES)]
    success_P = jnp.asarray(success_P, jnp.float32)
    return greedy(lambda counts: gain(success_P, counts), success_P.size, total=total, low=low, high=high)


def keys(c: ConfigDict) -> None:
    """Budgets of rollouts."""
    c.budget = ConfigDict()            # allocates the per_step x group completions by the predicted rewards of prompts
    c.budget.utility = ""              # "paper" (of V0), "per_rollout" or "knapsack"; empty: the method's own, or equal shares
    c.budget.prompts = 0               # prompts per step that share the completions; 0: half of per_step


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value that cannot work."""
    yield from key_values.at_least(config, 0, "budget.prompts")
    yield from key_values.named(config, "budget.utility", ("", *UTILITIES))
