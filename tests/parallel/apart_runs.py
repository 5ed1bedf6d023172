"""Runs whose processes sample apart, and what their steps sample; `apart_cases.py` runs them in two processes."""
import dataclasses
import json
import time
from collections.abc import Callable

import chatter
import jax
import numpy as np

from jaxrl_llm import rewards
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.environments import Environment
from jaxrl_llm.learning.schedules import sync
from jaxrl_llm.sampling.heldout import evaluate
from jaxrl_llm.setup import agreement, setup

TASK = {"environment": "", "task": "arithmetic(level=digit)", "rewards": "format(pattern='(?s).*[a-z].*')",
        "sampling.max_tokens": 4, "sampling.engine": "slots", "prompts.max_tokens": 0}
CASES = {
    "turns": TASK | {"method": "mc_grpo", "rewards": "format(pattern='(?s).*[a-z].*'), rank(weight=0.5)",
                     "sampling.micro_batches": 2},
    "lost": {"environment": "apart_runs:fragile", "method": "dars", "sampling.group": 2, "sampling.max_group": 6},
    "greedy": {"environment": "apart_runs:fragile", "method": "remax", "sampling.group": 2},
    "tools": {"environment": "tool_use(options={'level': 'digit', 'chat': True})", "prompts.max_tokens": 256},
    "game": {"environment": "chatter:alphabet"},
    "replay": TASK | {"method": "rapo", "learner.minibatches": 1},
}


def rank(*, weight: float = 1.0) -> rewards.Reward:
    """A reward that sees a whole batch: the share of completions with no greater sum of bytes."""
    def of(completions, answers, problems):
        sums = np.array([sum(one.encode()) for one in completions])
        return [float((sums <= own).mean()) for own in sums]

    return rewards.Reward("rank", of, weight, per="batch")


def register() -> None:
    """Names the reward, which other tests of a process must not see."""
    rewards.reward(rank)


def fragile() -> Environment:
    """`chatter.letters`, where the second turn raises in a fifth of the trajectories, by their keys."""
    inner = chatter.letters()

    def step(state, message):
        if state["turn"] == 1 and state["key"] % 5 == 0:
            raise KeyError("no such letter")
        return inner.step(state, message)

    return dataclasses.replace(inner, step=step)


def config_of(name: str, **changes):
    return chatter.get_config(**{"model.num_layers": 1, "environment_invalid": 0.9, **CASES[name], **changes})


def plain(forest: Forest) -> dict:
    """What a forest holds, without durations."""
    return {"columns": dict(forest.columns), "facts": dict(forest.facts), "ids": [one.id for one in forest.problems],
            "counts": [dict(forest.failures), dict(forest.invalid)]}


def forests(name: str, **changes) -> list[dict]:
    """The forests of an evaluation and of the first two batches of a run, between which those learn that control sampling."""
    run, params = setup.build(config_of(name, **changes))
    state = setup.initial_state(run, params)
    seen = [evaluate(run.source, params, state.lora, problems=3, key=jax.random.key(7)).forest]
    taken = sync.steps(run.source, run.learner, state)
    learns = bool(run.learner.controls.by_name or run.source.memory)
    seen += [next(taken).finished.forest if learns else run.source.next(run.learner.publish(state)).forest for _ in range(2)]
    return [plain(forest) for forest in seen]


def stuck() -> Environment:
    """`chatter.letters` that hang in process 1: there the second turn of a third of the trajectories takes a minute."""
    inner = chatter.letters()

    def step(state, message):
        if state["turn"] == 1 and state["key"] % 3 == 0 and jax.process_index() == 1:
            time.sleep(60)
        return inner.step(state, message)

    return dataclasses.replace(inner, step=step)


def refusal(call: Callable, *arguments) -> str:
    """The error of a call."""
    try:
        call(*arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(process: int) -> dict[str, str]:
    """What two processes say that differ, or of which one has an environment that hangs."""
    level = ("digit", "sum3")[process]
    found = {"data": refusal(setup.build, config_of("replay", task=f"arithmetic(level={level})"))}
    own, agreement._of = agreement._of, lambda *files: f"code {process}"
    found["code"] = refusal(setup.build, config_of("replay"))
    agreement._of = own
    run, params = setup.build(config_of("lost", environment="apart_runs:stuck", environment_deadline=0.5, method="grpo"))
    state, told = setup.initial_state(run, params), []
    run.source.stream.partner.runner.report = told.append
    done = run.source.next(run.learner.publish(state)).forest
    found["lost"] = json.dumps([int(done.lost.sum()), len(told), [*{f"{one.kind} {one.host}" for one in told}]])
    run.source.stream.partner.runner._limit = 0.01
    found["hangs"] = refusal(run.source.next, run.learner.publish(state))
    snapshot = run.learner.publish(state)
    changed = {**snapshot.knobs, "temperature": np.float32(1 + process)}
    found["control"] = refusal(run.source.next, snapshot._replace(knobs=changed))
    return found
