"""Programs that print a JSON line with `step_s` for each step, timed one after the other."""
import json
import os
import subprocess
import threading
from pathlib import Path

import psutil


def peak_of(process: psutil.Process, peak: list[float], done: threading.Event) -> None:
    """Keeps the largest resident memory of a process and its children, in GB, in `peak[0]`."""
    while not done.wait(0.2):
        try:
            family = [process, *process.children(recursive=True)]
            peak[0] = max(peak[0], sum(one.memory_info().rss for one in family) / 1e9)
        except psutil.Error:
            return


def run(command: list[str], environment: dict[str, str], log: Path) -> dict:
    """`{"step_s": [...], "peak_gb": ...}` of a program that prints a JSON line per step; its first step is left out."""
    peak, done, steps = [0.0], threading.Event(), []
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        watcher = threading.Thread(target=peak_of, args=(psutil.Process(process.pid), peak, done), daemon=True)
        watcher.start()
        for line in process.stdout:
            if line.startswith("{") and "step_s" in line:
                steps.append(json.loads(line)["step_s"])
        done.set()
    if process.wait() or len(steps) < 2:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} after {len(steps)} steps; see {log}")
    return {"step_s": steps[1:], "peak_gb": peak[0]}
