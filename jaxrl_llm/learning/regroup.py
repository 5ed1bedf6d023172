"""Groups of unequal size in rows of one size: an update computes only sampled rollouts."""
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_llm.data.ladders import smallest
from jaxrl_llm.data.rollouts import Rollouts


def regroup(rollouts: Rollouts, advantages, size: int, counts: Sequence[int]) -> tuple[Rollouts, np.ndarray]:
    """The same rollouts in rows of at most `size`, without empty rows: `[P, G, ...] -> [R, size, ...]`.

    Call it after the advantages are computed, which need whole groups. R is the smallest of `counts` that holds the rows,
    padded with rows that are not valid, so that few shapes compile. Means over tokens or rollouts do not change, but a mean
    over prompts would.
    """
    (P, G), missing = rollouts.valid.shape, -rollouts.valid.shape[1] % size
    there = np.pad(np.asarray(rollouts.valid), ((0, 0), (0, missing)))
    first = np.argsort(~there, axis=1, kind="stable").reshape(-1, size)  # valid ones first
    owner = np.repeat(np.arange(P), (G + missing) // size)
    chosen = np.flatnonzero(there[owner[:, None], first].any(axis=1))
    total = smallest(counts, len(chosen))
    index = np.concatenate([chosen, np.zeros(total - len(chosen), int)])
    owner, first = owner[index], first[index]

    def cut(x):
        x = np.asarray(x)
        if x.ndim < 2 or x.shape[1] != G:
            return x[owner]
        return np.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))[owner[:, None], first]

    per_prompt = {name: getattr(rollouts, name) for name in ("prompt_tokens", "prompt_mask")}  # S may equal G
    split = jax.tree.map(cut, rollouts.replace(prompt_tokens=None, prompt_mask=None))
    whole = {name: None if x is None else np.asarray(x)[owner] for name, x in per_prompt.items()}
    valid = split.valid & (np.arange(total) < len(chosen))[:, None]
    return split.replace(valid=valid, **whole), cut(advantages)
