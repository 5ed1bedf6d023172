"""The interface of a topology.

To add one, write a function that returns a `Topology` into a new file:

    def twice(prompts: int, group: int) -> Topology:
        def plan(forest):
            if not forest.problems:
                return Plan(draw=prompts)
            return Plan(acts=groups(np.flatnonzero(asked(forest) < 2 * group), group))

        return Topology(plan, everyone, most=2 * group)

Its arguments are entries of `GIVEN`, values of the run that the decorator names, and numbers of its own. With
`@topology(takes={"limit": "config.sampling.max_tokens"})` the argument `limit` is the value of that key; other values are in
`setup.values.values_of`. One whose trajectories begin with trained tokens of others says so: `@topology(plants=True)`. One that
takes `inner` wraps the topology that the run has otherwise. A row of the catalogue names it, `Method.topology`: by its name
alone if `@topology` stands above it, else as "module:function". A `Source` takes the topology directly:
`dataclasses.replace(source, topology=twice(prompts=4, group=8))`. A learner is made for the `ladders` of its source
(`setup.learners.make_learner`), which follow from `most`.
"""
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.forest import Forest
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies.acts import Act, groups

# Arguments that a run passes to the factory of every topology that has them, by name.
GIVEN = {
    "inner": "`Topology`, the one that the run has otherwise, for one that wraps it",
    "prompts": "int, P, prompts of a batch",
    "group": "int, G, rollouts of a prompt, at first",
    "most": "int, most rollouts of a prompt",
}
# Measurements of the prompts that a plan can request, as facts of the forest.
MEASURED = {
    "gradient_norms": "f32[P], mean norm of the gradient of a right completion's log-prob, 0 without any right one",
    "expected": "f32[P], mean reward of the trajectories of the plan's `acts`, which are not trained on, where it is NaN",
}


class Plan(NamedTuple):
    """The next samples: `draw`, the number of problems to draw from the task; or `acts`, see `acts`.

    `measure`: a requested fact of `MEASURED`. A plan without any of these marks the batch as complete.
    `problems`: those that acts bring (`Begin.at`), while they join the forest; topologies leave it out.
    """

    draw: int = 0
    acts: tuple[Act, ...] = ()
    measure: str = ""
    problems: tuple[Problem, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the batch is complete."""
        return not self.draw and not self.acts and not self.measure


class Topology(NamedTuple):
    """`plan(forest) -> Plan`, the next samples; `choose(forest) -> bool[P]`, the prompts of a complete batch to train on.

    Runs make it by name, from entries of `GIVEN`, values that it `takes` and its own numbers. A method with
    the parts that its `Kind.needs` names, such as `method.allocation`, has it without naming it.

    `most`: the maximum number of rollouts of a prompt; None: `sampling.group`. `metrics(forest) -> numbers by name`, of a
    complete batch. `finish(forest) -> forest` is called once with each complete batch, before `choose`: it may change parents,
    roles and rewards, or replace trajectories. `memory`: numbers, texts, lists and dicts with texts as keys, which the
    functions change and which outlive a batch; None: there is none. Checkpoints have it as JSON, with the position in the data.
    `at_once`: how many rollouts of a prompt it begins together, for which engines are compiled; None: `sampling.group`.
    `numbers`: those of the distribution, "top_k", "top_p" or "min_p", that `Begin.sampling` of its acts sets; engines are
    compiled with them. `reads`: the most tokens of `Begin.reads` of its acts, for which engines are compiled; or
    `reads(problem) -> Problem | None`, what is read in place of a problem of the task. `others`: whether some trajectories
    begin with parts that the policy did not write; rollouts then have roles in every batch, as they have with `reads`.
    """

    plan: Callable[[Forest], Plan]
    choose: Callable[[Forest], np.ndarray]
    most: int | None = None
    metrics: Callable[[Forest], dict[str, float]] = lambda forest: {}
    finish: Callable[[Forest], Forest] = lambda forest: forest
    memory: dict[str, Any] | None = None
    at_once: int | None = None
    numbers: tuple[str, ...] = ()
    reads: int | Callable[[Problem], Problem | None] = 0
    others: bool = False


TOPOLOGIES = registry.PartTable("topology", Topology, keywords=False, given=GIVEN)
GUIDED = ("expert", "hinted", "hint_mask", "expert_logprobs")  # extras of rollouts, see `sampling.stages.guide`


def topology(factory: Callable[..., Any] | None = None, /, *, plants: bool = False, provides: Iterable[str] = (), **facts: Any
             ) -> Any:
    """Enters a factory into the table, with the facts of its `Kind`.

    `plants`: whether trajectories may begin with trained tokens that others wrote. Their log-probs may be unknown: the run
    measures them under the policy, and the extras `GUIDED` say who wrote what.
    """
    entered = tuple(dict.fromkeys((*provides, *(GUIDED if plants else ()))))
    return TOPOLOGIES.enter(factory, provides=entered, **facts)


def plants(kind: registry.Kind) -> bool:
    """Whether trajectories of such a topology may begin with trained tokens that others wrote."""
    return {*GUIDED} <= {*kind.provides}


def wraps(name: str) -> bool:
    """Whether the topology wraps another one."""
    return "inner" in TOPOLOGIES.parameters(name)


def implied(there: Iterable[str]) -> dict[str, registry.Kind]:
    """The topologies by whose needs a run with the parts that are `there` has them without naming them."""
    return {name: kind for name, kind in TOPOLOGIES.items() if kind.needs and {*kind.needs} <= {*there} and not wraps(name)}


def chosen(name: str | None, there: Iterable[str]) -> str:
    """The topology of a run with the parts that are `there`: the one that its method names, or implies by its parts.

    A name of one that wraps others implies nothing. Raises ValueError if the topology does not read a part by which others
    decide what is sampled.
    """
    by_parts = implied(there)
    best = name if name and not wraps(name) else next(iter(by_parts), "single")
    parts = {need for kind in by_parts.values() for need in kind.needs}
    if lost := parts - {*TOPOLOGIES.find(best).needs}:
        able = [name for name, kind in by_parts.items() if {*kind.needs} >= parts]
        ways = f"leave that out, or take one that does: {', '.join(able)}" if able else (
            f"no topology reads {' and '.join(sorted(parts))} together, so leave one of them out")
        raise ValueError(f"the topology {best!r} does not read {' and '.join(sorted(lost))}, which this method has; {ways}")
    return best


def make(name: str | None, there: Iterable[str], known: Mapping[str, Any], hyper: Mapping[str, Any],
         around: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> Topology:
    """The `chosen` topology, in the named one if that wraps others, and in those `around` both, names with their numbers.

    `known`: entries of `GIVEN`, and values that topologies take, by name. `hyper`: numbers of the named one. Raises ValueError
    if one takes other arguments, and for one around that wraps none.
    """
    def called(name, known, hyper):
        kind = TOPOLOGIES.find(name)
        wanted = {key: key for key in GIVEN if key in TOPOLOGIES.parameters(name)} | {**kind.takes}
        taken = {key: known[value] for key, value in wanted.items() if value in known}
        return registry.call("topology", name, kind.make, {**taken, **hyper}, Topology)

    inner = chosen(name, there)
    made = called(inner, known, hyper if inner == name else {})
    for outer, numbers in [*([(name, hyper)] if name and wraps(name) else []), *around]:
        if not wraps(outer):
            able = ", ".join(one for one in TOPOLOGIES if wraps(one))
            raise ValueError(f"the topology {outer!r} wraps no other, and is named as one that does; take {able}")
        made = called(outer, {**known, "inner": made}, numbers)
    return made


def remembered(topology: Topology) -> dict[str, Any]:
    """What a checkpoint has of the memory of a topology, as it comes back; ValueError for what JSON does not give back."""
    try:
        kept = json.loads(json.dumps(topology.memory))
    except TypeError as error:
        raise ValueError(f"a topology remembers {topology.memory!r}, which no checkpoint can have: {error}; keep numbers, "
                         "texts, lists and dicts") from error
    if kept != topology.memory:
        raise ValueError(f"a topology remembers {topology.memory!r}, and a checkpoint would give back {kept!r}; keep lists and "
                         "dicts with texts as keys")
    return kept


def remember(topology: Topology, memory: Mapping[str, Any] | None) -> None:
    """Gives a topology that has one this memory, in place of its own; None: nothing is remembered."""
    if topology.memory is not None and memory is not None and memory is not topology.memory:
        topology.memory.clear()
        topology.memory.update(memory)


def recall(topology: Topology, memory: Mapping[str, Any] | None) -> None:
    """Gives a topology the memory of a checkpoint, see `remember`.

    Entries that the memory lacks, as that of another topology does, stay as they are.
    """
    remember(topology, None if memory is None else {**(topology.memory or {}), **memory})


def everyone(forest: Forest) -> np.ndarray:
    """bool[P], all True."""
    return np.ones(len(forest.problems), bool)


def group_sizes(forest: Forest) -> np.ndarray:
    """i64[P], trajectories of each prompt."""
    return np.bincount(forest.prompt[forest.ends], minlength=len(forest.problems))


def asked(forest: Forest) -> np.ndarray:
    """i64[P], trajectories that were requested of each prompt, with those that an environment lost: plans count these."""
    return group_sizes(forest) + forest.lost


def drawn_at_once(prompts: int, counts: Callable[[Forest], np.ndarray | int], choose: Callable[[Forest], np.ndarray],
                  most: int | None = None) -> Topology:
    """`prompts` problems; once all are drawn, each gets `counts(forest) -> i64[P]` trajectories, or one number for all."""
    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        if asked(forest).any():
            return Plan()
        return Plan(acts=groups(np.arange(len(forest.problems)), counts(forest)))

    return Topology(plan, choose, most)


def _lost(named: str, there: Iterable[str]) -> str:
    """Why the topology that a method names, or implies, does not read all parts that decide what is sampled; "": it does."""
    try:
        chosen(named or None, there)
    except ValueError as error:
        return str(error)
    return ""


def _equal(unequal: list[str], budget: str, most: int, group: int, pilot: int, mean: float) -> str:
    """Why parts that are to give prompts unequal numbers of rollouts cannot; "": they can."""
    if not unequal or budget or most > mean * (pilot or group):
        return ""
    return (f"{unequal[0]} would give all prompts the same number of rollouts: sampling.max_group={most} is no more than "
            f"{mean:g} x {f'pilot={pilot}' if pilot else f'sampling.group={group}'}")


_UNEQUAL = {  # who needs groups of one size, as values of `setup.values`
    "estimator.has_critic": "critics do not support", "needs.features": "baselines on hidden states do not support"}


def _unstated(unknown: bool, objective: Any) -> str:
    """Why an objective cannot read log-probs that nobody knows; "": it can."""
    if not unknown or objective.takes_unknown:
        return ""
    return ("the objective reads behavior_logprobs, and does not say what counts where they are unknown, as for tokens of "
            "experts and of other runs")


CONFLICTS = (
    Conflict(("unknown", "objective"), _unstated, "state token_objective(..., unknown='old'): the policy's old log-prob, which "
             "gives weight 1. Or take another objective"),
    Conflict(("topology", "there"), _lost, "it is the topology of the method, or implied by its parts"),
    Conflict(("sizes",), "{0[0]} and {0[1]} both say how many rollouts a prompt gets", "leave one of the two out",
             lambda sizes: len(sizes) > 1),
    *(Conflict((part, "unequal"), f"{{1[0]}} gives prompts unequal numbers of rollouts, which {who}", "leave out one of them")
      for part, who in _UNEQUAL.items()),
    Conflict(("replay", "unequal"), "{1[0]} gives prompts unequal numbers of rollouts, and stored groups would take the places "
             "of some prompts", "leave out one of them, or take a rule that replaces single rollouts, for example past_success",
             lambda replay, unequal: replay.groups is not None and unequal),
    Conflict(("objective.aggregation", "sizes"),
             "{1[0]} gives prompts unequal numbers of rollouts, which are cut into rows, and "
             "aggregation='prompt_mean' would weigh each row like a prompt",
             "set config.objective=\"aggregation=token_mean\" (or seq_mean_token_mean), or take another method",
             lambda aggregation, sizes: aggregation == "prompt_mean" and sizes),
    Conflict(("unequal", "config.budget.utility", "config.sampling.max_group", "config.sampling.group", "pilot", "mean"),
             _equal, "raise one of the two, or set sampling.max_group=0: four times the group"))
