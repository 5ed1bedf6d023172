"""What a run is composed of: the values that declarations of its parts read, by name, and the entries of its parts."""
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from jaxrl_llm import environments, recorders, rewards, tasks, topologies
from jaxrl_llm.engines import kinds as engines
from jaxrl_llm.engines import measures
from jaxrl_llm.learning import schedules
from jaxrl_llm.methods.texts import SLOTS
from jaxrl_llm.sampling.stages import STAGES
from jaxrl_llm.setup.parts import Parts, made_recorders, needed_stages
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import Kind, PartTable

_NAMED = {"stages": STAGES, "schedule": schedules.SCHEDULES, "sampling.engine": engines.ENGINES, "task": tasks.TASKS,
          "environment": environments.ENVIRONMENTS, "rewards": rewards.REWARDS}


class Around(NamedTuple):
    """What a run has beside its method and configuration; None: not known yet, and in no conflict."""

    environment: environments.Environment | None = None
    model: Any = None
    reward: Any = None
    schedule: schedules.Schedule | None = None
    task: tasks.Task | None = None
    encode: Callable[[tasks.Problem], list[int]] | None = None


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
    add(topologies.TOPOLOGIES, topologies.implied(made.there))
    add(recorders.RECORDERS, made_recorders(config, made))
    add(STAGES, needed_stages(config, made))
    add(measures.MEASURES, made.measured)
    return found


def values_of(config: ConfigDict, made: Parts, around: Around = Around()) -> dict[str, Any]:
    """What conflicts may read, and topologies take, by name; what is not known is left out.

    "config.KEY": every key. "text.KEY": the method's text of a part, such as "text.replay". "needs.FIELD": True for what some
    part reads. "knobs.NAME": True for what a controller sets. "estimator.NAME", "objective.NAME": the numbers of both, and
    True for the functions that the estimator has; also "estimator.has_critic". "filters": their names; "filters.refills": of
    those for which further prompts are drawn. "sizes": what decides the number of a prompt's rollouts, as texts; "unequal":
    those that give prompts different ones from the start; "pilot", "mean": of the rule, 0 and 1 without one. "knobs": all that
    are set. "measured": names of the further token columns. "there": what the run has for recorders and topologies. "method",
    "topology": their names. "replays": whether there is a replay; "updates": those of stored rollouts alone in a step;
    "replay.NAME": True for the functions of the replay. "facts.NAME": True for what is expected of prompts, or measured by the
    rule. "rehearsed.has_critic": of the estimator that credits replayed rollouts. "source": the method's, empty if it samples.
    "texts": whether given texts stand beside its prompts. "begins": whether completions begin with traces of experts;
    "guidance.NAME": the numbers of the topology by which they do. "unknown": whether trained tokens may have unknown log-probs,
    as those of traces and of a pool. And the objects "estimator", "objective", "rule", "replay", "environment", "model" (its
    configuration), "reward", "schedule", "task", where there are any; "encode", the function from a problem of a task to the
    token ids of its prompt, without an environment.
    """
    estimator, knobs = made.estimator, made.controls.knobs
    unequal = [f"the budget {config.budget.utility!r}"] * bool(config.budget.utility)
    unequal += [f"the controller {setter!r}" for knob, setter in made.controls.setters.items() if knob == "group_sizes"]
    unequal += [f"the allocation rule {name!r}" for name, _ in made.method.parts("allocation")]
    topology = made.method.part("topology")
    objects = {"rule": made.rule, "replay": made.replay, **around._asdict()}
    rehearsed = estimator if made.rehearsed is None else made.rehearsed[0]
    return {
        **{f"text.{key}": getattr(made.method, key) for key in SLOTS}, "rehearsed.has_critic": rehearsed.has_critic,
        "updates": made.replay.updates if made.replay is not None else 0,
        **{f"config.{key}": value for key, value in flatten_dict(config.to_dict(), sep=".").items()},
        **{f"needs.{name}": True for name in made.needs}, **{f"knobs.{name}": True for name in knobs},
        **{f"{key}.{name}": value for key in ("estimator", "objective", "guidance")
           for name, value in _numbers(made, key).items()}, "begins": made.begins, "unknown": made.unknown,
        **{f"estimator.{name}": True for name, value in estimator._asdict().items() if callable(value)},
        **({f"replay.{name}": True for name, value in made.replay._asdict().items() if callable(value)} if made.replay else {}),
        **({"facts.expected": True} if config.budget.utility or "prior" in made.needs else {}),
        **({f"facts.{name}": True for name in made.rule.reads} if made.rule else {}),
        **{name: value for name, value in objects.items() if value is not None},
        "estimator": estimator, "objective": made.objective, "estimator.has_critic": estimator.has_critic,
        "filters": ", ".join(made.filters), "unequal": unequal, "there": made.there, "method": made.method.slug, "knobs": knobs,
        "topology": topology.name if topology else "", "replays": made.replay is not None, "measured": ", ".join(made.measured),
        "pilot": made.rule.pilot if made.rule else 0, "mean": made.rule.mean if made.rule else 1.0,
        "filters.refills": ", ".join(name for name, one in made.filters.items() if one.per == "prompt" and one.refills),
        "source": made.method.source, "texts": made.texts,
        "sizes": unequal + [f"the estimator {made.method.part('estimator').name!r}"] * (estimator.wants_more is not None)}


def _numbers(made: Parts, key: str) -> dict[str, Any]:
    """All numbers of the part under a key, those of its defaults included; none without such a part."""
    if (part := made.method.part(key)) is None:
        return {}
    known = SLOTS[key].table.parameters(part.name)
    return {**{name: one.default for name, one in known.items() if one.default is not one.empty}, **part.numbers}
