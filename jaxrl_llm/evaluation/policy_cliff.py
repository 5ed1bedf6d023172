"""What a reward leaves undetermined: ties among optimal actions, and how far a small change moves the optimal policy.

The Policy Cliff (arXiv 2507.20150). `values f64[..., A]` are the values of a state's actions, or the rewards of A candidate
completions of a prompt, a one-step decision. An optimal policy is continuous in the reward where a single action is optimal.
Where several are, an arbitrarily small reward moves all probability.
"""
import numpy as np

EXACT = 1e-9  # tolerance of a tie for rewards of verifiers; learned rewards need about 1e-3


def optimal(values: np.ndarray, tolerance: float = EXACT) -> np.ndarray:
    """Actions within `tolerance` of the best one, `bool[..., A]`."""
    values = np.asarray(values, np.float64)
    return values >= values.max(axis=-1, keepdims=True) - tolerance


def gap(values: np.ndarray, tolerance: float = EXACT) -> np.ndarray:
    """The best value minus the best one that is not tied with it, `f64[...]`; infinity where all actions tie."""
    values = np.asarray(values, np.float64)
    others = np.where(optimal(values, tolerance), -np.inf, values).max(axis=-1)
    return values.max(axis=-1) - others


def policy(values: np.ndarray, temperature: float = 0.0, tolerance: float = EXACT) -> np.ndarray:
    """The optimal policy `f64[..., A]`: `exp(values / temperature)`, normalised; at temperature 0 uniform over the ties.

    `temperature`: the weight alpha of an entropy bonus.
    """
    values = np.asarray(values, np.float64)
    if temperature == 0:
        weights = optimal(values, tolerance).astype(np.float64)
    else:
        weights = np.exp((values - values.max(axis=-1, keepdims=True)) / temperature)
    return weights / weights.sum(axis=-1, keepdims=True)


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """`sum |p - q| / 2` over the last axis, `f64[...]`."""
    return np.abs(np.asarray(p, np.float64) - q).sum(axis=-1) / 2


def soft_bound(change: np.ndarray, temperature: float, discount: float = 0.0) -> float:
    """Bound of the total variation by a change of reward with an entropy bonus: `max |dR| / (2 alpha (1 - gamma))`, or 1."""
    return min(float(np.abs(change).max()) / (2 * temperature * (1 - discount)), 1.0)


def flips(values: np.ndarray, change: np.ndarray, tolerance: float = EXACT) -> np.ndarray:
    """`bool[...]`: several actions tie, and none is optimal both with `change f64[..., A]` added and subtracted."""
    plus, minus = optimal(values + change, tolerance), optimal(values - change, tolerance)
    return (optimal(values, tolerance).sum(axis=-1) > 1) & ~(plus & minus).any(axis=-1)


def degenerate(values: np.ndarray, classes: np.ndarray, tolerance: float = EXACT) -> np.ndarray:
    """`bool[...]`: the tied actions belong to two `classes i[..., A]` of behaviour or more, so the reward does not decide."""
    best = optimal(values, tolerance)
    lowest = np.where(best, classes, np.iinfo(np.int64).max).min(axis=-1)
    highest = np.where(best, classes, np.iinfo(np.int64).min).max(axis=-1)
    return lowest < highest
