"""Texts and rewards of completions, shared out among the processes of a run."""
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.generation.sampler import Completions
from jaxrl_llm.rewards import Combined, Scores
from jaxrl_llm.tasks.base import Problem


def cut_at_stop_strings(ids: list[int], tokenizer, stop_strings: Sequence[str]) -> tuple[int, str] | None:
    """Tokens to keep (through the one that completes a stop string) and the text before it; None without a hit."""
    text = tokenizer.decode(ids)
    hits = [text.find(stop) for stop in stop_strings if stop in text]
    if not hits:
        return None
    reached = lambda n: any(stop in tokenizer.decode(ids[:n]) for stop in stop_strings)  # noqa: E731
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle + 1, high)
    return low, text[:min(hits)]


def decode(completions: Completions, tokenizer, stop_strings: Sequence[str] = ()) -> tuple[Completions, list[str]]:
    """Texts of all rows; rows that contain a stop string are cut there and count as stopped."""
    P, G, _ = completions.mask.shape
    mask, stopped = np.array(completions.mask), np.array(completions.stopped)
    lengths = mask.sum(-1)
    texts = []
    for p, g in np.ndindex(P, G):
        ids = completions.tokens[p, g, :lengths[p, g] - int(stopped[p, g])].tolist()
        cut = cut_at_stop_strings(ids, tokenizer, stop_strings) if stop_strings else None
        if cut is not None:
            mask[p, g, cut[0]:] = False
            stopped[p, g] = True
        texts.append(tokenizer.decode(ids) if cut is None else cut[1])
    return completions.replace(mask=mask, stopped=stopped), texts


def shared_scores(reward: Combined, texts: Sequence[str], problems: Sequence[Problem], lengths: np.ndarray) -> Scores:
    """The scores of these rows. Of several processes each scores its share, and all get the whole.

    Where a reward sees the whole batch at once the first scores all of it.
    """
    def score(rows):
        if not len(rows):
            names = tuple(part.name for part in reward.rewards)
            return Scores(np.zeros(0, np.float32), np.zeros((0, len(names)), np.float32), names, {})
        chosen = [problems[i] for i in rows]
        return reward([texts[i] for i in rows], [p.answer for p in chosen], chosen, lengths[rows])

    if not parallel.several():
        return score(np.arange(len(texts)))
    count, everything = jax.process_count(), np.arange(len(texts))
    by_row = all(part.by_row for part in reward.rewards)
    shares = np.array_split(everything, count) if by_row else [everything] + [everything[:0]] * (count - 1)
    mine = score(shares[jax.process_index()])
    room = (0, len(shares[0]) - len(mine.total))  # the first share is among the longest
    real = np.concatenate([np.arange(len(shares[0])) < len(share) for share in shares])
    failures = total_failures(parallel.gather_objects({name: int(number) for name, number in mine.failures.items()}))
    total, components = np.pad(mine.total, room), np.pad(mine.components, (room, (0, 0)))
    return Scores(parallel.gather(total)[real], parallel.gather(components)[real], mine.names, failures)


def total_failures(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Failures of several batches of scores by name."""
    total: Counter = Counter()
    for found in counts:
        total.update(found)
    return dict(total)
