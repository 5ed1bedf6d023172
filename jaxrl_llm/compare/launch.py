"""Runs one after the other, or a few at a time, each in its own process; stops each when its budget is used up."""
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_llm.compare.ledger import read_run
from jaxrl_llm.compare.plan import Budget, Job, write_config
from jaxrl_llm.runs.progress import format_seconds
from jaxrl_llm.store.lock import is_locked
from jaxrl_llm.store.workdir import checkpoint_steps
from jaxrl_llm.tools import lifetime

TRAIN = Path(__file__).parents[1] / "experiments" / "train.py"


class Share(NamedTuple):
    """Shares of a budget: used by now, and used at the last held-out evaluation. A run ends when the second reaches 1."""

    now: float
    evaluated: float

    @property
    def done(self) -> bool:
        return self.evaluated >= 1


def used(folder: Path, budget: Budget) -> Share:
    """How much of the budget the run in `folder` has used."""
    run = read_run(folder, (budget.unit,))
    if run is None:
        return Share(0.0, 0.0)
    return Share(float(run.spent[budget.unit][-1]) / budget.size, run.evaluated(budget.unit) / budget.size)


def command(job: Job, options: Sequence[str] = ()) -> list[str]:
    """The command line that starts a job, or continues it where it stopped."""
    begun = checkpoint_steps(job.folder / "checkpoints")
    return [sys.executable, str(TRAIN), f"--config={job.config_file}", f"--config.seed={job.seed}",
            f"--workdir={job.folder}", *options, *(["--resume"] if begun else [])]


def run_all(jobs: Sequence[Job], budget: Budget, *, parallel: int = 1, options: Sequence[str] = (),
            say: Callable[[str], None] = print, poll: float = 1.0, interval: float = 30.0) -> list[Job]:
    """Runs unfinished jobs; returns the jobs that failed; their log.txt gives the reason. The others continue.

    A job is stopped after the first held-out evaluation at or beyond its budget. On an interrupt, a SIGTERM or an error all
    running jobs save their last step, so that the same call continues them; if this process is killed, they do so too, and
    the same call waits for their ends.
    """
    for one in (signal.SIGINT, signal.SIGTERM):  # a background shell ignores interrupts, and children inherit that
        signal.signal(one, signal.default_int_handler)
    shares = {job: used(job.folder, budget) for job in jobs}
    waiting = [job for job in jobs if not shares[job].done]
    finished, failed, running, stopping = len(jobs) - len(waiting), [], {}, {}
    patient = time.monotonic() + lifetime.PATIENCE
    if held := [job.title for job in waiting if is_locked(job.folder)]:
        say(f"waiting for runs of an earlier comparison to save their last step and end: {', '.join(held)}")
    clock = _Clock(_runs(shares), len(jobs), say, interval)
    if finished:
        say(f"{finished} of {len(jobs)} runs are finished already")
    try:
        while waiting or running:
            while len(running) < parallel and (job := next((
                    one for one in waiting if time.monotonic() > patient or not is_locked(one.folder)), None)):
                waiting.remove(job)
                running[job] = _start(job, budget, options, environment(parallel))
                say(f"[{finished + len(failed) + len(running)}/{len(jobs)}] {job.title}: started, log in {job.folder}/log.txt")
            time.sleep(poll)
            for job, process in list(running.items()):
                ended = process.poll() is not None
                shares[job] = used(job.folder, budget)
                if not ended and shares[job].done and job not in stopping:
                    process.send_signal(signal.SIGINT)
                    stopping[job] = time.monotonic()
                if not ended and job in stopping and time.monotonic() - stopping[job] > lifetime.PATIENCE:
                    process.kill()
                if ended:
                    del running[job]
                    if shares[job].done:
                        finished += 1
                        say(f"    {job.title}: finished, {_score(job)}")
                    else:
                        failed.append(job)
                        say(f"    {job.title}: FAILED with exit code {process.returncode}: {last_words(job.folder)}")
            clock.tick(_runs(shares), running, shares)
    except BaseException as error:  # nobody else would end these processes
        _interrupt(running.values())
        error.add_note("the same command continues from here")
        raise
    return failed


def last_words(folder: Path) -> str:
    """The last lines of a run's log, on one line."""
    log = folder / "log.txt"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return " | ".join(line.strip() for line in lines[-3:] if line.strip()) or "no log"


def environment(parallel: int) -> dict[str, str]:
    """The environment of each of `parallel` runs at a time, which share a GPU; alone, a run takes three quarters of it."""
    return ({"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / parallel:.2f}"} if parallel > 1 else {}) | os.environ


def _start(job: Job, budget: Budget, options, variables) -> subprocess.Popen:
    write_config(job, budget)
    job.folder.mkdir(parents=True, exist_ok=True)
    with open(job.folder / "log.txt", "a") as log:
        return lifetime.start(command(job, options), variables, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _interrupt(processes) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + lifetime.PATIENCE
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()


def _score(job: Job) -> str:
    values = read_run(job.folder, ("steps",)).metrics["eval/score"]
    values = values[np.isfinite(values)]
    return f"held-out score {values[0]:.1%} -> {values[-1]:.1%}"


def _runs(shares: dict[Job, Share]) -> float:
    """Amount of work done, in units of runs."""
    return sum(min(share.now, 1) for share in shares.values())


class _Clock:
    """Prints a progress line every `interval` seconds, with the time left at the speed so far."""

    def __init__(self, done: float, total: int, say, interval: float):
        self._start, self._done, self._total = time.monotonic(), done, total
        self._say, self._interval, self._last = say, interval, time.monotonic()

    def tick(self, done: float, running, shares) -> None:
        now = time.monotonic()
        if now - self._last < self._interval or not running:
            return
        self._last = now
        speed = (done - self._done) / (now - self._start)
        left = f", {format_seconds((self._total - done) / speed)} left" if speed > 0 else ""
        each = ", ".join(f"{job.title} {min(shares[job].now, 1):.0%}" for job in running)
        self._say(f"    {done:.1f} of {self._total} runs{left}: {each}")
