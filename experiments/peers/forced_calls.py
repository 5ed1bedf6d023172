"""The environment of `agent_work.py` for this library: the very class that TRL takes, whatever is said read as a call."""
import dataclasses

from jaxrl_llm import tasks
from jaxrl_llm.environments import Environment, Turn, of_methods
from jaxrl_llm.environments.parsers import hermes
from jaxrl_llm.experiments.peers.agent_work import CALL, Calculator, distinct


def forced(*, turns: int = 4, seconds: float = 0.0) -> Environment:
    """One-digit sums in which every turn but the last of `turns` calls the calculator, which takes some `seconds`."""
    class Timed(Calculator):
        pass

    Timed.seconds = seconds
    task = tasks.make("arithmetic", level="digit", chat=True)
    inner = of_methods(Timed, task, reward=lambda played: 0.0)

    def reset(problem, key):
        state, messages = inner.reset(problem, key)
        return (state, []), messages

    def step(state, message):
        played, said = state
        said.append(message["content"])
        if len(said) == turns:
            return Turn(reward=distinct("".join(said)), done=True)
        hermes(message["content"])  # what was sampled is parsed all the same
        return inner.step(played, {"role": "assistant", "content": CALL})._replace(info={})

    return dataclasses.replace(inner, reset=reset, step=step, facts={}, waits=seconds > 0)
