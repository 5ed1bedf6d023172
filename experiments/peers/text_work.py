"""The texts of which supervised updates are timed: random tokens, lengths that vary tenfold, the last half of each trained."""
import os

import numpy as np

VOCABULARY = 49152  # of SmolLM2


def texts(count: int, shortest: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """`(ids, labels)` i32[N] of each text, labels -100 where a token is not trained; lengths from `shortest` to 10 times it."""
    rng = np.random.default_rng(0)
    made = []
    for length in rng.permutation(np.geomspace(shortest, 10 * shortest, count).round().astype(int)):
        ids = rng.integers(100, VOCABULARY, length, dtype=np.int32)
        made.append((ids, np.where(np.arange(length) < length // 2, -100, ids)))
    return made


def from_environment() -> list[tuple[np.ndarray, np.ndarray]]:
    """The texts that the benchmark asks a peer for."""
    return texts(int(os.environ["COUNT"]), int(os.environ["SHORTEST"]))
