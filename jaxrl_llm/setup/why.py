"""What a run is composed of, and everything that stands against it: unmet needs and conflicts, all at once.

A part declares by itself what it needs and what it cannot be together with (`tools.registry.Kind`); rooms whose parts are in
every run have `CONFLICTS` of their own. What the declarations read is a mapping from names to values, see `values_of`.
"""
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from jaxrl_llm import environments, methods, recorders, replay, rewards, tasks, topologies
from jaxrl_llm.advantages import alike
from jaxrl_llm.control import knobs
from jaxrl_llm.engines import kinds as engines
from jaxrl_llm.engines import measures
from jaxrl_llm.engines import sampling as sampling_lib
from jaxrl_llm.engines.base import lacking
from jaxrl_llm.engines.server import engine as server
from jaxrl_llm.learning import optimizers, schedules
from jaxrl_llm.methods.texts import SLOTS
from jaxrl_llm.models import lora
from jaxrl_llm.replay import pool
from jaxrl_llm.sampling.stages import STAGES
from jaxrl_llm.setup.parts import Parts, recorded_needs
from jaxrl_llm.setup.readers import readers
from jaxrl_llm.setup.streams import wanted_of
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import Conflict, Kind, PartTable
from jaxrl_llm.values import critic

ROOMS = {"the sampler": sampling_lib, "the optimiser": optimizers, "adapters": lora, "critics": critic, "a pool": pool,
         "topologies": topologies.base, "replay": replay.base, "environments": environments.base, "rewards": rewards.base,
         "estimators": alike}
_NAMED = {"stages": STAGES, "schedule": schedules.SCHEDULES, "sampling.engine": engines.ENGINES, "task": tasks.TASKS,
          "environment": environments.ENVIRONMENTS, "rewards": rewards.REWARDS}


class Around(NamedTuple):
    """What a run has beside its method and configuration; None: not known yet, and in no conflict."""

    environment: environments.Environment | None = None
    model: Any = None
    reward: Any = None
    schedule: schedules.Schedule | None = None


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
    return [*unmet(made), *unable(config, made), *unread, *conflicting(config, made, around)]


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


def kinds_of(config: ConfigDict, made: Parts) -> dict[tuple[str, str], Kind]:
    """The entries of all parts that a run names or implies, by the word of their table and their name."""
    found: dict[tuple[str, str], Kind] = {}

    def add(table: PartTable, names: Iterable[str]) -> None:
        found.update({(table.what, name): table.find(name) for name in names if ":" in name or name in table})

    for key, slot in SLOTS.items():
        named = [one.name for one in made.method.parts(key)]
        add(slot.table, named[:1])
        add(slot.table if slot.rest is None else slot.rest, named[1:])
    for key, table in _NAMED.items():
        add(table, [name for name, _ in written.calls(flatten_dict(config.to_dict(), sep=".")[key])])
    add(topologies.TOPOLOGIES, {**topologies.implied(made.there), **topologies.implied(made.there, wrapping=True)})
    add(recorders.RECORDERS, recorders.asked(recorded_needs(config, made.needs), made.there | methods.provision.SAMPLED))
    add(measures.MEASURES, made.measured)
    return found


def values_of(config: ConfigDict, made: Parts, around: Around) -> dict[str, Any]:
    """What conflicts may read, by name; what is not known is left out.

    "config.KEY": every key. "needs.FIELD": True for what some part reads. "knobs.NAME": True for what a controller sets.
    "estimator.NAME", "objective.NAME": the numbers of both, and True for the functions that the estimator has; also
    "estimator.has_critic". "filters": their names; "filters.refills": of those for which further prompts are drawn.
    "sizes": what decides the number of a prompt's rollouts, as texts; "unequal": those that give prompts different ones from
    the start; "pilot", "mean": of the rule, 0 and 1 without one. "knobs": all that are set.
    "measured": names of the further token columns. "there": what the run has for recorders and topologies. "method",
    "topology": their names. "replays": whether there is a replay. And the objects "estimator", "objective", "rule", "guide",
    "replay", "environment", "model" (its configuration), "reward", "schedule", where there are any.
    """
    estimator, knobs = made.estimator, made.controls.knobs
    unequal = [f"the budget {config.budget.utility!r}"] * bool(config.budget.utility)
    unequal += [f"the controller {setter!r}" for knob, setter in made.controls.setters.items() if knob == "group_sizes"]
    unequal += [f"the allocation rule {name!r}" for name, _ in made.method.parts("allocation")]
    topology = made.method.part("topology")
    objects = {"rule": made.rule, "guide": made.guide, "replay": made.replay, **around._asdict()}
    return {
        **{f"config.{key}": value for key, value in flatten_dict(config.to_dict(), sep=".").items()},
        **{f"needs.{name}": True for name in made.needs}, **{f"knobs.{name}": True for name in knobs},
        **{f"{key}.{name}": value for key in ("estimator", "objective") for name, value in _numbers(made, key).items()},
        **{f"estimator.{name}": True for name, value in estimator._asdict().items() if callable(value)},
        **{name: value for name, value in objects.items() if value is not None},
        "estimator": estimator, "objective": made.objective, "estimator.has_critic": estimator.has_critic,
        "filters": ", ".join(made.filters), "unequal": unequal, "there": made.there, "method": made.method.slug, "knobs": knobs,
        "topology": topology.name if topology else "", "replays": made.replay is not None, "measured": ", ".join(made.measured),
        "pilot": made.rule.pilot if made.rule else 0, "mean": made.rule.mean if made.rule else 1.0,
        "filters.refills": ", ".join(name for name, one in made.filters.items() if one.per == "prompt" and one.refills),
        "sizes": unequal + [f"the estimator {made.method.part('estimator').name!r}"] * (estimator.wants_more is not None)}


def _numbers(made: Parts, key: str) -> dict[str, Any]:
    """All numbers of the estimator or of the objective, those of its defaults included."""
    part = made.method.part(key)
    known = SLOTS[key].table.parameters(part.name)
    return {**{name: one.default for name, one in known.items() if one.default is not one.empty}, **part.numbers}
