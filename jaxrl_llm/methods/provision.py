"""What a method reads, and who provides it: a method runs if everything that its parts need is provided.

Each entry of `PROVIDED` is a field of `Rollouts`, or an entry of its `extras`, that a run of today fills in; each of `AWAITED`
one that runs of some kinds alone fill in, or nobody yet, and what would. A run that has such a part adds its name to what is
provided, as environments and tasks do with their facts.
"""
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxrl_llm import control
from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.methods.base import Method
from jaxrl_llm.objectives.base import Objective

PROVIDED = {
    **dict.fromkeys(("tokens", "prompt_tokens", "prompt_mask", "prompt_ids", "behavior_logprobs", "entropies", "policy_version",
                     "truncated", "current_version"), "the sampler"),
    **dict.fromkeys(("rewards", "reward_components", "correct", "answers"), "the reward"),
    "task": "the task",
    "old_logprobs": "the recorder `old`", "ref_logprobs": "the recorder `reference`", "features": "the recorder `features`",
    **dict.fromkeys(("max_logprobs", "greedy_logprobs"), "the recorder `greedy`"),
    "prior": "the prior of prompts",
}
OBSERVED = control.FACTS.keys()  # what a run lets controllers observe
READ = {*control.Settings._fields}  # what it reads of them
TURNS = ("traj", "step", "step_rewards", "obs", "act", "next_obs")  # of turns as rows, see `advantages.turns`
AGENTS = ("agent", "functional_group", "game")  # of turns of environments in which the policy speaks for several agents
REPLAYED = {"age", "replayed"}  # what a run gives of rollouts where its method replays
_TURNS, _TREE, _EXPERT = "an environment, config.environment", "a topology of trees", "expert completions in the groups"
_TEACHER, _TOOLS = "a recorder with a teacher's weights", "an environment with tools"
AWAITED = {
    **dict.fromkeys((*TURNS, "step_ids", "turns"), _TURNS), "returns": "a topology of turns with a replay buffer",
    **dict.fromkeys(AGENTS, "an environment of several agents"),
    **dict.fromkeys(("node", "parent", "path", "final"), _TREE),
    **dict.fromkeys(("tool_calls", "tool_errors", "answer_blocks", "malformed", "void", "format_rewards", "tool_failed",
                     "tool_unknown"), _TOOLS),
    "rewritten": "the environment `purified`", "skill_used": "the environment `skill_chain`",
    **dict.fromkeys(("teacher_logprobs", "teacher_id"), _TEACHER),
    "replay_weights": "a replay buffer with priorities",
    "base_logprobs": "a recorder with a base model's weights",
    "prm_logprobs": "a recorder with a process reward model",
    "expert": _EXPERT, "targets": "a sampler of single tokens along expert text",
    "hinted": "rollouts that begin with a hint", "hint_mask": "rollouts that begin with a hint",
    "match": "a topology that walks along recorded trajectories", "retry_step": "a topology that tries again from a step",
    "flawed": "a judge that marks flawed solutions", "values": "a critic, which this method's estimator gives no targets",
    **dict.fromkeys(("hits", "ranks", "eos"), "the environment `ranked_list`"),
    "target_weights": "a task of boxes, config.task=grounding", "repository": "a task of patches, config.task=edits",
    "score_sq_norms": "a recorder of single completions' gradient norms",
    "gradient_norms": "a pilot pass that measures the gradients of right completions before the others are shared out",
}


THERE = ("an environment", "the environment", "a task of")  # how those of `AWAITED` begin that are part of the library


class Lack(NamedTuple):
    """Something that a method needs and nobody provides, and who could."""

    what: str
    who: str


def needs_of(method: Method, estimator: Estimator, objective: Objective) -> set[str]:
    """Fields of `Rollouts`, or entries of its `extras`, that a method and its parts read."""
    filters = [control.make_filter(name) for name in method.filters if name in control.filter_names()]
    return {*method.needs, *estimator.needs, *objective.needs, *(name for one in filters for name in one.needs)}


def lacks(method: Method, estimator: Estimator, objective: Objective, provided: Iterable[str] = ()) -> list[Lack]:
    """What is missing for the method to run, where `provided` is there beside what every run has.

    What a critic, a replay and the settings of controllers provide is there for methods that have them.
    """
    there = {*PROVIDED, *provided} | (set() if estimator.value_targets is None else {"values"})
    there |= set() if estimator.turn_critic is None else {"turn_q", "turn_v"}
    there |= set() if method.replay is None else REPLAYED
    there |= {knob for name in method.controllers if name in control.names() for knob in control.make(name).knobs}
    found = [Lack(name, AWAITED.get(name, "a recorder, a topology or a task of your own"))
             for name in sorted(needs_of(method, estimator, objective) - there)]
    for name in method.filters:
        if name not in control.filter_names():
            found.append(Lack(f"filter {name}", "a file of jaxrl_llm.control"))
    for name in method.controllers:
        known = control.make(name) if name in control.names() else None
        if known is not None and OBSERVED >= set(known.facts) and READ >= set(known.knobs):
            continue
        who = "a file of jaxrl_llm.control"
        if known is not None:
            reads = f", by {', '.join(known.facts)}" if known.facts else ""
            who = f"a run that sets {', '.join(known.knobs)}{reads}"
        found.append(Lack(f"controller {name}", who))
    return found


def of_environment(objective: Objective, facts: Mapping[str, str] = {}, contexts: int = 1) -> tuple[str, ...]:
    """What a run in an environment that tells these `facts` of turns provides beside.

    Turns as rows are for estimators; rows of an objective are trajectories. Where a trajectory has several `contexts`, rows are
    contexts for both; rows of an objective may be some of them.
    """
    if contexts > 1:
        of_contexts = (name for name, join in facts.items() if join != "turn")
        return ("step_ids", "turns", *of_contexts, *(() if "traj" in objective.needs else ("traj",)))
    rows = {*TURNS, *AGENTS}
    there = ("step_ids", "turns", *TURNS, *facts)
    return tuple(name for name in there if name not in rows) if {*objective.needs} & rows else there


def check(method: Method, estimator: Estimator, objective: Objective, provided: Iterable[str] = ()) -> None:
    """Raises NotImplementedError that names what is missing and who could provide it."""
    if found := lacks(method, estimator, objective, provided):
        raise NotImplementedError(
            f"method {method.slug!r} needs {'; '.join(f'{lack.what} (from {lack.who})' for lack in found)}, which this run "
            "does not provide. Its parts can be used from your own loop; `python -m jaxrl_llm.methods` lists the other methods")
