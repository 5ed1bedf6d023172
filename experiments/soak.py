"""What a long run leaves behind: its memory, handles, threads and children at intervals, with tools and programs.

  python experiments/soak.py [--steps=3000] [--every=100]

A tiny policy learns to call a calculator whose every answer is a program in the sandbox; verifiers score its answers in
processes. Memory grows as long as shapes of batches come that need a program of their own, which are few: each adds some
megabytes, in the first hundreds of steps. The last row is the growth of a step in the second half of the run.
"""
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from absl import flags

from jaxrl_llm import sandbox
from jaxrl_llm.commands import command_line
from jaxrl_llm.tools import lifetime

_STEPS = flags.DEFINE_integer("steps", 3000, "Steps of the run.", lower_bound=1)
_EVERY = flags.DEFINE_integer("every", 100, "Steps between two rows.", lower_bound=1)
_RUN = """configs/tools.py prompts.per_step=4 sampling.group=4 model.hidden_size=32 model.mlp_size=48 eval.problems=8
warmup.steps=150 warmup.batch=4 warmup.learning_rate=1e-2
environment=tool_use(options={'level':'mul'},parser=llama3,turns=2,reward=boxed,tools=('jaxrl_llm.experiments.soak:calculator',))
""".split()


def calculator(expression: str) -> str:
    """Computes an expression by a program.

    Args:
      expression: a term such as 2 * 3
    """
    return sandbox.run(f"print({expression})", mode=sandbox.require().mode).stdout.decode(errors="replace").strip()


def last_step(metrics: Path) -> int:
    """The step of the last whole line; 0 before the first."""
    lines = metrics.read_bytes()[-100_000:].rpartition(b"\n")[0].splitlines() if metrics.is_file() else []
    return int(lines[-1].partition(b",")[0].rpartition(b" ")[2]) if lines else 0


def memory_of_children(pid: int) -> list[int]:
    """Resident bytes of each process below this one; those of programs in the sandbox come and go."""
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(one.memory_info().rss)
    return found


def rows(process: subprocess.Popen, metrics: Path, every: int) -> Iterator[dict[str, int | float]]:
    """What a process holds each `every` steps, until it ends."""
    at = every
    while process.poll() is None:
        if (step := last_step(metrics)) >= at:
            own, below = psutil.Process(process.pid), memory_of_children(process.pid)
            yield {"step": step, "memory, MB": own.memory_info().rss / 1e6, "handles": own.num_fds(),
                   "threads": own.num_threads(), "children": len(below), "their memory, MB": sum(below) / 1e6}
            at = step - step % every + every
        time.sleep(0.1)


def main():
    command = [sys.executable, str(Path(__file__).with_name("train.py")), f"--config={_RUN[0]}",
               *(f"--config.{change}" for change in [*_RUN[1:], f"steps={_STEPS.value}"])]
    with tempfile.TemporaryDirectory() as folder:
        log, work = Path(folder, "log"), Path(folder, "run")
        with open(log, "w") as file, lifetime.start([*command, f"--workdir={work}"], stdout=file, stderr=file) as process:
            try:
                seen = []
                for row in rows(process, work / "metrics.jsonl", _EVERY.value):
                    print(", ".join(f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value:,}"
                                    for name, value in row.items()), flush=True)
                    seen.append(row)
            finally:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"the run ended with code {process.returncode}:\n{log.read_text()[-2000:]}")
    if len(seen) > 2:
        first, last = seen[len(seen) // 2 - 1], seen[-1]
        print(f"growth of a step from step {first['step']}: " + ", ".join(
            f"{name} {(last[name] - first[name]) / (last['step'] - first['step']):.4f}" for name in first if name != "step"))


if __name__ == "__main__":
    command_line.run(main)
