"""Starts the processes of one job, as a cluster would, and never leaves one behind."""
import fcntl
import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "tests" / name for name in (".", "parallel", "properties", "learning", "integration")]  # of scripts
TINY = ["--config=configs/arithmetic.py"] + [f"--config.{option}" for option in (
    "task=arithmetic(level=digit)", "rewards=format(pattern='(?s).*[a-z].*')",  # half of what an untrained model writes
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.mlp_size=48",
    "warmup.steps=5", "warmup.learning_rate=1e-3", "warmup.batch=32", "prompts.per_step=8", "sampling.group=4",
    "sampling.max_tokens=4", "eval.problems=8", "eval.every=0", "samples_every=2", "checkpoint.every=2")]


def picky(completion, answer, problem) -> float:
    """A reward that fails in process 1 alone."""
    if os.environ["JOB_PROCESS"] == "1":
        raise ValueError("not in process 1")
    return float(len(completion) > 1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def with_devices(count: int, flags: str | None = None) -> dict[str, str]:
    """The environment of a CPU process with `count` virtual devices, and other XLA `flags` (None: unchanged)."""
    others = os.environ.get("XLA_FLAGS", "") if flags is None else flags
    kept = [part for part in others.split() if "device_count" not in part]
    return os.environ | {"XLA_FLAGS": " ".join([*kept, f"--xla_force_host_platform_device_count={count}"]),
                         "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(map(str, (ROOT, *FOLDERS))),
                         # A waiting device keeps a thread; with one thread per core all may wait for a device without one.
                         "PJRT_NPROC": str(8 * count)}


@functools.cache
def lines_of(script: str, devices: int, flags: str | None = None) -> list[str]:
    """The output lines of a script of this folder in its own process, once for all workers of a test run; it must succeed."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    kept = Path(os.environ["JAX_COMPILATION_CACHE_DIR"], f"{run}-{script}-{devices}{flags or ''}")
    with kept.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another worker waits for the lines of a running script
        file.seek(0)
        if not (result := file.read()):
            result = printed(script, devices, flags)
            file.write(result)
    return result.splitlines()


def result_of(script: str, devices: int):
    """The last of `lines_of`, which is JSON."""
    return json.loads(lines_of(script, devices)[-1])


def printed(script: str, devices: int, flags: str | None) -> str:
    start = "import gc, runpy, sys; gc.set_threshold(200_000, 50, 100); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", start, str(Path(__file__).with_name(script))], capture_output=True, text=True,
                          cwd=ROOT, env=with_devices(devices, flags))  # the threshold is that of conftest.py
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def start(processes: int, devices: int, arguments: list[str], logs: Path) -> list[subprocess.Popen]:
    """`experiments/train.py` in this many processes, each with `devices` virtual devices; they print to logs/0, logs/1, ..."""
    environment = with_devices(devices)
    cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"  # the session's, not the user's
    logs.mkdir(parents=True, exist_ok=True)
    port, started = free_port(), []
    for number in range(processes):
        joining = [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process_id={number}"]
        command = [sys.executable, "experiments/train.py", cache, *TINY, *arguments, *(joining if processes > 1 else [])]
        with (logs / str(number)).open("w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment | {"JOB_PROCESS": str(number)}, stdout=log,
                                            stderr=subprocess.STDOUT))
    return started


def start_script(script: str, processes: int, devices: int, logs: Path, *arguments: str) -> list[subprocess.Popen]:
    """`script ARGUMENTS PORT PROCESS` of this folder in this many processes; they print to logs/0, logs/1, ..."""
    logs.mkdir(parents=True, exist_ok=True)
    environment, port, started = with_devices(devices), free_port(), []
    for number in range(processes):
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments, str(port), str(number)]
        with (logs / str(number)).open("w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return started


def finish(started: list[subprocess.Popen], seconds: float) -> list[int | None]:
    """Exit codes once all processes end; a process still running after `seconds` is killed and has None."""
    end = time.monotonic() + seconds
    try:
        while any(one.poll() is None for one in started) and time.monotonic() < end:
            time.sleep(0.1)
        return [one.poll() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
