"""The tasks, rewards and evaluation sets that a configuration specifies as text: `name(option=value, ...), ...`."""
import dataclasses
import itertools
import math
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import rewards, tasks
from jaxrl_llm.sampling.evaluation_set import OF_SETS, EvalSpec
from jaxrl_llm.tasks.base import check_each, fronts_of, question_of
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import one_of

OF_TASKS = ("label", "weight", "reward")  # options of every task that a text names


def make_task(text: str) -> tasks.Task:
    """The task of `"name(option=value, ...)"`, or the mixture of several.

    Every task has three further options: `reward`, rewards that replace its own; and, if there are several tasks, `label`, its
    name, and `weight`, its share of a batch. Raises ValueError if the text names no task.
    """
    calls = written.calls(text)
    if not calls:
        raise ValueError(f"config.task={text!r} names no task; give {', '.join(tasks.TASKS)}, or your own module:function, "
                         "with its options in brackets, for example \"dataset(path='problems.jsonl')\"")
    parts = [_part(name, **options) for name, options in calls]
    return parts[0].task if len(parts) == 1 else tasks.mixture(parts)


def _part(name: str, label: str = "", weight: float = 1.0, reward: str = "", **options: Any) -> tasks.Part:
    """The task of a call."""
    task = tasks.make(name, **options)
    if reward:
        task = dataclasses.replace(task, reward=reward)
    return tasks.Part(str(label) or name.rpartition(":")[2], task, weight)


def make_reward(config: ConfigDict, task: tasks.Task) -> rewards.Combined | rewards.ByTask:
    """The weighted sum of `config.rewards`, or else the task's own reward; each of several tasks has its own reward.

    The first component is the score. Raises ValueError if several rewards share the largest weight and `config.score` does not
    name the score, and for a problem that lacks what its reward reads, by its file and line.
    """
    made = _reward(config, task)
    check_each(itertools.chain(task.train, task.heldout), made.check)
    return made


def _reward(config: ConfigDict, task: tasks.Task) -> rewards.Combined | rewards.ByTask:
    if config.rewards or not task.parts:
        return _combined(config, config.rewards or task.reward, config.score)
    if config.score:
        labels = ", ".join(part.label for part in task.parts)
        raise ValueError(f"config.score={config.score!r} is one for all tasks, but each of {labels} has rewards of its own; "
                         "leave it empty: the reward of largest weight is the score")
    return rewards.ByTask(tuple(part.label for part in task.parts),
                          tuple(_combined(config, part.task.reward, "") for part in task.parts))


def _combined(config: ConfigDict, text: str, score: str) -> rewards.Combined:
    """The weighted sum of the rewards of a text, with the score first."""
    parts = [rewards.make(name, **options) for name, options in written.calls(text)]
    names = [part.name for part in parts]
    largest = [part.name for part in parts if part.weight == max(part.weight for part in parts)]
    if not score and len(largest) > 1:
        raise ValueError(f"the rewards {', '.join(largest)} have the same weight; set config.score to the name of the one "
                         "that is evaluated and filtered on, or give it the largest weight")
    scored = one_of("reward for config.score", score or largest[0], names)
    ordered = sorted(parts, key=lambda part: part.name != scored)
    return rewards.combine(ordered, on_error=config.reward_errors, deadline=config.reward_deadline)


def make_sets(config: ConfigDict, task: tasks.Task) -> tuple[EvalSpec, ...]:
    """The evaluation sets of `config.eval.sets`, with the options of tasks and of an `EvalSpec`.

    Raises:
      ValueError: labels that equal each other or a label of the training tasks, values outside their range, or held-out
        problems that are trained on.
    """
    made = []
    taken = {part.label for part in task.parts}
    for name, options in written.calls(config.eval.sets):
        part = _part(name, **{key: value for key, value in options.items() if key not in OF_SETS})
        own = {key: options.get(key, default) for key, default in OF_SETS.items()}
        spec = EvalSpec(part.label, part.task, _combined(config, part.task.reward, ""), **own)
        if not spec.label or spec.label in taken or "/" in spec.label:
            raise ValueError(f"the evaluation set {spec.label!r} needs a name of its own without a slash; give it a label, "
                             f"for example \"{name}(..., label=hard)\"")
        samples, top_p, tokens = (1 if own[key] is None else own[key] for key in ("samples", "top_p", "max_tokens"))
        warmth = 1 if spec.temperature is None else spec.temperature
        inside = min(spec.problems, samples, tokens) >= 1 and spec.every >= 0 and 0 < top_p <= 1 and 0 <= warmth < math.inf
        if not inside:
            raise ValueError(f"evaluation set {spec.label!r}: problems={spec.problems}, every={spec.every}, samples="
                             f"{spec.samples}, temperature={spec.temperature}, top_p={spec.top_p}, max_tokens="
                             f"{spec.max_tokens}; problems, samples and max_tokens are at least 1, every and temperature at "
                             "least 0, top_p above 0 and at most 1")
        check_each(spec.task.heldout, spec.reward.check)
        taken.add(spec.label)
        made.append(spec)
    _refuse_trained(task, made)
    return tuple(made)


def _refuse_trained(task: tasks.Task, sets: list[EvalSpec]) -> None:
    """Raises ValueError for an evaluation set with problems that the task trains on, case and white space aside."""
    if not sets:
        return
    asked = {}
    for spec in sets:
        (front,) = fronts_of([tasks.Part(spec.label, spec.task)])
        asked[spec.label] = {question_of(problem, front) for problem in spec.task.heldout}
    everything, fronts = set().union(*asked.values()), fronts_of(task.parts or [tasks.Part(task.name, task)])
    trained = {question for problem in task.train if (question := question_of(problem, fronts[problem.task])) in everything}
    for label, questions in asked.items():
        if shared := questions & trained:
            raise ValueError(f"{len(shared)} of {len(questions)} problems of the evaluation set {label!r} are trained on, for "
                             f"example {min(shared)[:100]!r}; take another split, seed or file for the set, or hold these "
                             "problems out of config.task")
