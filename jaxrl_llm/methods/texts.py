"""The parts that a row of the catalogue, or a configuration, names as text."""
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import advantages, control, objectives, replay, topologies
from jaxrl_llm.tools import registry, written


class Named(NamedTuple):
    """A part by its name in a table, or "module:function", with the numbers that differ from its defaults."""

    name: str
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return written.written(self.name, self.numbers)


class Slot(NamedTuple):
    """What a text of a row names.

    `what`: the kind of the part, for errors. `table`: its factories by name. `sign`: what separates several parts, "," or "+";
    "": the text names one. `given`: arguments of the factories that a run gives, which a text sets by name alone.
    """

    what: str
    table: Mapping[str, Any]
    sign: str = ""
    given: frozenset[str] = frozenset()

    def order(self, name: str) -> Sequence[str]:
        """The names of the numbers of a part, in the order that values without a name take; ValueError for an unknown part."""
        if ":" in name:
            entry = registry.function_of(self.what, name)
        else:
            entry = self.table[registry.one_of(self.what, name, self.table)]
        parameters = inspect.signature(getattr(entry, "make", entry)).parameters
        return [parameter for parameter in parameters if parameter not in self.given]


SLOTS = {
    "estimator": Slot("estimator", advantages.base.ESTIMATORS, given=frozenset(("max_len", "feature_size"))),
    "objective": Slot("objective", objectives.base.OBJECTIVES, sign="+", given=frozenset(("max_len", "feature_size"))),
    "replay_estimator": Slot("estimator", advantages.base.ESTIMATORS, given=frozenset(("max_len", "feature_size"))),
    "replay_objective": Slot("objective", objectives.base.OBJECTIVES, sign="+", given=frozenset(("max_len", "feature_size"))),
    "filters": Slot("filter", control.FILTERS, sign=","),
    "controllers": Slot("controller", control.CONTROLLERS, sign=","),
    "replay": Slot("replay rule", replay.base.RULES),
    "allocation": Slot("allocation rule", topologies.RULES),
    "guidance": Slot("guide", topologies.GUIDES),
    "topology": Slot("topology", topologies.TOPOLOGIES, given=frozenset(topologies.base.KNOWN)),
}


@functools.cache
def parts(key: str, text: str) -> tuple[Named, ...]:
    """The parts that the text of an entry of `SLOTS` names, in its order.

    Raises ValueError for a text that cannot be read, and for several parts where the slot has one.
    """
    slot = SLOTS[key]
    named = [Named(*call) for call in written.calls(text, slot.order, slot.sign or ",")]
    if len(named) > 1 and not slot.sign:
        raise ValueError(f"{key}={text!r} names {len(named)} parts; give one {slot.what}")
    return tuple(named)
