"""XRPO: rollouts in rounds for the prompts whose mean reward is most uncertain (arXiv 2510.06672; reconstructed)."""
import functools

import numpy as np

from jaxrl_llm.topologies.rules import Rule, rule


def half_width(std: np.ndarray, n: np.ndarray, *, alpha: float = 0.05) -> np.ndarray:
    """f64[P]: `t_(1 - alpha/2, n - 1) s / sqrt(n)`, of the interval of a mean of n >= 2 rewards with sample std s."""
    return np.array([_quantile(1 - alpha / 2, int(count) - 1) for count in n]) * std / np.sqrt(n)


def priority(std: np.ndarray, n: np.ndarray, *, alpha: float = 0.05, explore: float = 0.05) -> np.ndarray:
    """f64[P]: `h(s, n) - h(s, n + 1) + explore sqrt(log(1 + T) / n)`, h the `half_width`, T all rollouts so far."""
    shrink = half_width(std, n, alpha=alpha) - half_width(std, n + 1, alpha=alpha)
    return shrink + explore * np.sqrt(np.log1p(n.sum()) / n)


def block(std: np.ndarray, n: np.ndarray, size: int, most: int, *, unit: int = 1, alpha: float = 0.05, explore: float = 0.05
          ) -> np.ndarray:
    """i64[P]: `size` rollouts, `unit` at a time for the prompt of highest `priority`, with s fixed; ties: the first.

    A prompt gets at most `most` in total, including its `n`.
    """
    n, added = np.asarray(n, np.int64).copy(), np.zeros(len(n), np.int64)
    for _ in range(size // unit):
        open_ = n + unit <= most
        if not open_.any():
            break
        best = int(np.argmax(np.where(open_, priority(std, n, alpha=alpha, explore=explore), -np.inf)))
        n[best] += unit
        added[best] += unit
    return added


@rule
def xrpo_allocation(*, mean: float = 2.0, blocks: int = 2, alpha: float = 0.05, explore: float = 0.05) -> Rule:
    """A first group for every prompt, then `block`s, a group at a time, until there are `mean` groups per prompt on average.

    There are `blocks` of equal size; the last takes the remainder. Paper and code give neither the numbers nor the meaning of
    T: both are our choice, with common values for alpha and explore. Raises ValueError: fewer than one group per prompt, or no
    block.
    """
    if mean < 1 or blocks < 1:
        raise ValueError(f"mean={mean} groups a prompt in blocks={blocks}; give 1 or more of both")

    def more(rewards, valid, first, most):
        n = valid.sum(1)
        total = int(mean * len(n)) * first
        share = max(-(-(total // first - len(n)) // blocks), 1) * first  # a block has whole groups
        left = min(total - int(n.sum()), share)
        if left <= 0:
            return np.zeros(len(n), np.int64)
        centre = np.sum(rewards, axis=1, where=valid, keepdims=True) / np.maximum(n, 1)[:, None]  # all may be lost
        std = np.sqrt(np.sum((rewards - centre)**2, axis=1, where=valid) / np.maximum(n - 1, 1))
        return block(std, np.maximum(n, 2), left, most, unit=first, alpha=alpha, explore=explore)

    return Rule(more, mean=mean)


@functools.cache
def _quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t distribution, by scipy, which jax installs."""
    from scipy.special import stdtrit
    return float(stdtrit(freedom, share))
