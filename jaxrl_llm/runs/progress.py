"""Progress of a run: a live line on a terminal, plain lines in a log file, never silence."""
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

ENDLESS = 1_000_000  # steps of a run that ends otherwise, such as by a budget of tokens
# Label -> (metric, format): the most important metrics of a run.
_SHOWN = {
    "reward": ("reward/mean", "{:.3f}"),
    "score": ("eval/score", "{:.1%}"),
    "solved": ("eval/solved", "{:.1%}"),
    "length": ("completion/length", "{:.0f}"),
    "tok/s": ("speed/tokens_per_second", "{:,.0f}"),
}


class Progress:
    """Shows step, phase, reward, speed and time left; `with Progress(total_steps, start_step) as progress`.

    On a terminal: a live bar (rich). Elsewhere: a line for each step, but at most one per `interval` seconds, and a line
    that names the phase whenever nothing was printed for that long (compilation, a long rollout).
    """

    def __init__(self, total_steps: int, start_step: int = 0, interval: float = 30.0, stream: TextIO | None = None):
        self.total_steps, self.interval = total_steps, interval
        self._stream = sys.stdout if stream is None else stream
        self._display = _Bar(self._stream, total_steps, start_step) if self._stream.isatty() else None
        self._step, self._phase, self._metrics = start_step, "starting", {}
        self._phase_start = time.monotonic()
        self._part: tuple[int, int] | None = None
        self._step_ends: deque[float] = deque(maxlen=20)
        self._seen_phases: set[str] = set()
        self._last_line = -float("inf")
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="progress", daemon=True)

    @property
    def _of(self) -> str:
        return f"/{self.total_steps}" if self.total_steps < ENDLESS else ""

    def __enter__(self) -> "Progress":
        if self._display:
            self._display.start()
        self._heart.start()
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self._finished.set()
        self._heart.join()
        if self._display:
            with contextlib.suppress(ValueError, OSError):  # a closed terminal
                self._display.stop()
        self._line(f"{'done' if kind is None else f'stopped by {kind.__name__}'} at step {self._step}{self._of}")

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        """Sets the name of the current phase ("compiling rollout"); a log file gets a line when a name is new.

        With a `total` the bar shows this phase, with `done` parts done, until the next phase.
        """
        with self._lock:
            self._phase, self._phase_start, self._part = text, time.monotonic(), (done, total) if total else None
            if self._display:
                self._display.update(*self._count(), self._summary(), text)
            elif text not in self._seen_phases:
                self._seen_phases.add(text)
                self._line(f"step {self._step}{self._of}  {text}...")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports `step` steps done; shows reward/mean, completion/length, speed/tokens_per_second, eval/score, eval/solved."""
        with self._lock:
            now = time.monotonic()
            self._step_ends.append(now)
            self._step = step
            self._metrics.update({name: float(metrics[name]) for name, _ in _SHOWN.values() if name in metrics})
            if self._display:
                self._display.update(*self._count(), self._summary(), self._phase)
            elif now - self._last_line >= self.interval or len(self._step_ends) == 1 or step >= self.total_steps:
                self._line(f"step {step}{self._of}  {self._summary()}".rstrip())

    def note(self, text: str) -> None:
        """Prints a line that stays, above the bar or in the log."""
        with self._lock:
            if self._display:
                with contextlib.suppress(ValueError, OSError):
                    self._display.print(text)
            else:
                self._line(text)

    def begins(self, total_steps: int, text: str) -> None:
        """A further stretch of the run begins, which has this number of steps by now; a line that stays says so."""
        self.total_steps = total_steps
        with self._lock:
            self._step_ends.clear()  # its steps may take another time, and its first one compiles
            self._metrics.clear()
        self.note(text)

    def _count(self) -> tuple[int, int]:
        return self._part or (self._step, self.total_steps)

    def _summary(self) -> str:
        shown = [f"{label} {form.format(self._metrics[name])}"
                 for label, (name, form) in _SHOWN.items()
                 if name in self._metrics]
        if len(self._step_ends) > 1:  # the first step includes compilation, so it only starts the clock
            seconds = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
            shown.append(f"{seconds:.2f} s/step")
            shown += [f"{format_seconds(seconds * (self.total_steps - self._step))} left"] if self._of else []
        return "  ".join(shown)

    def _beat(self) -> None:
        while not self._finished.wait(min(self.interval, 1.0) / 2):
            with self._lock:
                now = time.monotonic()
                seconds = format_seconds(now - self._phase_start)
                # A phase that has just begun is part of a step that ends soon, whose own line has more information.
                quiet = now - self._last_line >= self.interval and now - self._phase_start >= self.interval / 3
                if self._display:
                    self._display.update(*self._count(), self._summary(), f"{self._phase} {seconds}")
                elif quiet:
                    self._line(f"step {self._step}{self._of}  still {self._phase} ({seconds})")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        with contextlib.suppress(ValueError, OSError):  # a closed or broken pipe must not end the training
            print(text, file=self._stream, flush=True)


class _Bar:
    """The live line: spinner, bar, step, metrics, phase."""

    def __init__(self, stream: TextIO, total_steps: int, start_step: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (SpinnerColumn(), BarColumn(bar_width=24), MofNCompleteColumn(),
                   TextColumn("{task.fields[summary]}", markup=False),
                   TextColumn("{task.fields[phase]}", style="dim", markup=False))
        self._rich = RichProgress(*columns, console=Console(file=stream), expand=False)
        self._task = self._rich.add_task("", total=total_steps, completed=start_step, summary="", phase="starting")
        self.start, self.stop = self._rich.start, self._rich.stop

    def print(self, text: str) -> None:
        self._rich.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, done: int, total: int, summary: str, phase: str) -> None:
        self._rich.update(self._task, completed=done, total=total, summary=summary, phase=phase)


def format_seconds(seconds: float) -> str:
    """12 s, 3 min 05 s, 2 h 07 min, 4 d 03 h."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02d} h"
