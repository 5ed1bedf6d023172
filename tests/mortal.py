"""The game of `chatter`, which kills its run once, in the middle of a training episode."""
import dataclasses
import os
import signal
from pathlib import Path

import chatter
import psutil

from jaxrl_llm.environments import Environment


def letters(*, mark: str, replayable: bool = True, after: int = 36) -> Environment:
    """Kills the parent program `experiments/train.py` at the third turn of an episode, unless `mark` exists.

    The first `after` such turns pass, in any process. `mark` then has the number of finished turns.
    """
    inner, seen = chatter.letters(), Path(f"{mark}.seen")

    def step(state, message):
        if state["turn"] == 2 and not Path(mark).exists():
            with seen.open("a") as file:
                file.write("x")
        if state["turn"] == 2 and not Path(mark).exists() and seen.stat().st_size > after:
            Path(mark).write_text(str(state["turn"]))
            here = psutil.Process()
            for one in (here, *here.parents()):
                if any(part.endswith("train.py") for part in one.cmdline()):
                    os.kill(one.pid, signal.SIGKILL)
        return inner.step(state, message)

    return dataclasses.replace(inner, step=step, replayable=replayable)
