"""An environment whose steps wait for the test."""
import threading

from jaxrl_llm.environments import Environment, Turn
from jaxrl_llm.tasks.base import seeded

DOORS: dict[str, threading.Event] = {}


def behind_doors():
    """Every step waits until the door with the name of its message is open."""
    def step(state, message):
        if message["content"] in DOORS:
            assert DOORS[message["content"]].wait(60)
        return Turn([{"role": "user", "content": message["content"]}], 1.0, message["content"].startswith("last"))

    return Environment(name="doors", task=seeded("doors", "Go.", 20, 5), step=step,
                       reset=lambda problem, key: ({}, [{"role": "user", "content": "Go."}]))
