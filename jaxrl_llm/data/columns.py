"""Declarations of columns: what a forest keeps about nodes, tokens and prompts, and where a view of trajectories shows it.

Forests, views, replay, checkpoints and engines go through declarations and name no column, so a new column needs a declaration
and whoever fills it.
"""
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
      name: its name in a forest.  of: what has one entry in it.  dtype: of an entry, object for anything but numbers.
      trailing: the shape of an entry.
      fill: the entry where nothing is known: of prompts and padding, and of tokens that nobody measured.
      to: whether a view shows it as a field of `Rollouts` or in its extras; None: not as it is.
      shown_as: its name there, if that is another one.
    """

    name: str
    of: Literal["node", "token", "prompt"]
    dtype: Any
    trailing: tuple[int, ...] = ()
    fill: Any = dataclasses.field(default=0, compare=False)
    to: Literal["field", "extras"] | None = None
    shown_as: str = ""

    def filled(self, count: int) -> np.ndarray:
        """`count` entries that are `fill`."""
        out = np.empty((count, *self.trailing), self.dtype)
        out[:] = [self.fill] * count if out.dtype == object else self.fill
        return out

    def array(self, values: Any, count: int) -> np.ndarray:
        """`count` entries with these values; ValueError for another number or shape."""
        if np.dtype(self.dtype) == object:
            out = np.empty(len(values), object)
            out[:] = values
        else:
            out = np.asarray(values).astype(self.dtype)
        if out.shape != (shape := (count, *self.trailing)):
            if out.size or count:
                raise ValueError(f"the column {self.name!r} has shape {list(out.shape)}; give {list(shape)}, an entry for each "
                                 f"new {self.of}")
            out = out.reshape(shape)
        return out


# What every forest keeps. The view itself computes what it shows of nodes and prompts.
NODES = (
    Column("uid", "node", np.int64, fill=-1), Column("parent", "node", np.int32, fill=-1), Column("prompt", "node", np.int32),
    Column("role", "node", np.int8), Column("length", "node", np.int32), Column("stopped", "node", bool),
    Column("rewards", "node", np.float32), Column("texts", "node", object, fill=""), Column("reads", "node", object, fill=None),
    Column("writer", "node", object, fill=""))
TOKENS = (
    Column("tokens", "token", np.int32, to="field"),
    Column("logprobs", "token", np.float32, to="field", shown_as="behavior_logprobs"),
    Column("entropies", "token", np.float32, to="field"),
    Column("version", "token", np.int32, fill=-1, to="field", shown_as="policy_version"))
PROMPTS = (Column("draw", "prompt", np.int32), Column("lost", "prompt", np.int32))
ANSWERS = Column("answers", "node", object, fill=None)
TURNS = (Column("turn_rewards", "node", np.float32), Column("turn_info", "node", object, fill={}))


def declared(columns: Iterable[Column]) -> tuple[Column, ...]:
    """The columns; ValueError if two have one name, in the forest or in what its view shows, or if a view shows objects."""
    columns = tuple(columns)
    for kind, names in (("", [column.name for column in columns]),
                        (" in rollouts", [column.shown_as or column.name for column in columns if column.to])):
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two columns have the name {min(twice)!r}{kind}; give each a name of its own")
    if hosts := [column.name for column in columns if column.to and np.dtype(column.dtype) == object]:
        raise ValueError(f"the column {hosts[0]!r} has objects, which rollouts cannot have; give it numbers, or to=None")
    return columns


def check_given(columns: Iterable[Column], given: Mapping[str, Any]) -> None:
    """Raises ValueError if one of these columns is not given."""
    if missing := [column for column in columns if column.name not in given]:
        first = missing[0]
        raise ValueError(f"the forest keeps the {first.of} column {first.name!r}, and it is not among those given: "
                         f"{', '.join(sorted(given))}; take an engine that provides it, or leave the column out")
