"""What a run is composed of, and everything that stands against it: unmet needs and conflicts, all at once.

A part declares by itself what it needs and what it cannot be together with (`tools.registry.Kind`); rooms whose parts are in
every run have `CONFLICTS` of their own. What the declarations read is a mapping from names to values, see `setup.values`.
"""
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import environments, methods, recorders, replay, rewards, topologies
from jaxrl_llm.advantages import alike
from jaxrl_llm.control import knobs
from jaxrl_llm.engines import kinds as engines
from jaxrl_llm.engines import sampling as sampling_lib
from jaxrl_llm.engines.base import lacking
from jaxrl_llm.engines.server import engine as server
from jaxrl_llm.learning import optimizers
from jaxrl_llm.models import lora
from jaxrl_llm.replay import pool
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.setup.readers import facts, readers
from jaxrl_llm.setup.streams import wanted_of
from jaxrl_llm.setup.values import Around, kinds_of, values_of
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.values import critic

ROOMS = {"the sampler": sampling_lib, "the optimiser": optimizers, "adapters": lora, "critics": critic, "a pool": pool,
         "topologies": topologies.base, "replay": replay.base, "environments": environments.base, "rewards": rewards.base,
         "estimators": alike}


def check(config: ConfigDict, made: Parts, around: Around = Around()) -> None:
    """Raises one error with all lines of `against`, if there are any.

    It is a NotImplementedError if a need is not met, else a ValueError.
    """
    lacks, lines = unmet(made), against(config, made, around)
    if not lines:
        return
    text = lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} things stand against this run:", *(
        f"- {line}" for line in lines)])
    if lacks:
        raise NotImplementedError(f"{text}. Parts can be used from your own loop; `python -m jaxrl_llm.methods` lists the "
                                  "other methods")
    raise ValueError(text)


def against(config: ConfigDict, made: Parts, around: Around = Around()) -> list[str]:
    """All that stands against a run, a line each; empty: it can begin."""
    unread = knobs.unread(made.controls.by_name, readers(config))
    return [*unmet(made), *unable(config, made), *unread, *unobserved(config, made), *untaken(config, made, around),
            *conflicting(config, made, around)]


def unmet(made: Parts) -> list[str]:
    """A line for each need of the parts that nothing provides, with who could provide it, and the texts of who reads it."""
    missing = methods.provision.lacks(made.method, made.estimator, made.objective, made.there, made.rehearsed or ())
    return [f"method {made.method.slug!r} needs {lack}, which this run does not provide{_reader(made, lack.what)}"
            for lack in missing]


def _reader(made: Parts, field: str) -> str:
    """The end of a line that says which texts of the composition name parts that read a field."""
    named: dict[str, Any] = {"estimator": made.estimator, "objective": made.objective}
    named |= zip(("replay_estimator", "replay_objective"), made.rehearsed or ())
    named |= {"topology": topologies.TOPOLOGIES.find(name) for name, _ in made.method.parts("topology")}
    found = [f"{key}={text}" for key, one in named.items() if (text := getattr(made.method, key)) and field in one.needs]
    found += [f"filters={name}" for name, one in made.filters.items() if field in one.needs]
    found += [f"recorders={name}" for name, _ in made.method.parts("recorders") if field in recorders.named(name).provides]
    return f"; {' and '.join(found)} read{'s' * (len(found) == 1)} it" if found else ""


def conflicting(config: ConfigDict, made: Parts, around: Around = Around()) -> list[str]:
    """A line for each conflict of the parts with each other, with the settings and with what is around them."""
    values = values_of(config, made, around)
    return list(dict.fromkeys(line for part, conflicts in declared(config, made) for conflict in conflicts
                              for line in _lines(part, conflict, values)))


def unable(config: ConfigDict, made: Parts) -> list[str]:
    """A line for each ability that the run wants and the engine that it names lacks; "auto" is an engine that has them."""
    name, can = config.sampling.engine, frozenset[str]()
    if config.server.url:
        name, can = "server", server.CAN
    elif name != "auto":
        can = frozenset(engines.ENGINES.find(name).provides)
    return lacking(name, can, wanted_of(config, made.wanted, bool(config.environment))) if can else []


def unobserved(config: ConfigDict, made: Parts) -> list[str]:
    """A line for each fact that a controller observes and no part of the run tells."""
    of_topologies = [fact for (what, _), kind in kinds_of(config, made).items() if what == "topology" for fact in kind.provides]
    told = {*of_topologies, *(fact.name for some in facts(config).values() for fact in some)}
    return [f"controller {name!r}: {registry.unknown('fact', fact, told)}" for name, one in made.controls.by_name.items()
            for fact in one.facts if fact not in told]


def untaken(config: ConfigDict, made: Parts, around: Around) -> list[str]:
    """A line for each value that a topology takes and the run does not have, unless its argument has a default."""
    known, found = {*values_of(config, made, around), "wants", *Around._fields}, list[str]()
    for (what, name), kind in kinds_of(config, made).items():
        wanted = kind.takes if {*kind.needs} <= made.there else {}  # else a line says which need is not met
        for argument, value in wanted.items():
            if value not in known and inspect.signature(kind.make).parameters[argument].default is inspect.Parameter.empty:
                near = registry.nearest(value, known, 1)
                found.append(f"{what} {name!r} takes {argument} from {value!r}, which is no value of this run"
                             f"{f'; did you mean {near[0]!r}?' if near else '; `setup.values.values_of` lists them'}")
    return found


def _lines(part: str, conflict: Conflict, values: Mapping[str, Any]) -> Iterable[str]:
    """The line of a conflict, if it is there."""
    if not {*conflict.of} <= {*values}:
        return
    given, why = [values[name] for name in conflict.of], conflict.why
    if callable(why):
        reason = why(*given).replace("{", "{{").replace("}", "}}")
    else:
        reason = why if (all(given) if conflict.when is None else conflict.when(*given)) else ""
    if reason:
        yield f"{reason}; {conflict.do}".format(*given, part=part, method=values["method"])


def declared(config: ConfigDict, made: Parts) -> Iterable[tuple[str, tuple[Conflict, ...]]]:
    """`(part, conflicts)` of all parts of a run, and of the rooms whose parts every run has."""
    for (what, name), kind in kinds_of(config, made).items():
        yield f"{what} {name!r}", kind.conflicts
    for what, room in ROOMS.items():
        yield what, room.CONFLICTS


