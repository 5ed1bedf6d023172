"""The tiny run of the integration tests, here and as a process of its own."""
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

from jaxrl_llm.runs import loop

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "integration" / "tiny_config.py"
QUIET = {"eval.every": 0, "samples_every": 0, "steps": 3}


def config(**changes):
    c = runpy.run_path(str(CONFIG))["get_config"]()
    c.update_from_flattened_dict(QUIET | changes)
    return c


def train(workdir, resume=False, **changes):
    return loop.train(config(**changes), workdir, resume)


def start(workdir: Path, log: Path, *options: str, **changes) -> subprocess.Popen:
    """`python experiments/train.py`, whose output goes to `log`."""
    given = [f"--config.{name}={value}" for name, value in (QUIET | changes).items()]
    cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    with open(log, "w") as file:
        command = [sys.executable, ROOT / "experiments" / "train.py", f"--config={CONFIG}", f"--workdir={workdir}"]
        return subprocess.Popen([*command, cache, *given, *options], stdout=file, stderr=file,
                                env=os.environ | {"PYTHONPATH": str(ROOT)})


def wait_until(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)
