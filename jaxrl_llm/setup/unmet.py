"""What the parts of a run need and do not have: fields, abilities of engines, facts, values, and what stages read."""
import inspect
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import methods, recorders, topologies
from jaxrl_llm.data.forest import plant
from jaxrl_llm.engines import kinds as engines
from jaxrl_llm.sampling import stages
from jaxrl_llm.setup.meshes import make_mesh
from jaxrl_llm.setup.parts import Parts, needed_stages
from jaxrl_llm.setup.readers import facts
from jaxrl_llm.setup.selection import expects
from jaxrl_llm.setup.streams import wanted_of
from jaxrl_llm.setup.values import Around, kinds_of, values_of
from jaxrl_llm.tools import registry, written


def unmet(made: Parts) -> list[str]:
    """A line for each need of the parts that nothing provides, with who could provide it, and the texts of who reads it."""
    missing = methods.provision.lacks(made.method, made.estimator, made.objective, made.there, made.rehearsed or ())
    return [f"method {made.method.slug!r} needs {lack}, which this run does not provide{_reader(made, lack.what)}"
            for lack in missing]


def _reader(made: Parts, field: str) -> str:
    """The end of a line that says which texts of the composition name parts that read a field."""
    named: dict[str, Any] = {"estimator": made.estimator, "objective": made.objective}
    named |= zip(("replay_estimator", "replay_objective"), made.rehearsed or ())
    named |= {key: topologies.TOPOLOGIES.find(name) for key in ("topology", "guidance") for name, _ in made.method.parts(key)}
    found = [f"{key}={text}" for key, one in named.items() if (text := getattr(made.method, key)) and field in one.needs]
    found += [f"filters={name}" for name, one in made.filters.items() if field in one.needs]
    found += [f"recorders={name}" for name, _ in made.method.parts("recorders") if field in recorders.named(name).provides]
    return f"; {' and '.join(found)} read{'s' * (len(found) == 1)} it" if found else ""


def unable(config: ConfigDict, made: Parts) -> list[str]:
    """A line for each ability that the run wants and its engine lacks, and for a mesh that its batches do not fit."""
    try:
        devices = make_mesh(config).size
    except ValueError as error:
        return [str(error), *_unable(config, made, 1)]
    return _unable(config, made, devices)


def _unable(config: ConfigDict, made: Parts, devices: int) -> list[str]:
    goes_on, at_server = bool(config.environment), bool(config.server.url)
    wanted = wanted_of(config, made.wanted, goes_on, 1 if goes_on or at_server else devices)
    return engines.unable(config.sampling.engine, at_server, wanted)


def unobserved(config: ConfigDict, made: Parts, around: Around) -> list[str]:
    """A line for each fact that a controller observes and no part of the run tells."""
    values, known = values_of(config, made, around), {fact.name: fact for some in facts(config, made).values() for fact in some}
    told = {name for name, fact in known.items() if all(values.get(one) for one in fact.of)}
    told |= {fact for (what, _), kind in kinds_of(config, made).items() if what == "topology" for fact in kind.provides}
    return [f"controller {name!r}: " + (
        f"no part of this run tells the fact {fact!r}, {known[fact].doc}; leave the controller out, or name the part that does"
        if fact in known else str(registry.unknown("fact", fact, told)))
        for name, one in made.controls.by_name.items() for fact in one.facts if fact not in told]


def untaken(config: ConfigDict, made: Parts, around: Around) -> list[str]:
    """A line for each value that a topology takes and the run does not have, unless its argument has a default."""
    known, found = {*values_of(config, made, around)}, list[str]()
    known |= {"wants"} if made.estimator.wants_more is not None else set()
    known |= {*Around._fields} if around == Around() else set()  # not known yet
    for (what, name), kind in kinds_of(config, made).items():
        wanted = kind.takes if {*kind.needs} <= made.there else {}  # else a line says which need is not met
        for argument, value in wanted.items():
            if value not in known and inspect.signature(kind.make).parameters[argument].default is inspect.Parameter.empty:
                near = registry.nearest(value, known, 1)
                found.append(f"{what} {name!r} takes {argument} from {value!r}, which is no value of this run"
                             f"{f'; did you mean {near[0]!r}?' if near else '; `setup.values.values_of` lists them'}")
    return found


def unstaged(config: ConfigDict, made: Parts, around: Around) -> list[str]:
    """A line for each stage of `config.stages` that needs what neither forests of the run nor earlier stages have."""
    turns = {} if around.environment is None else around.environment.facts
    columns = plant([], [], ["reward"], answers=True, turns=bool(config.environment)).columns
    there = {*columns, *made.measured, *turns, "group_size"}
    there |= {"expected"} if expects(config, made) else set()
    there |= {field for name in needed_stages(config, made) for field in stages.STAGES[name].provides}
    there |= {*topologies.base.GUIDED} if made.begins else set()
    found = []
    for name, numbers in written.calls(config.stages):
        one = stages.STAGES.make(name, **numbers)
        if missing := sorted({*one.needs} - there):
            found.append(f"the stage {name!r} of config.stages needs {', '.join(missing)}, which neither forests of this run "
                         f"nor earlier stages have; they have {', '.join(sorted(there))}")
        there |= {*one.provides}
    return found
