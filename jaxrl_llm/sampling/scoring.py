"""Texts and rewards of completions, divided among the processes of a run."""
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.engines.stopping import StopSearch
from jaxrl_llm.rewards import ByTask, Combined, Scores
from jaxrl_llm.rewards.text import through_stop_string
from jaxrl_llm.tasks.base import Problem


def cut_and_spelled(rows: Sequence[np.ndarray], tokenizer, stop_strings: Sequence[str] = ()
                    ) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """`(tokens to keep i64[N], whether a stop string ended it bool[N], texts)` of rows, cut behind their first stop string."""
    kept, texts = np.array([len(row) for row in rows], np.int64), spelled(rows, tokenizer)
    hits = [i for i, text in enumerate(texts) if any(stop in text for stop in stop_strings)]
    for i in hits:
        kept[i] = StopSearch((), stop_strings, tokenizer).feed(rows[i].tolist())
        texts[i] = through_stop_string(texts[i], stop_strings)
    return kept, np.isin(np.arange(len(rows)), hits), texts


def spelled(rows: Sequence[np.ndarray | Sequence[int]], tokenizer) -> list[str]:
    """The text of each row of tokens, without an end token of the tokenizer at its end."""
    return tokenizer.decode_batch([row[:-1] if len(row) and int(row[-1]) in tokenizer.end_ids else row for row in rows])


def scores_of(reward: Combined | ByTask, texts: Sequence[str], problems: Sequence[Problem], lengths: np.ndarray,
              spent: np.ndarray | float = 0.0) -> Scores:
    """The scores of these rows; `spent` f64[K]: see `rewards.Combined`."""
    if not len(texts):
        return Scores(np.zeros(0, np.float32), np.zeros((0, len(reward.names)), np.float32), reward.names, {})
    return reward(texts, [p.answer for p in problems], problems, lengths.tolist(), spent)


def shared_scores(reward: Combined | ByTask, texts: Sequence[str], problems: Sequence[Problem], lengths: np.ndarray,
                  spent: np.ndarray | float = 0.0) -> Scores:
    """The same. Each of several processes scores its share, and all get the whole.

    If a reward sees the whole batch at once, the first process scores all of it.
    """
    if not parallel.several():
        return scores_of(reward, texts, problems, lengths, spent)
    count, everything = jax.process_count(), np.arange(len(texts))
    shares = np.array_split(everything, count) if reward.by_row else [everything] + [everything[:0]] * (count - 1)
    own = shares[jax.process_index()]
    mine = scores_of(reward, [texts[i] for i in own], [problems[i] for i in own], lengths[own], spent)
    room = (0, len(shares[0]) - len(mine.total))  # the first share is among the longest
    real = np.concatenate([np.arange(len(shares[0])) < len(share) for share in shares])
    failures = total_failures(parallel.gather_objects({name: int(number) for name, number in mine.failures.items()}))
    total, components = np.pad(mine.total, room), np.pad(mine.components, (room, (0, 0)))
    return Scores(parallel.gather(total)[real], parallel.gather(components)[real], mine.names, failures, mine.seconds)


def total_failures(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Failures of several batches of scores by name."""
    total: Counter = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
