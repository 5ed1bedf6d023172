"""The cost of interruptions: size and seconds of a checkpoint, and seconds from the start of a process to its first new step.

  python experiments/benchmark.py checkpoints [--config=configs/arithmetic.py:smollm2] [--saves=5]
      [--config.prompts.per_step=4 ...]

A run is stopped by SIGTERM after its second step, restarted, and stopped for good after its first new step. Its last
checkpoint is then read and written again `--saves` times in one process; the table shows medians. File access uses the
operating system's cache if it has room.
"""
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxrl_llm.commands import command_line
from jaxrl_llm.tools import lifetime

_CONFIG = config_flags.DEFINE_config_file("config", "configs/arithmetic.py", "Configuration of the run.")
_SAVES = flags.DEFINE_integer("saves", 5, "Timed saves; medians are reported.", lower_bound=1)


@contextlib.contextmanager
def training(folder: Path, *options: str):
    """A process that trains in `folder` and saves only at the end; it is killed if it is still alive."""
    given = [one for one in sys.argv[1:] if not one.startswith("--saves")]
    if not any(one.startswith("--config=") for one in given):
        given.insert(0, "--config=configs/arithmetic.py")
    command = [sys.executable, str(Path(__file__).parents[1] / "train.py"), *given,
               f"--workdir={folder}", "--config.steps=1000",
               "--config.eval.every=0", "--config.samples_every=0", "--config.checkpoint.every=0", *options]
    with (folder.parent / "log").open("w") as log, lifetime.start(command, stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    """Waits until `step` is in the metrics; RuntimeError with the end of the log if the process ends before."""
    file = folder / "metrics.jsonl"
    while not (file.is_file() and f'{{"step": {step},' in file.read_text()):
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with code {process.returncode} before step {step}:\n"
                               + (folder.parent / "log").read_text()[-2000:])
        time.sleep(0.01)


def interrupted(folder: Path) -> dict[str, float]:
    """Seconds from SIGTERM to the end of a run, and from its restart to its first new step."""
    from jaxrl_llm.store.workdir import checkpoint_steps
    with training(folder) as process:
        wait_for_step(process, folder, 2)
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        process.wait()
        stopping = time.perf_counter() - began
    step = checkpoint_steps(folder / "checkpoints")[-1]
    began = time.perf_counter()
    with training(folder, "--resume") as process:
        wait_for_step(process, folder, step + 1)
        restarting = time.perf_counter() - began
    return {"step": step, "SIGTERM to exit, s": stopping, "start to first new step, s": restarting}


def measured(config, folder: Path, step: int, saves: int) -> dict[str, float]:
    """Size of the checkpoint of `step`, and seconds to read it and to write it."""
    import jax

    from jaxrl_llm.setup import setup
    from jaxrl_llm.store.checkpoints import Checkpoints
    run, params = setup.build(config)
    with Checkpoints(folder / "checkpoints") as stored:
        target = setup.initial_state(run, params)
        began = time.perf_counter()
        restored = jax.block_until_ready(stored.restore(target, step))
        reading = time.perf_counter() - began
    blocked, published = [], []
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, Checkpoints(scratch, keep=1) as checkpoints:
        for number in range(saves + 1):
            began = time.perf_counter()
            checkpoints.save(number, restored.state, restored.host)
            blocked.append(time.perf_counter() - began)
            checkpoints.wait()
            published.append(time.perf_counter() - began)
    files = [path.stat().st_size for path in (folder / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    return {"weights": sum(x.size for x in jax.tree.leaves(params)), "state, MB": sum(
        x.nbytes for x in jax.tree.leaves(restored.state)) / 1e6, "on disk, MB": sum(files) / 1e6,
        "save: in the loop, s": statistics.median(blocked[1:]), "save: until published, s": statistics.median(published[1:]),
        "read and verified, s": reading}


def main():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        times = interrupted(run)
        results = measured(_CONFIG.value, run, times.pop("step"), _SAVES.value) | times
    for name, value in results.items():
        print(f"{name:30}{value:,}" if isinstance(value, int) else f"{name:30}{value:,.2f}")


if __name__ == "__main__":
    command_line.run(main)
