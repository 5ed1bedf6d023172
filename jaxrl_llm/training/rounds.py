"""Groups of unequal size: draws in rounds for the prompts that want more, and updates that pay only for what was drawn."""
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxrl_llm.rollouts import Rollouts
from jaxrl_llm.training.rollout import Sampled, select, total_failures


def in_rounds(draw: Callable[[np.ndarray], Sampled], wants: Callable[[np.ndarray, np.ndarray], np.ndarray], prompts: int,
              rounds: int) -> tuple[Sampled, np.ndarray]:
    """`(sampled, valid bool[P, G])` after at most `rounds` rounds; G is the size of the largest group.

    `draw(rows i32[R])` samples one more group for each of these of the P prompts, the first time for all of them;
    `wants(rewards f32[P, G], valid) -> bool[P]` says who draws again, for instance `values.v0_5.wants_more`.
    """
    everyone = np.arange(prompts)
    sampled = draw(everyone)
    valid = np.ones(sampled.rewards.shape, bool)
    for _ in range(1, rounds):
        rows = np.flatnonzero(np.asarray(wants(sampled.rewards, valid)))
        if not len(rows):
            break
        sampled, valid = append(sampled, valid, draw(rows), rows)
    return sampled, valid


def append(sampled: Sampled, valid: np.ndarray, extra: Sampled, rows: np.ndarray) -> tuple[Sampled, np.ndarray]:
    """The draws of P prompts with `extra`, those of the prompts `rows`, behind them; what others lack is not valid."""
    (P, G), g = valid.shape, extra.rewards.shape[1]

    def behind(x, y, fill=0):  # [P, G, ...] and [R, g, ...]
        more = np.full((P, g, *x.shape[2:]), fill, x.dtype)
        more[rows] = y
        return np.concatenate([x, more], axis=1)

    def texts(x, y, fill):  # P * G and R * g entries
        grid = [[fill] * g for _ in range(P)]
        for place, row in enumerate(rows):
            grid[row] = list(y[place * g:(place + 1) * g])
        return [entry for p in range(P) for entry in (*x[p * G:(p + 1) * G], *grid[p])]

    steps = sampled.completions.decode_steps + extra.completions.decode_steps
    completions = jax.tree.map(lambda x, y: behind(x, y) if np.ndim(x) else steps, sampled.completions, extra.completions)
    failures = total_failures((sampled.scores.failures, extra.scores.failures))
    parts = sampled.scores.components.shape[1]
    components = behind(sampled.scores.components.reshape(P, G, parts), extra.scores.components.reshape(-1, g, parts))
    scores = sampled.scores._replace(total=behind(sampled.rewards, extra.rewards).reshape(-1),
                                     components=components.reshape(-1, parts), failures=failures)
    answers = sampled.answers and texts(sampled.answers, extra.answers, None)
    drawn = dataclasses.replace(sampled, completions=completions, scores=scores, answers=answers,
                                texts=texts(sampled.texts, extra.texts, ""), uids=behind(sampled.uids, extra.uids, -1))
    return drawn, behind(valid, np.ones((len(rows), g), bool))


def merge(sampled: Sampled, owner: np.ndarray) -> tuple[Sampled, np.ndarray]:
    """Rows of one prompt as one group: `[R, g, ...] -> [P, G, ...]`, `owner i32[R]` saying whose each row is.

    Prompts come in the order of their first rows. Returns `(sampled, valid bool[P, G])`, G the size of the largest group.
    """
    turn = np.array([np.sum(owner[:row] == one) for row, one in enumerate(owner)])
    merged, prompts = select(sampled, turn == 0), owner[turn == 0].tolist()
    valid = np.ones(merged.rewards.shape, bool)
    for number in range(1, turn.max() + 1):
        extra = select(sampled, turn == number)  # what is told of the whole batch is counted with the first rows
        extra = dataclasses.replace(extra, scores=extra.scores._replace(failures={}),
                                    completions=extra.completions.replace(decode_steps=0))
        merged, valid = append(merged, valid, extra, np.array([prompts.index(one) for one in owner[turn == number]]))
    return merged, valid


def widen(sampled: Sampled, valid: np.ndarray, size: int) -> Sampled:
    """The draws with room for `size` of every prompt, `[P, G, ...] -> [P, size, ...]`; what is added is not valid."""
    room = size - valid.shape[1]
    if room:
        parts = sampled.scores.components.shape[1]
        completions = jax.tree.map(lambda x: np.zeros((0, room, *x.shape[2:]), x.dtype) if np.ndim(x) else np.zeros_like(x),
                                   sampled.completions)
        scores = sampled.scores._replace(total=np.zeros(0), components=np.zeros((0, parts)), failures={})
        nothing = dataclasses.replace(sampled, completions=completions, scores=scores, texts=[], answers=[],
                                      uids=np.zeros((0, room), np.int64))
        sampled, valid = append(sampled, valid, nothing, np.arange(0))
    return dataclasses.replace(sampled, valid=valid)


def regroup(rollouts: Rollouts, advantages, size: int, multiple: int) -> tuple[Rollouts, np.ndarray]:
    """The same rollouts in rows of at most `size`, without the rows that hold none: `[P, G, ...] -> [R, size, ...]`.

    To be called when the advantages are known, which need whole groups. R is filled up to a `multiple` with rows that are not
    valid, so that few shapes compile. Means over tokens or rollouts stay what they were, a mean over prompts would not.
    Raises ValueError when `size` does not divide G.
    """
    P, G = rollouts.valid.shape
    if G % size:
        raise ValueError(f"groups of up to {G} rollouts do not split into rows of {size}")
    first = np.argsort(~np.asarray(rollouts.valid), axis=1, kind="stable").reshape(-1, size)  # valid ones, wherever they are
    owner = np.repeat(np.arange(P), G // size)
    chosen = np.flatnonzero(np.asarray(rollouts.valid)[owner[:, None], first].any(axis=1))
    total = max(-(-len(chosen) // multiple), 1) * multiple
    index = np.concatenate([chosen, np.zeros(total - len(chosen), int)])
    owner, first = owner[index], first[index]

    def cut(x):
        x = np.asarray(x)
        return x[owner[:, None], first] if x.ndim > 1 and x.shape[1] == G else x[owner]

    per_prompt = {name: getattr(rollouts, name) for name in ("prompt_tokens", "prompt_mask")}  # S may equal G
    split = jax.tree.map(cut, rollouts.replace(prompt_tokens=None, prompt_mask=None))
    whole = {name: None if x is None else np.asarray(x)[owner] for name, x in per_prompt.items()}
    valid = split.valid & (np.arange(total) < len(chosen))[:, None]
    return split.replace(valid=valid, **whole), cut(advantages)
