"""Commands that are started by another one and end with it, also if it is killed."""
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

PATIENCE = 300.0  # seconds that a stopped run may take to save its last step
_PARENT, _CHECK = "JAXRL_LLM_PARENT", 1.0  # the process that a command ends with; seconds between two looks at it


def start(command: Sequence[str | os.PathLike], environment: Mapping[str, str] | None = None, **options) -> subprocess.Popen:
    """Starts one of this package's commands, which `end_with_parent` stops once this process is gone."""
    return subprocess.Popen(command, env={**(os.environ if environment is None else environment), _PARENT: str(os.getpid())},
                            **options)


def end_with_parent() -> None:
    """Sends a process that comes from `start` a SIGTERM when its parent is gone, and a SIGKILL `PATIENCE` seconds later."""
    if (parent := os.environ.pop(_PARENT, "")).isdecimal():
        threading.Thread(target=_watch, args=(int(parent),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getpid(), number)
        time.sleep(PATIENCE)
