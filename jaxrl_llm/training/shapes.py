"""The few shapes that a run compiles for, and which of them holds a batch."""
import numpy as np

from jaxrl_llm.models.unpadding import through_last


def buckets(max_tokens: int) -> list[int]:
    """The completion lengths that the learner compiles for: quarters of the limit."""
    return sorted({-(-max_tokens * quarter // 4) for quarter in (1, 2, 3, 4)})


def bucket_of(longest: int, max_tokens: int) -> int:
    """Smallest of a quarter, half, three quarters and all of `max_tokens` that holds `longest` tokens."""
    return next(b for b in buckets(max_tokens) if b >= longest)


def prompt_buckets(longest: int) -> list[int]:
    """The prompt lengths that a run compiles for: quarters of the longest, in multiples of 64."""
    return sorted({min(longest, -(-longest * quarter // 256) * 64) for quarter in (1, 2, 3, 4)})


def prompt_bucket_of(longest: int, limit: int) -> int:
    """Smallest of `prompt_buckets(limit)` that holds `longest` tokens."""
    return next(b for b in prompt_buckets(limit) if b >= longest)


def quarters_filled(mask: np.ndarray, prompts: int) -> int:
    """Smallest n of 1 to 4 such that of no `prompts` prompts more than n quarters of the slots `[prompts, G, T]` are filled.

    `mask bool[P, G, T]`. What holds for parts of so many prompts holds for all larger ones, in any order.
    """
    fullest = np.sort(through_last(mask).sum((1, 2)))[::-1][:prompts].sum()
    return max(1, int(-(-4 * fullest // (prompts * mask[0].size))))
