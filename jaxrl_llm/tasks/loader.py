"""An endless order of problems, shuffled or chosen, shared by processes, with a position that can be saved and restored."""
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.mixture import Mixed

_LABELS = ("tests", "answers", "box", "image", "files", "new_files")  # what rewards read of `Problem.extra`
_EPOCHS = 2**31  # for ever; an order without a number of repetitions cannot be mixed


class Batches:
    """An endless order of problems: `take(n)` is the next n of them, and iteration goes through batches of `size`.

    `get_state()` is a small JSON-able dict, `set_state` continues from there. Problems that are `chosen` do not change the
    position in the order.
    """

    def __init__(self, source: Sequence[Problem], share: slice, order: Sequence[Problem], identity: dict[str, Any]):
        self._source, self._share, self._order, self._identity = source, share, order, identity
        self._next = self._draws = 0

    def __iter__(self):
        return self

    def __next__(self) -> list[Problem]:
        return self.take(self.size)

    @property
    def size(self) -> int:
        """Number of problems of a batch, over all processes together."""
        return self._identity["batch_size"]

    @property
    def number(self) -> int:
        """Number of the next draw, counting those that were chosen."""
        return self._draws

    def take(self, count: int) -> list[Problem]:
        """This process's share of the next `count` problems of all processes together."""
        problems = [self._order[place] for place in range(self._next, self._next + count)[self._share]]
        self._next, self._draws = self._next + count, self._draws + 1
        return problems

    def chosen(self, ids: np.ndarray) -> list[Problem]:
        """This process's share of these problems, `ids` i64[n]; IndexError where there is no such problem."""
        problems = [self._source[int(i)] for i in ids[self._share]]
        self._draws += 1
        return problems

    def get_state(self) -> dict[str, Any]:
        return {"next_problem": self._next, "draws": self._draws, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the state belongs to other data, another seed or another batch size."""
        for key, value in self._identity.items():
            if key == "digest" and state.get(key, value) != value:  # positions of earlier releases have none
                raise ValueError("the training problems, or given texts, have other prompts or answers, or what rewards read "
                                 "in their place, than those of the saved run, or another order; restore with the same "
                                 "data, or start a new run")
            if key != "digest" and state.get(key) != value:
                raise ValueError(f"the saved data position has {key}={state.get(key)}, this run has {key}={value}; "
                                 "restore with the same data, seed and batch size")
        self._next, self._draws = state["next_problem"], state["draws"]


def batches(source: Sequence[Problem], batch_size: int, seed: int, process_index: int = 0, process_count: int = 1) -> Batches:
    """Problems in batches of `batch_size`, over all processes together; each process yields `batch_size / process_count`.

    The problems form one endless stream: a new permutation every epoch, each epoch having every problem exactly once; a
    batch may span two epochs, so any batch size works. Process `i` of `n` gets problems `i, i + n, ...` of every batch, and
    of everything that is taken: which problems these are, and the saved state, do not depend on the number of processes. With
    several tasks each has its own stream, and the streams take turns by the tasks' weights: with equal weights every batch has
    equally many problems of each task, and tasks take turns at the remainder (QwenLong-L1.5, arXiv 2512.12967). Raises
    ValueError for an empty source or a batch size that the processes cannot share equally.
    """
    import grain

    if len(source) == 0:
        raise ValueError("the source has no problems; check the file, split or filter that it was made from")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index} is not in 0..{process_count - 1}")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(f"batch_size={batch_size} problems cannot be shared by {process_count} processes; "
                         f"use a positive multiple of {process_count}")
    identity: dict[str, Any] = {"problems": len(source), "seed": seed, "batch_size": batch_size, "digest": digest(source)}
    if isinstance(source, Mixed):
        identity["tasks"] = [[len(side), weight] for side, weight in zip(source.sides, source.weights)]
        numbers = [grain.MapDataset.source(range(first, last)).seed(seed + k).shuffle().repeat(_EPOCHS)
                   for k, (first, last) in enumerate(itertools.pairwise(source.starts))]
        order = grain.MapDataset.mix(numbers, weights=source.weights).map(source.__getitem__)
    else:
        order = grain.MapDataset.source(source).seed(seed).shuffle().repeat(_EPOCHS)
    return Batches(source, slice(process_index, None, process_count), order, identity)


def digest(problems: Iterable[Problem]) -> str:
    """A number that prompts, answers and what else rewards compare with determine, in their order.

    The order of keys does not count: a table has another one than a JSONL file. Some data sets of reasoning_gym are made anew
    by each process from the same seed; the name and options count for them.
    """
    found = hashlib.blake2b(digest_size=16)
    for problem in problems:
        labels = {name: problem.extra[name] for name in _LABELS if name in problem.extra}
        known = problem.extra.get("gym") or (problem.prompt, problem.answer, labels)
        found.update(json.dumps(known, sort_keys=True, default=repr).encode())
    return found.hexdigest()


def tasks_of(problems: Sequence[Problem]) -> tuple[np.ndarray, np.ndarray]:
    """`(i32[N], f32[T])`: the task of each problem, and the tasks' weights; one task of weight 1 if there are no others."""
    if not isinstance(problems, Mixed):
        return np.zeros(len(problems), np.int32), np.ones(1, np.float32)
    return np.repeat(np.arange(len(problems.sides), dtype=np.int32), [len(side) for side in problems.sides]), np.asarray(
        problems.weights, np.float32)


def evenly(problems: Sequence[Problem]) -> np.ndarray:
    """f64[N], the weight of each problem with which tasks have their shares: their weights over their numbers of problems."""
    tasks, weights = tasks_of(problems)
    return (weights / np.maximum(np.bincount(tasks, minlength=len(weights)), 1))[tasks]


def levels_of(problems: Sequence[Problem]) -> np.ndarray:
    """i32[N], the level of each problem as a number from 0: levels that are numbers by value, else as they first appear."""
    names = [problem.level for problem in (problems[i] for i in range(len(problems)))]
    levels = list(dict.fromkeys(names))
    try:
        levels = sorted(levels, key=float)
    except ValueError:  # words, which have no order of their own
        pass
    place = {name: number for number, name in enumerate(levels)}
    return np.array([place[name] for name in names], np.int32)


def drawn(seed: np.ndarray, count: int, weights: np.ndarray, base: np.ndarray | float = 1.0) -> np.ndarray:
    """i64[count]: problems in proportion to `weights * base`, f[N], without replacement (Gumbel top-k, arXiv 1903.06059).

    If fewer than `count` have a weight above 0, all of them are drawn before one is repeated; if none has, `base` alone
    decides. A longer draw begins like a shorter one. `seed` holds integers. Raises ValueError for weights that are negative or
    not finite.
    """
    weights = np.asarray(weights, np.float64)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise ValueError("prompt_weights must be finite and not negative")
    weights = (weights if weights.any() else np.ones_like(weights)) * base
    having = np.flatnonzero(weights)
    noise = np.random.default_rng(seed).gumbel(size=(-(-count // len(having)), len(having)))
    order = np.argsort(-(np.log(weights[having]) + noise), axis=1)
    return having[order].reshape(-1)[:count]
