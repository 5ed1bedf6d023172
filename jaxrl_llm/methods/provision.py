"""The fields that methods read, and their providers: a method runs if everything that its parts need is provided.

Each entry of `PROVIDED` is a field of `Rollouts`, or an entry of its `extras`, that every run fills in. `ELSEWHERE` has the
fields that only some kinds of run fill in, with the part that provides each; a run that has such a part adds the field to the
provided ones, as environments and tasks do with their facts. `AWAITED` has them and those that no run fills in yet.
"""
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxrl_llm import control, replay
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.methods.base import Method
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.recorders import base as recorders

RECORDED = {name: recorder for recorder, names in reversed(recorders.FIELDS.items()) for name in names}  # by the first one
PROVIDED = {
    **{name: f"the recorder `{recorder}`" for name, recorder in RECORDED.items()},
    **dict.fromkeys(("tokens", "prompt_tokens", "prompt_mask", "prompt_ids", "behavior_logprobs", "entropies", "policy_version",
                     "truncated", "current_version"), "the sampler"),
    **dict.fromkeys(("rewards", "reward_components", "correct", "answers"), "the reward"),
    "task": "the task",
    "prior": "the prior of prompts",
}
OBSERVED = control.FACTS.keys()  # the facts that a run lets controllers observe
READ = {*control.Settings._fields}  # the settings that a run reads from controllers
TURNS = ("traj", "step", "step_rewards", "obs", "act", "next_obs")  # fields of turns as rows, see `advantages.turns`
AGENTS = ("agent", "functional_group", "game", "settled")  # fields of environments whose policy speaks for several agents
REPLAYED = {"age", "replayed"}  # fields that a run provides if its method replays rollouts
GUIDED = {"expert", "hinted", "hint_mask"}  # fields for completions that begin with solutions, see `Method.guidance`
_TURNS = "an environment, config.environment"
_TEACHER, _TOOLS = "a teacher, config.teacher.path", "an environment with tools"
ELSEWHERE = {
    **dict.fromkeys((*TURNS, "step_ids", "turns"), _TURNS),
    **dict.fromkeys(AGENTS, "an environment of several agents"),
    **dict.fromkeys(("tool_calls", "tool_errors", "answer_blocks", "malformed", "void", "format_rewards", "tool_failed",
                     "tool_unknown", "error_words"), _TOOLS),
    "rewritten": "the environment `purified`", "skill_used": "the environment `skill_chain`",
    **dict.fromkeys(("teacher_logprobs", "teacher_id"), _TEACHER),
    **dict.fromkeys(("hits", "ranks", "eos"), "the environment `ranked_list`"),
    "target_weights": "a task of boxes, config.task=grounding", "repository": "a task of patches, config.task=edits",
}
AWAITED = ELSEWHERE | {
    "returns": "a topology of turns with a replay buffer",
    **dict.fromkeys(("node", "parent", "path", "final"), "a topology of trees"),
    "prm_logprobs": "a recorder with a process reward model",
    "targets": "a sampler of single tokens along expert text",
    "match": "a topology that walks along recorded trajectories", "retry_step": "a topology that tries again from a step",
    "flawed": "a judge that marks flawed solutions",
}


class Lack(NamedTuple):
    """A need of a method that no run provides, and the part that could provide it."""

    what: str
    who: str


def needs_of(method: Method, estimator: Estimator, objective: Objective) -> set[str]:
    """Fields of `Rollouts`, or entries of its `extras`, that a method and its parts read."""
    filters = [control.make_filter(name) for name in method.filters if name in control.filter_names()]
    return {*method.needs, *estimator.needs, *objective.needs, *(name for one in filters for name in one.needs)}


def lacks(method: Method, estimator: Estimator, objective: Objective, provided: Iterable[str] = ()) -> list[Lack]:
    """The unmet needs of the method, if `provided` is available beside the fields of every run.

    Fields from a critic, a replay, a guide and the settings of controllers are available to methods that have these parts.
    """
    there = {*PROVIDED, *provided} | (set() if estimator.value_targets is None else {"values"})
    there |= set() if estimator.turn_critic is None else {"turn_q", "turn_v"}
    there |= set() if method.replay is None else REPLAYED
    if method.replay is not None and method.replay[0] in replay.names():
        there |= {"replay_weights"} if replay.make(method.replay[0], **method.replay[1]).weights is not None else set()
    there |= set() if method.guidance is None else GUIDED
    there |= {knob for name in method.controllers if name in control.names() for knob in control.make(name).knobs}
    missing = [Lack(name, AWAITED.get(name, "a recorder, a topology or a task of your own"))
               for name in sorted(needs_of(method, estimator, objective) - there)]
    for name in method.filters:
        if name not in control.filter_names():
            missing.append(Lack(f"filter {name}", "a file of jaxrl_llm.control"))
    for name in method.controllers:
        known = control.make(name) if name in control.names() else None
        if known is not None and OBSERVED >= set(known.facts) and READ >= set(known.knobs):
            continue
        who = "a file of jaxrl_llm.control"
        if known is not None:
            reads = f", by {', '.join(known.facts)}" if known.facts else ""
            who = f"a run that sets {', '.join(known.knobs)}{reads}"
        missing.append(Lack(f"controller {name}", who))
    return missing


def unrecorded(needs: Iterable[str], recorded: Iterable[str]) -> set[str]:
    """The needs that are neither among the `recorded` fields of a run nor sampled, although recorders provide them."""
    return {name for name in needs if name in RECORDED and name != "entropies"} - {*recorded}


def of_environment(objective: Objective, facts: Mapping[str, str] = {}, contexts: int = 1, apart: bool = False
                   ) -> tuple[str, ...]:
    """The further fields of a run in an environment that provides these `facts` about turns.

    Turns as rows are for estimators; rows of an objective are trajectories. If a trajectory has several `contexts`, the rows of
    both are contexts; the rows of an objective may be a subset of them. If contexts are those of agents (`apart`), estimators
    of agents read trajectories.
    """
    if apart:
        there = ("step_ids", "turns", "traj", "step", *facts, "settled")
        return tuple(name for name in there if name not in objective.needs or name not in ("traj", "step", *AGENTS))
    if contexts > 1:
        of_contexts = (name for name, join in facts.items() if join != "turn")
        return ("step_ids", "turns", *of_contexts, *(() if "traj" in objective.needs else ("traj",)))
    rows = {*TURNS, *AGENTS}
    there = ("step_ids", "turns", *TURNS, *facts, *(("settled",) if "agent" in facts else ()))
    return tuple(name for name in there if name not in rows) if {*objective.needs} & rows else there


def check(method: Method, estimator: Estimator, objective: Objective, provided: Iterable[str] = ()) -> None:
    """Raises NotImplementedError that names the unmet needs and their possible providers."""
    if missing := lacks(method, estimator, objective, provided):
        raise NotImplementedError(
            f"method {method.slug!r} needs {'; '.join(f'{lack.what} (from {lack.who})' for lack in missing)}, which this run "
            "does not provide. Its parts can be used from your own loop; `python -m jaxrl_llm.methods` lists the other methods")
