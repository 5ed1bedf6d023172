"""The parts that a row of the catalogue, or a configuration, names as text, and what is wrong with such a text."""
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm import advantages, control, objectives, recorders, replay, topologies
from jaxrl_llm.control import knobs
from jaxrl_llm.objectives import terms
from jaxrl_llm.objectives.schedules import ends, is_schedule
from jaxrl_llm.objectives.sums import misplaced
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import PartTable


class Named(NamedTuple):
    """A part by its name in a table, or "module:function", with the numbers that differ from its defaults."""

    name: str
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return written.written(self.name, self.numbers)


class Slot(NamedTuple):
    """What the text under a key names: a part of `table`, and `rest` for those after the first (None: of `table` too).

    `sign`: what separates several parts, "," or "+"; "": there is one. `together(parts, values of the run)` raises ValueError
    for parts that exclude others.
    """

    table: PartTable
    sign: str = ""
    rest: PartTable | None = None
    together: Callable[[Sequence[Named], Mapping[str, Any]], None] | None = None

    def tables(self, count: int) -> list[PartTable]:
        """The tables of `count` parts."""
        return [self.table, *[self.rest or self.table] * (count - 1)][:count]

    def read(self, text: str, table: PartTable) -> Named:
        """The part of a table that a text names; ValueError for a text that cannot be read."""
        return Named(*written.call(text, table.order))

    def check(self, part: Named, table: PartTable, of_the_run: Mapping[str, Any]) -> None:
        """Raises ValueError for an unknown name or number, and for a number outside its range.

        `of_the_run`: values of `PartTable.given`. Numbers of a loss may follow a schedule, whose ends are checked. Parts
        that runs alone can make are not made.
        """
        if not table.keywords:
            if found := table.faults(part.name, table.order(part.name), part.numbers):
                raise ValueError("; ".join(line.removesuffix(".") for line in found))
            return
        known = table.parameters(part.name)
        numbers = {key: value for key, value in of_the_run.items() if key in known} | part.numbers
        for key, value in part.numbers.items() if self.sign == "+" else ():
            if is_schedule(value) and key in known:
                numbers[key] = _unscheduled(part.name, table, key, value)
        table.make(part.name, **numbers)


def _unscheduled(name: str, table: PartTable, key: str, text: str) -> Any:
    """A number in the place of a schedule: its default, or 1.

    Raises ValueError for a text that is no schedule, one that ends outside the range of the number, and for what is no number.
    """
    default, bounds = table.parameters(name)[key].default, ends(text)
    if isinstance(default, str | bool):
        raise ValueError(f"{table.what} {name!r}: {key}={text!r}; numbers alone follow a schedule, and {key} is {default!r}")
    for end in bounds if name in table else ():
        table.check(name, key, end)
    return 1.0 if default is inspect.Parameter.empty else default


def _summed(named: Sequence[Named], of_the_run: Mapping[str, Any]) -> None:
    """Raises ValueError for a loss with two terms of one name, or with a number that cannot follow its schedule."""
    objectives.made(named, steps=1, **of_the_run)


def _steered(named: Sequence[Named], of_the_run: Mapping[str, Any]) -> None:
    """Raises ValueError for two controllers that set one knob, and one that observes steps and evaluations."""
    if found := knobs.at_odds({name: control.make(name, **numbers) for name, numbers in named}):
        raise ValueError("; ".join(found))


control.names()  # fills the tables of filters and controllers
SLOTS = {
    "estimator": Slot(advantages.base.ESTIMATORS),
    "objective": Slot(objectives.base.OBJECTIVES, "+", rest=terms.TERMS, together=_summed),
    "filters": Slot(control.FILTERS, ","),
    "controllers": Slot(control.CONTROLLERS, ",", together=_steered),
    "replay": Slot(replay.base.RULES),
    "replay_estimator": Slot(advantages.base.ESTIMATORS),
    "replay_objective": Slot(objectives.base.OBJECTIVES, "+", rest=terms.TERMS, together=_summed),
    "allocation": Slot(topologies.RULES),
    "guidance": Slot(topologies.TOPOLOGIES),
    "topology": Slot(topologies.TOPOLOGIES),
    "recorders": Slot(recorders.RECORDERS, ","),
}


def keys(c: ConfigDict) -> None:
    """Parts of the method, which change those of its row as docs/guides/method.md describes; empty: as the row has them."""
    c.estimator = ""                   # how rollouts are credited: "rloo", "eps=1e-4"
    c.objective = ""                   # "cispo(max_ratio=4) + kl(0.01)", "clip_high=0.3", "+ kl(linear(start=0.1, end=0))"
    c.filters = ""                     # "dynamic_sampling"; "none": the method's filters are left out
    c.controllers = ""                 # "pass_rate(at_least=32), siri", "every=50"
    c.replay = ""                      # "self_imitation(fill=1)", "capacity=512"
    c.replay_estimator = ""            # of rollouts that are replayed in updates of their own
    c.replay_objective = ""            # the same, e.g. "warmup=40"
    c.allocation = ""                  # which prompts get further rollouts: "dars(weighting=hardness)", "weighting=hardness"
    c.guidance = ""                    # which completions begin with traces: "experts(traces=2)", "high=0.5"
    c.topology = ""                    # who is sampled; empty: as the other parts imply
    c.recorders = ""                   # what is measured beyond what the parts read


@functools.cache
def parts(key: str, text: str) -> tuple[Named, ...]:
    """The parts that the text of an entry of `SLOTS` names, in its order.

    Raises ValueError for a text that cannot be read, several parts where the key has one, and a name that comes twice.
    """
    named = tuple(SLOTS[key].read(piece, table) for piece, table in pieces(key, text))
    names = [part.name for part in named]
    if SLOTS[key].sign == "," and (twice := sorted({name for name in names if names.count(name) > 1})):
        raise ValueError(f"{text!r} names {', '.join(twice)} more than once")
    return named


def pieces(key: str, text: str) -> list[tuple[str, PartTable]]:
    """The text of each part, with the table of its name; ValueError for several parts where the key has one."""
    slot = SLOTS[key]
    split = written.parts(text, slot.sign or ",")
    if slot.sign == "+" and text.rstrip().endswith("+"):
        raise ValueError(f"{text!r} ends with a sign and names no term behind it")
    if len(split) > 1 and not slot.sign:
        raise ValueError(f"{text!r} names {len(split)} parts; give one {slot.table.what}")
    return list(zip(split, slot.tables(len(split)), strict=True))


def head(piece: str) -> str:
    """The name at the beginning of the text of a part."""
    return re.split(r"[^\w.:]", piece)[0]


def joined(key: str, named: Sequence[Named]) -> str:
    """The text that names these parts."""
    return {"": "", ",": ", ", "+": " + "}[SLOTS[key].sign].join(map(str, named))


def faults(key: str, text: str, of_the_run: Mapping[str, Any] = {}) -> list[str]:
    """What is wrong with the names and numbers of a text, a line for each part of it."""
    found, summed = [], SLOTS[key].sign == "+"
    try:
        split = pieces(key, text)
        for place, (piece, table) in enumerate(split):
            try:
                if summed and (wrong := misplaced(place, head(piece))):
                    raise ValueError(wrong)
                SLOTS[key].check(SLOTS[key].read(piece, table), table, of_the_run)
            except ValueError as error:
                found.append(f"in {piece}: {error}" if len(split) > 1 else str(error))
        if not found:
            named = parts(key, text)
            if named and SLOTS[key].together is not None:
                SLOTS[key].together(named, of_the_run)
    except ValueError as error:
        found.append(str(error))
    return found
