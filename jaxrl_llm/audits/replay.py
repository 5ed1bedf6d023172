"""`python -m jaxrl_llm.audits.replay WORKDIR UID`: plays a trajectory again that the environment of a run lost.

It is played alone, in this process and without a deadline, from what WORKDIR/invalid.jsonl has of it. Each turn is printed, and
the failure with its traceback. The exit code is 1 if the environment fails, 0 if not, 2 if there is nothing to replay.
"""
import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import environments
from jaxrl_llm.environments import base
from jaxrl_llm.environments.runner import Lost
from jaxrl_llm.runs.lost import FILE_NAME, KEPT, read_lost
from jaxrl_llm.setup.judge import named_environment
from jaxrl_llm.setup.phases import at
from jaxrl_llm.setup.stored import whole_config
from jaxrl_llm.store import bucket
from jaxrl_llm.store.begun import read_begun, up_to
from jaxrl_llm.store.workdir import load_code
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tools.visible import visible

_LISTED = 10  # uids in the error about an unknown one


def find(folder: Path, uid: int) -> tuple[int, Lost]:
    """The step and the newest record of a lost trajectory; ValueError for one that has none."""
    records = read_lost(folder)
    found = [(step, lost) for step, lost in records if lost.uid == uid]
    if not found:
        last = ", ".join(str(lost.uid) for _, lost in records[-_LISTED:])
        raise ValueError(f"{folder / FILE_NAME} has no trajectory {uid}; the last ones that it has are {last}. Of each kind of "
                         f"failure it keeps the newest {KEPT} at least")
    return found[-1]


def problem_of(task: Task, number: int) -> Problem:
    """The problem with this id; ValueError if there is none."""
    train, held_out = len(task.train), len(task.heldout)
    if number >= train + held_out:
        raise ValueError(f"the trajectory is of problem {number}, and the task now has {train + held_out} problems; replay it "
                         "with the data of the run")
    return task.train[number] if number < train else task.heldout[number - train]


def play(environment: base.Environment, problem: Problem, lost: Lost) -> bool:
    """Prints a lost trajectory while it is played again, and the failure; returns whether there is one."""
    state: Any = None
    turns: list[base.Turn] = []
    try:
        for message in (None, *lost.said):
            start = time.perf_counter()
            if message is None:
                state, turn = base.begin(environment, problem, lost.key)
            else:
                _show(message)  # before the step, which may never return
                turn = base.advance(environment, state, message)
            turns.append(turn)
            print(f"--- turn {len(turns) - 1}: reward {turn.reward:g}{', done' * turn.done}, "
                  f"{time.perf_counter() - start:.3f} s")
            for answer in turn.messages:
                _show(answer)
    except (Exception, SystemExit):
        print(f"--- turn {len(turns)} fails:\n{visible(traceback.format_exc())}", end="")
    failed = len(turns) <= len(lost.said)
    if not failed:
        print("--- it did not fail this time")
    if len(turns) < lost.turn or base.digest(turns[:lost.turn]) != lost.seen:
        print("--- its turns before the failure are not those of the run: the environment has changed since, or it depends on "
              "more than problem, key and messages")
    return failed


def _show(message: base.Message) -> None:
    print(f"[{message['role']}]\n{visible(message['content'])}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays a lost trajectory; returns 1 if the environment fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.audits.replay", description=__doc__)
    parser.add_argument("workdir", help="the folder of a run")
    parser.add_argument("uid", type=int, help="of the trajectory, as errors and invalid.jsonl have it")
    given = parser.parse_args(arguments)
    try:
        folder = bucket.local(given.workdir)
        whole = whole_config(folder)  # a folder of no run is an error before what it lacks
        step, lost = find(folder, given.uid)
        config = at(whole, up_to(read_begun(folder), step))  # that of the phase of this step
        load_code(folder)
        name, options = named_environment(config)
        environment = environments.make(name, **options)
        base.check_replayable(environment)
        problem = problem_of(environment.task, lost.problem)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"trajectory {lost.uid} of step {step} in {environment.name}, problem {problem.id}: {lost.kind} at turn {lost.turn}, "
          f"{visible(lost.message)}", flush=True)
    return int(play(environment, problem, lost))


if __name__ == "__main__":
    sys.exit(main())
