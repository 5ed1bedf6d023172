"""Tinker's examples as the learner's packed rows and rollouts: each is a prompt of one token with one completion."""
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.contrib.tinker.losses import MARK, OF_TOKENS, WEIGHTS
from jaxrl_llm.data.packing import Packed, apart, of_groups, pack, with_targets
from jaxrl_llm.data.rollouts import Rollouts

_SHORTEST = 32  # slots of a row, and tokens of a view
_BLOCK = 16  # budgets of slots that are packed together, which bounds the arrays of the host


class Datum(NamedTuple):
    """A training example.

    tokens: i32[n], what the model reads.  targets: i32[n], the token after each of them whose log-prob is taken.
    fields: name -> f32[n], further inputs of a loss, see `losses`.
    """

    tokens: np.ndarray
    targets: np.ndarray
    fields: Mapping[str, np.ndarray]


class MicroBatch(NamedTuple):
    """Some examples in rows of their own.

    numbers: which examples these are.  packed: their rows, with an index `i32[D, 1, T]`.  rollouts, advantages: `[D, 1, T]`
    views, filled up with rollouts that are not valid. D and T are powers of two, so that few programs are compiled.
    """

    numbers: list[int]
    packed: Packed
    rollouts: Rollouts
    advantages: np.ndarray


def micro_batches(data: Sequence[Datum], budget: int, shards: int = 1) -> Iterator[MicroBatch]:
    """Micro-batches of at most `budget` slots, or of `shards` rows, of which each device takes one, if these have more.

    All rows are as long as a power of two that holds the longest example; their number is a power of two times `shards`.
    """
    left = sorted(range(len(data)), key=lambda i: -len(data[i].tokens))
    length = _power(len(data[left[0]].tokens) + 1)
    while left:
        count = max(1, _BLOCK * budget // len(data[left[0]].tokens))
        block, left = left[:count], left[count:]
        packed, size = _packed([data[i] for i in block], length), shards
        while size < len(packed.node) and 2 * size * length <= budget:
            size *= 2
        for which, part in apart(packed, size):
            numbers = [block[i] for i in which]
            several = shards * _power(-(-len(numbers) // shards), 1)
            index = np.pad(part.index, ((0, several - len(numbers)), (0, 0), (0, 0)), constant_values=-1)
            view = view_of([data[i].fields for i in numbers], index.shape)
            yield MicroBatch(numbers, Packed(part.rows, part.node, index, part.root), *view)


def _packed(data: Sequence[Datum], length: int) -> Packed:
    """The rows of these examples: the model reads their tokens and, behind them, the last target, which nothing follows."""
    sizes = np.array([len(one.tokens) for one in data])
    shape = len(data), 1, _power(max(sizes.tolist()))
    there, first = np.arange(shape[2]) < sizes[:, None, None], np.array([one.tokens[:1] for one in data])
    read, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    targets[there] = np.concatenate([one.targets for one in data])
    read[there] = np.concatenate([x for one in data for x in (one.tokens[1:], one.targets[-1:])])
    packed = with_targets(pack(*of_groups(first, np.ones(first.shape, bool), read, there), there, [length]), targets)
    # Nobody reads the state of the last target: its position stays one that the model has, however long the example is.
    positions = np.minimum(packed.rows.positions, max(sizes.tolist()) - 1)
    # Branches that skip chunks of logits would hide from the compiler that nobody reads entropies, nor the gradient of the
    # frozen unembedding.
    return dataclasses.replace(packed, rows=packed.rows._replace(wanted=None, positions=positions))


def view_of(fields: Sequence[Mapping[str, np.ndarray]], shape: tuple[int, ...]) -> tuple[Rollouts, np.ndarray]:
    """Rollouts with the fields of examples, all of the same names, and advantages; `MARK` or else the weights are the mask."""
    arrays = {name: np.zeros(shape, np.float32) for name in fields[0]}
    for i, one in enumerate(fields):
        for name, values in one.items():
            arrays[name][i, 0, :len(values)] = values
    q, advantages = arrays.pop("logprobs", None), arrays.pop("advantages", np.ones(shape, np.float32))
    mask = arrays.pop(MARK, arrays[WEIGHTS]) != 0
    known: dict[str, Any] = {"behavior_logprobs": q, "old_logprobs": q}
    known |= {name: x for name, x in arrays.items() if name in OF_TOKENS}
    extras: dict[str, Any] = {name: x for name, x in arrays.items() if name not in OF_TOKENS}
    return Rollouts(mask=mask, valid=mask.any(-1), **known, extras=extras), advantages


def _power(least: int, start: int = _SHORTEST) -> int:
    """The first of `start`, twice `start` and so on that is at least `least`."""
    return start << max(-(-least // start) - 1, 0).bit_length()
