"""What methods need and what provides it: a method runs if everything that its parts need is provided.

Names are fields of `Rollouts`, entries of its `extras`, settings that controllers set, or parts of a run such as
`config.teacher.path`, `method.allocation` and `estimator.wants_more`. All runs provide the fields in `SAMPLED`, tasks and
environments their facts; replay rules, topologies, recorders and stages say themselves what they provide. `ELSEWHERE` and
`AWAITED` only say who could provide a missing field: environments and tasks, or nobody yet.
"""
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import control, recorders, replay, topologies
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.control import CONTROLLERS, FILTERS
from jaxrl_llm.data.rollouts import CURRENT_ENTROPIES
from jaxrl_llm.data.turn_info import STEP
from jaxrl_llm.methods.base import Method
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.rewards.call_kinds import COUNTS
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.registry import PartTable

SAMPLED = frozenset((  # in the rollouts of every run
    "tokens", "mask", "valid", "prompt_tokens", "prompt_mask", "prompt_ids", "behavior_logprobs", "entropies", "truncated",
    "policy_version", "current_version", "age",  # by the sampler, and the learner's stamps
    CURRENT_ENTROPIES,  # by the update
    "rewards", "reward_components", "correct", "answers",  # by the reward
    "task", "prior"))  # the last for methods that read it
TURNS = ("traj", "step", "step_rewards", "obs", "act", "next_obs")  # fields of turns as rows, see `advantages.turns`
AGENTS = ("agent", "functional_group", "game", "settled")  # fields of environments whose policy speaks for several agents
_TURNS, _TOOLS = "an environment, config.environment", "an environment with tools"
ELSEWHERE = {
    **dict.fromkeys((*TURNS, "step_ids", "turns"), _TURNS),
    **dict.fromkeys(AGENTS, "an environment of several agents"),
    **dict.fromkeys(("tool_calls", "tool_errors", "answer_blocks", "malformed", "void", "tool_failed", "tool_unknown",
                     "error_words"), _TOOLS),
    **dict.fromkeys(COUNTS, "an environment that counts kinds of calls, tool_use(kinds=...)"),
    "rewritten": "the environment `purified`", "skill_used": "the environment `skill_chain`",
    "match": "the environment `walked`",
    **dict.fromkeys(("hits", "ranks", "eos"), "the environment `ranked_list`"),
    "target_weights": "a task of boxes, config.task=grounding", "repository": "a task of patches, config.task=edits",
    "middle": "a task of text, config.task=segments",
}
GIVEN = frozenset(("chosen", "weight"))  # of given texts
BESIDE = frozenset(("given", "weight", *topologies.base.GUIDED))  # of those beside prompts
SET = {"group_sizes": "a controller that sets it", "given": "texts beside the prompts, config.texts.share"}  # no row needs them
AWAITED = {
    **dict.fromkeys(("node", "parent", "path", "final"), "a topology of trees"),
    "prm_logprobs": "a recorder with a process reward model",
    "retry_step": "a topology that tries again from a step",
    "flawed": "a judge that marks flawed solutions", "format_rewards": "an environment that scores the format of each step",
}


class Lack(NamedTuple):
    """A need of a method that no run provides, and the part that could provide it."""

    what: str
    who: str

    def __str__(self) -> str:
        return f"{self.what} (from {self.who})"


def sampled() -> set[str]:
    """The fields of `SAMPLED`, and those of stages: a run makes the stage of a field that its method needs."""
    stages = registry.table("stage", "jaxrl_llm.sampling.stages")
    return {*SAMPLED, *(field for kind in stages.values() for field in kind.provides)}


def needs_of(method: Method, estimator: Estimator, objective: Objective) -> set[str]:
    """Fields of `Rollouts`, or entries of its `extras`, that a method and its parts read, also to train a critic."""
    filters = [control.make_filter(name, **numbers) for name, numbers in method.parts("filters") if _known(name, FILTERS)]
    critics = ("values",) if estimator.value_targets is not None else ()
    critics += ("turn_q", "turn_v") if estimator.turn_critic is not None else ()
    of_parts = (estimator.needs, objective.needs, *(one.needs for one in filters),
                *(recorders.named(name).provides for name, _ in method.parts("recorders")))
    return {*method.needs, *critics, *(name for needs in of_parts for name in needs)}


def replay_needs_of(again: Sequence[Any]) -> set[str]:
    """As `needs_of`, for the estimator and the objective of rollouts that are replayed in updates of their own."""
    return needs_of(Method(slug="", title="", equation=""), *again) if again else set()


def parts_of(method: Method, estimator: Estimator) -> set[str]:
    """The parts that a method brings, by which topologies and recorders are made, and the settings of its controllers."""
    of_row = {f"method.{name}" for name in ("allocation", "replay") if getattr(method, name)}
    of_estimator = {f"estimator.{name}" for name, part in estimator._asdict().items() if part is not None}
    controllers = [control.make(name, **numbers) for name, numbers in method.parts("controllers") if _known(name, CONTROLLERS)]
    return of_row | of_estimator | {knob for one in controllers for knob in one.knobs}


def provided(method: Method, estimator: Estimator, given: Iterable[str] = ()) -> set[str]:
    """Everything that a run of the method provides: to all methods, by what is `given` beside it, and by the method's parts."""
    there = {*sampled(), *given, *parts_of(method, estimator), *(GIVEN if method.source == "given" else ()),
             *(BESIDE if method.defaults.get("text_share") else ())}
    if stored := method.part("replay"):
        there |= {*replay.make(stored.name, **stored.numbers).provides}
    there |= topologies.provided(_topologies_of(method), there)
    return there | recorders.recordable(there)


def everywhere() -> set[str]:
    """The fields that every run provides to any method."""
    return {*sampled(), *recorders.recordable(sampled())}


def elsewhere() -> set[str]:
    """The fields that some runs provide by name: in an environment, on a task or with further models of their configuration."""
    keys = {need for kind in recorders.RECORDERS.values() for need in kind.needs if need.startswith("config.")}
    return {*ELSEWHERE, *recorders.recordable(sampled() | keys)} - everywhere()


def lacks(method: Method, estimator: Estimator, objective: Objective, given: Iterable[str] = (), again: Sequence[Any] = ()
          ) -> list[Lack]:
    """The unmet needs of the method, if fields and parts are `given` beside those of every run, see `provided`.

    `again`: the estimator and the objective of replayed rollouts, if they have their own.
    """
    there = provided(method, estimator, given)
    needs = needs_of(method, estimator, objective) | replay_needs_of(again)
    for name in _topologies_of(method):
        needs |= {*topologies.TOPOLOGIES.find(name).needs}
    missing = [Lack(name, _provider(name, there)) for name in sorted(needs - there)]
    missing += [Lack(f"{sort} {name}", "a file of jaxrl_llm.control")
                for sort, table in (("filter", FILTERS), ("controller", CONTROLLERS))
                for name, _ in method.parts(f"{sort}s") if not _known(name, table)]
    return missing


def _topologies_of(method: Method) -> list[str]:
    """The topologies that a method names."""
    return [name for key in ("topology", "guidance") for name, _ in method.parts(key)]


def _known(name: str, table: PartTable) -> bool:
    """Whether a table has a part of this name, or it is your own "module:function"."""
    return name in table or ":" in name


def _provider(field: str, there: set[str]) -> str:
    """Who could provide a missing field, to a run that has everything that is `there`."""
    sort, _, part = field.partition(".")
    if part:  # of the run, by which a topology is made
        ways = {"method": f"a part under config.{part}", "estimator": "an estimator that has it"}
        return ways.get(sort, "a value of this key")
    tables: dict[str, Mapping[str, Any]] = {"recorder": recorders.RECORDERS, "topology": topologies.TOPOLOGIES}
    for what, table in tables.items():
        for name, kind in table.items():
            if field in kind.provides:
                without = [need for need in kind.needs if need not in there]
                return f"the {what} `{name}`" + (f" with {' and '.join(without)}" if without else ", if the row names it")
    return ELSEWHERE.get(field) or SET.get(field) or AWAITED.get(field, "a recorder, a topology or a task of your own")


def of_environment(objective: Objective, facts: Mapping[str, str] = {}, contexts: int = 1, apart: bool = False
                   ) -> tuple[str, ...]:
    """The further fields of a run in an environment that provides these `facts` about turns.

    Turns as rows are for estimators; rows of an objective are trajectories. If a trajectory has several `contexts`, the rows of
    both are contexts; the rows of an objective may be a subset of them. If turns have the fact `step`, estimators read the
    turns of all contexts. If contexts are those of agents (`apart`), estimators of agents read trajectories.
    """
    if apart:
        there = ("step_ids", "turns", "traj", "step", *facts, "settled")
        return tuple(name for name in there if name not in objective.needs or name not in ("traj", "step", *AGENTS))
    if contexts > 1:
        turns = (STEP, "step_rewards") if STEP in facts else ()
        of_contexts = (name for name, join in facts.items() if join != "turn" or turns and name not in turns)
        return ("step_ids", "turns", *turns, *of_contexts, *(() if "traj" in objective.needs else ("traj",)))
    rows = {*TURNS, *AGENTS}
    there = ("step_ids", "turns", *TURNS, *facts, *(("settled",) if "agent" in facts else ()))
    return tuple(name for name in there if name not in rows) if {*objective.needs} & rows else there
