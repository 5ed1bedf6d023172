"""Expected value of rollout budgets: how many groups have both outcomes when a fixed total is allocated."""
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.control import reinforce_ada


def mixed(success: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`1 - p^n - q^n`: the chance that n rollouts at success p hold both outcomes."""
    return 1 - success**counts - (1 - success) ** counts


def signal(success: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """V0's utility `n q (1 - q^(n-1))`: wrong rollouts expected in a group of n that holds both outcomes."""
    wrong = 1 - success
    return counts * wrong * (1 - wrong ** (counts - 1.0))


def in_rounds(rewards: np.ndarray, total: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Reinforce-Ada with the same total: pairs of rollouts for prompts that lack a right or a wrong one, until all are spent.

    `rewards` [P, K] holds the outcomes to draw from. Returns how many each prompt draws, i32[P], and the number of rounds. If
    the rest of the total is not enough for all such prompts, a random choice decides which are served.
    """
    prompts, most = rewards.shape
    counts, rounds = np.full(prompts, 2), 1
    while counts.sum() + 2 <= total:
        drawn = jnp.arange(most) < counts[:, None]
        wants = reinforce_ada.wants_more(jnp.asarray(rewards), drawn, keep=2)
        asking = np.flatnonzero(np.asarray(wants) & (counts + 2 <= most))
        if not len(asking):
            break
        chosen = rng.permutation(asking)[:(total - counts.sum()) // 2]
        counts[chosen] += 2
        rounds += 1
    return counts, rounds


def outcome_of(success: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Means over prompts of `mixed` and of `signal` per rollout, the rollouts per prompt, and the rounds they are drawn in."""
    return {"mixed groups": float(mixed(success, counts).mean()), "rollouts": float(counts.mean()), "rounds": 1.0,
            "signal per rollout": float(signal(success, counts).sum() / counts.sum())}


def outcome_in_rounds(success: np.ndarray, total: int, most: int, rng: np.random.Generator, repeats: int = 20
                      ) -> dict[str, float]:
    """As `outcome_of`, for `in_rounds`: counts depend on the draws, so groups are simulated, not computed in expectation."""
    outcomes = []
    for _ in range(repeats):
        draws = (rng.random((len(success), most)) < success[:, None]).astype(np.float32)
        counts, rounds = in_rounds(draws, total, rng)
        seen = np.arange(most) < counts[:, None]
        right, wrong = (draws * seen).sum(1), ((1 - draws) * seen).sum(1)
        both = (right > 0) & (wrong > 0)
        outcomes.append((both.mean(), counts.mean(), rounds, (wrong * both).sum() / counts.sum()))
    return dict(zip(("mixed groups", "rollouts", "rounds", "signal per rollout"), map(float, np.mean(outcomes, axis=0))))
