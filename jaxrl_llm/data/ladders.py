"""Ladders of sizes: what varies is padded to one of a few, since every size is a program to compile."""
from collections.abc import Sequence

QUARTERS = 4  # maximum number of sizes of one kind


def buckets(limit: int, count: int, multiple: int = 1) -> tuple[int, ...]:
    """At most `count` sizes, equal parts of the limit rounded up to multiples of `multiple`."""
    return tuple(sorted({min(limit, -(-limit * part // (count * multiple)) * multiple) for part in range(1, count + 1)}))


def prompt_buckets(longest: int, count: int = QUARTERS) -> tuple[int, ...]:
    """Lengths of prompts in multiples of 64; sampling uses quarters of the longest."""
    return buckets(longest, count, 64)


def smallest(ladder: Sequence[int], need: int) -> int:
    """The first of the sizes that holds `need`."""
    return next(size for size in ladder if size >= need)


def mean_rung(ladder: Sequence[int]) -> float:
    """The mean of `smallest` for needs uniformly distributed from 1 to the last of the sizes."""
    return sum((size - below) * size for below, size in zip((0, *ladder), ladder)) / ladder[-1]
