"""Environments with faults on demand; worker processes import them too."""
import asyncio
import itertools
import os
import pathlib
import time

from jaxrl_llm.environments import Environment, Turn, of_methods
from jaxrl_llm.tasks.base import Task, seeded

TASK = seeded("faulty", "Say something.", 20, 5)
_COUNT = itertools.count()


def _reset(problem, key):
    return {"key": key, "said": []}, [{"role": "user", "content": f"problem {problem.id}"}]


def obedient(*, folder: str = "", replayable: bool = True) -> Environment:
    """Echoes, counts, and fails as a message names. `folder` records earlier attempts."""
    def tried_before(what):
        place = pathlib.Path(folder) / what
        before = place.exists()
        place.touch()
        return before

    def step(state, message):
        text = message["content"]
        state["said"].append(text)
        if text == "raise":
            raise KeyError("no such drawer")
        if text == "hang":
            time.sleep(60)
        if text == "slow":
            time.sleep(0.5)
        if text == "die":
            os._exit(3)
        if text.startswith("once") and not tried_before(text):
            raise ConnectionError("the server is away")
        if text == "rubbish":
            return {"reward": 1.0}
        if text == "nan":
            return Turn(reward=float("nan"), done=True)
        if text == "bye":
            return Turn(reward=0.5, done=True, info={"turns": len(state["said"])})
        seen = f"{state['key']} {' '.join(state['said'])} {os.getpid() if text == 'pid' else ''}"
        return Turn([{"role": "user", "content": seen}], reward=0.25)

    return Environment(name="obedient", task=TASK, reset=_reset, step=step, replayable=replayable)


def forgetful() -> Environment:
    """Answers differently every time, though it claims to be replayable."""
    return Environment(name="forgetful", task=TASK, reset=_reset,
                       step=lambda state, message: Turn([{"role": "user", "content": f"{next(_COUNT)} {os.getpid()}"}]))


def leaky() -> Environment:
    """Shows the answer, pays for a magic word and beyond its range, starts by the key, and never ends."""
    from jaxrl_llm.tasks import make
    task = make("arithmetic", level="add3", size=300, chat=True)
    return Environment(
        name="leaky", task=task, returns=(0.0, 1.0), oracle=lambda state: "no idea",
        reset=lambda problem, key: (problem, [{"role": "user", "content": f"{key} {problem.answer}"}]),
        step=lambda problem, message: Turn([{"role": "user", "content": "?"}], reward=2.0 * ("reward" in message["content"])))


class Drawers:
    """In the shape of TRL: `reset` takes the columns of a row, methods are tools."""

    def reset(self, hidden: int = 1, **row) -> str:
        self.hidden, self.opened = hidden, []
        return f" There are 3 drawers. ({row['prompt'][0]['content']})"

    def open_drawer(self, number: int, loudly: bool = False) -> str:
        """Opens a drawer.

        Args:
            number: which one, from 1 to 3
            loudly: whether with a bang
        """
        if not 1 <= number <= 3:
            raise ValueError("there is no such drawer")
        self.opened.append(number)
        return ("A coin" if number == self.hidden else "Dust") + "!" * loudly

    def get_reward(self) -> float:
        return float(self.hidden in self.opened[:1])

    def _not_a_tool(self):
        raise AssertionError


class PatientDrawers(Drawers):
    """The same, with every method asynchronous."""

    async def reset(self, hidden: int = 1, **row) -> str:
        await asyncio.sleep(0)
        return super().reset(hidden, **row)

    async def open_drawer(self, number: int, loudly: bool = False) -> str:
        """Opens a drawer.

        Args:
            number: which one, from 1 to 3
            loudly: whether with a bang
        """
        await asyncio.sleep(0)
        return super().open_drawer(number, loudly)

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return super().get_reward()


class Meeting:
    """A call returns when another trajectory makes one too."""

    barrier = asyncio.Barrier(2)

    def reset(self):
        self.met = False

    async def meet(self) -> str:
        """Waits for another one."""
        await self.barrier.wait()
        self.met = True
        return "Hello."


def how_met(meeting: Meeting) -> float:
    return float(meeting.met)


def find_the_coin() -> Task:
    return seeded("drawers", "Find the coin.", 10, 2)


def drawers() -> Environment:
    return of_methods(Drawers, find_the_coin(), turns=3)


def nothing():
    return "no environment"
