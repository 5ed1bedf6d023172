"""Texts and rewards of completions, divided among the processes of a run."""
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.generation.sampler import Completions
from jaxrl_llm.rewards import ByTask, Combined, Scores
from jaxrl_llm.rewards.text import through_stop_string
from jaxrl_llm.tasks.base import Problem


def cut_at_stop_strings(rows: Sequence[np.ndarray], tokenizer, stop_strings: Sequence[str]) -> np.ndarray:
    """i64[N]: the tokens to keep of rows that contain a stop string, through the one that completes it."""
    low, high = np.ones(len(rows), np.int64), np.array([len(row) for row in rows], np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        texts = tokenizer.decode_batch([row[:n] for row, n in zip(rows, middle)])
        reached = np.array([any(stop in text for stop in stop_strings) for text in texts])
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low


def decode(completions: Completions, tokenizer, stop_strings: Sequence[str] = ()) -> tuple[Completions, list[str]]:
    """Texts of all rows; rows that contain a stop string are cut behind it, as is their text, and count as stopped."""
    P, G, T = completions.mask.shape
    mask, stopped = np.array(completions.mask).reshape(-1, T), np.array(completions.stopped).reshape(-1)
    tokens = np.asarray(completions.tokens).reshape(-1, T)
    rows = [row[:length] for row, length in zip(tokens, mask.sum(-1))]
    texts = spelled(rows, tokenizer)
    hits = [i for i, text in enumerate(texts) if any(stop in text for stop in stop_strings)]
    for i, kept in zip(hits, cut_at_stop_strings([rows[i] for i in hits], tokenizer, stop_strings)):
        mask[i, kept:], stopped[i] = False, True
        texts[i] = through_stop_string(texts[i], stop_strings)
    return completions.replace(mask=mask.reshape(P, G, T), stopped=stopped.reshape(P, G)), texts


def spelled(rows: Sequence[np.ndarray | Sequence[int]], tokenizer) -> list[str]:
    """The text of each row of tokens, without an end token of the tokenizer at its end."""
    return tokenizer.decode_batch([row[:-1] if len(row) and int(row[-1]) in tokenizer.end_ids else row for row in rows])


def shared_scores(reward: Combined | ByTask, texts: Sequence[str], problems: Sequence[Problem], lengths: np.ndarray,
                  spent: np.ndarray | float = 0.0) -> Scores:
    """The scores of these rows. Each of several processes scores its share, and all get the whole.

    If a reward sees the whole batch at once, the first process scores all of it. `spent` f64[K]: see `rewards.Combined`.
    """
    def score(rows):
        if not len(rows):
            return Scores(np.zeros(0, np.float32), np.zeros((0, len(reward.names)), np.float32), reward.names, {})
        chosen = [problems[i] for i in rows]
        return reward([texts[i] for i in rows], [p.answer for p in chosen], chosen, lengths[rows], spent)

    if not parallel.several():
        return score(np.arange(len(texts)))
    count, everything = jax.process_count(), np.arange(len(texts))
    shares = np.array_split(everything, count) if reward.by_row else [everything] + [everything[:0]] * (count - 1)
    mine = score(shares[jax.process_index()])
    room = (0, len(shares[0]) - len(mine.total))  # the first share is among the longest
    real = np.concatenate([np.arange(len(shares[0])) < len(share) for share in shares])
    failures = total_failures(parallel.gather_objects({name: int(number) for name, number in mine.failures.items()}))
    total, components = np.pad(mine.total, room), np.pad(mine.components, (room, (0, 0)))
    return Scores(parallel.gather(total)[real], parallel.gather(components)[real], mine.names, failures, mine.seconds)


def joined(parts: Sequence[Scores]) -> Scores:
    """Scores of successive parts of a batch as one."""
    total, components, names, failures, seconds = zip(*parts)
    return Scores(np.concatenate(total), np.concatenate(components), names[0], total_failures(failures), sum(seconds))


def total_failures(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Failures of several batches of scores by name."""
    total: Counter = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
