"""The trajectories that the environment of a run lost, in the folder of the run, to be read and replayed."""
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from jaxrl_llm.environments.runner import Lost, Runner
from jaxrl_llm.store.lines import lines_up_to, naming, replace_text
from jaxrl_llm.tools.visible import visible

FILE_NAME = "invalid.jsonl"
KEPT = 50  # lost trajectories of each kind that the file keeps at least; twice as many at most
_SHOWN = 300  # characters of a message on the terminal


class LostWriter:
    """Appends each trajectory that a runner reports as lost to `folder`/invalid.jsonl, a JSON line with the `step` and `Lost`.

    Runners `apart` from it report the same way. The first message of each kind is said as well. The file keeps the newest lines
    of each kind. After a resume from `restored_step` (0: a new run) it loses the lines of later steps, which are done again.
    The evaluation after the restored step may be repeated too, so trajectories that already have a line of this step get no
    second one. `home` is the folder to name where it will be read, if another.
    """

    def __init__(self, folder: Path, restored_step: int, runner: Runner, say: Callable[[str], None],
                 home: PurePath | None = None):
        self.path, self.step, self._say, self._home = folder / FILE_NAME, restored_step, say, home or folder
        lines = lines_up_to(self.path, restored_step) if restored_step else []
        with naming(f"begin {self.path}"):
            if lines:
                replace_text(self.path, "".join(lines))
            else:
                self.path.unlink(missing_ok=True)
        records = [json.loads(line) for line in lines]
        self._count, self._said = Counter(record["kind"] for record in records), set[str]()
        self._before = {(record["step"], record["uid"]) for record in records if record["step"] == restored_step}
        self._last: Lost | None = None
        self._runner, runner.report = runner, self._write

    def note(self) -> str:
        """For the error that too many are lost: where the last one can be read, and the command that plays it again."""
        assert self._last is not None
        return f"the last of them is trajectory {self._last.uid}: {self._where(self._last.uid)}"

    def _where(self, uid: int) -> str:
        if not self._runner.environment.replayable:
            return (f"{self._home}/{FILE_NAME} has what the policy said; the environment is not replayable, so it cannot be "
                    "played again")
        command = f"python -m jaxrl_llm.audits.replay {shlex.quote(str(self._home))} {uid}"
        return f"{self._home}/{FILE_NAME} has it, and `{command}` plays it again alone"

    def _write(self, lost: Lost) -> None:
        self._last = lost
        if (self.step, lost.uid) in self._before:
            return
        with naming(f"append trajectory {lost.uid} to {self.path}"):
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": self.step, **lost._asdict()}) + "\n")
            self._count[lost.kind] += 1
            if self._count[lost.kind] > 2 * KEPT:
                self._shorten(lost.kind)
        if lost.kind not in self._said:
            self._said.add(lost.kind)
            message = " ".join(visible(lost.message).split())[:_SHOWN]
            host = f" on {lost.host}" if lost.host else ""
            self._say(f"the environment lost trajectory {lost.uid}, problem {lost.problem}, at turn {lost.turn}{host}: "
                      f"{lost.kind}, {message}; {self._where(lost.uid)}")

    def _shorten(self, kind: str) -> None:
        """Drops all lines of a kind but the newest `KEPT`."""
        lines = lines_up_to(self.path, math.inf)
        old = [row for row, line in enumerate(lines) if json.loads(line)["kind"] == kind][:-KEPT]
        replace_text(self.path, "".join(line for row, line in enumerate(lines) if row not in {*old}))
        self._count[kind] = KEPT


def read_lost(folder: Path) -> list[tuple[int, Lost]]:
    """The lost trajectories of the run in `folder`, each with its step, the oldest first.

    Raises FileNotFoundError if there are none, ValueError with the number of a broken line.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: no trajectory of this run was lost")
    records: list[dict[str, Any]] = [json.loads(line) for line in lines_up_to(path, math.inf)]
    return [(record.pop("step"), Lost(**record)) for record in records]
