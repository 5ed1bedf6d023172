"""An environment of two turns whose problems have solutions, for methods that show them to the policy."""
import dataclasses

import chatter

from jaxrl_llm.environments import Environment, Turn
from jaxrl_llm.tasks.base import Problem, Task


def say() -> Environment:
    """Opens with the prompt of the problem; a trajectory with a letter from a to f in it is right."""
    def problem(number):
        return Problem(({"role": "user", "content": f"Say {number}."},), "f", number, extra={"solution": f"{number} is b c f"})

    def reset(problem, key):
        return {"turn": 0, "right": False}, list(problem.prompt)

    def step(state, message):
        state["turn"] += 1
        good = any("a" <= letter <= "f" for letter in message["content"])
        first, state["right"] = good and not state["right"], state["right"] or good
        return Turn([{"role": "user", "content": "Go on."}], float(first), state["turn"] == 2)

    problems = [problem(number) for number in range(24)]
    return Environment(name="say", task=Task("say", problems[:16], problems[16:], "environment"), reset=reset, step=step,
                       replayable=True, facts={}, returns=(0.0, 1.0))


def deaf() -> Environment:
    """The same, whose openings are made of what problems hold beside their prompts, whatever these say."""
    spoken = say()
    return dataclasses.replace(spoken, reset=lambda problem, key: (
        spoken.reset(problem, key)[0], [{"role": "user", "content": f"Say {problem.extra['solution'][0]}."}]))


def get_config(method, **changes):
    """A small run in it that keeps all groups."""
    return chatter.get_config(method=method, environment="planned:say", filters="none", **{
        "model.num_layers": 1, "sampling.turn_tokens": 6, "sampling.max_tokens": 40, **changes})
