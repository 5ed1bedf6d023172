"""Runs killed repeatedly, also in the middle of a save, and a long run that neither leaks nor recompiles."""
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.runs import loop

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("JAXRL_LLM_KILLS", "2"))  # docs/scaling.md has the numbers of twenty
PLAIN = {"eval.every": 0, "samples_every": 0, "checkpoint.every": 1}
KINDS = {
    "rounds": {"method": "v0_5", "sampling.group": 2, "sampling.max_group": 6},
    "budgets": {"method": "knapsack_rl", "sampling.group": 2, "sampling.max_group": 8, "budget.prompts": 2},
    "critic": {"method": "ppo"},
    "poise": {"method": "poise", "estimator": "bootstrap=1, first_fit=1, capacity=24, alpha=1.0", "sampling.group": 2},
}


def config(**changes):
    c = tiny_config.get_config()
    c.update_from_flattened_dict({**PLAIN, **changes})
    return c


def start(workdir: Path, steps: int) -> subprocess.Popen:
    """A training that saves after each step, from the newest checkpoint if there is one."""
    options = [f"--config={tiny_config.__file__}", f"--workdir={workdir}",
               *(f"--config.{key}={value}" for key, value in {**PLAIN, "steps": steps}.items()),
               f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"]
    if any(path.name.isdecimal() for path in (workdir / "checkpoints").glob("*")):
        options.append("--resume")
    with (workdir.parent / "log").open("w") as log:
        return subprocess.Popen([sys.executable, ROOT / "experiments" / "train.py", *options], stdout=log, stderr=log,
                                env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_what_interruptions_cost_is_measured():
    done = subprocess.run([sys.executable, "experiments/benchmark.py", "checkpoints", f"--config={tiny_config.__file__}",
                           "--saves=1", f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"],
                          capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    facts = {line[:30].strip(): float(line[30:].replace(",", "")) for line in done.stdout.splitlines()}
    assert len(facts) == 8 and all(number > 0 for number in facts.values())
    assert facts["state, MB"] == pytest.approx(3 * 4 * facts["weights"] / 1e6, rel=0.05)  # weights and two moments


def written(workdir: Path) -> int:
    file = workdir / "metrics.jsonl"
    return file.stat().st_size if file.is_file() else 0


def in_a_save(run: Path) -> bool:
    return any((run / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def stopped_in_a_save(process: subprocess.Popen, run: Path) -> None:
    """Stops the training where it has written a part of a checkpoint."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if in_a_save(run):
            process.send_signal(signal.SIGSTOP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "the run ended"
            if in_a_save(run):  # still
                return
            process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError("no save was met")


def killed_until_done(run: Path, kills: int, steps: int) -> None:
    """The training, killed `kills` times at random moments, the last of several in a save, then left alone to its end."""
    chance, killed, unfinished = random.Random(0), 0, 0
    while killed < kills:
        process, before, end = start(run, steps), written(run), time.monotonic() + 120
        while process.poll() is None and written(run) == before and time.monotonic() < end:
            time.sleep(0.01)
        if 0 < killed == kills - 1:
            stopped_in_a_save(process, run)
        else:
            time.sleep(chance.uniform(0, 0.6))  # a few steps and saves
        process.kill()
        log = (run.parent / "log").read_text()
        assert process.wait() == -9, f"the run ended after {killed} of {kills} kills: {log[-2000:]}"
        killed += 1
        unfinished += in_a_save(run)
    print(f"{killed} kills, {unfinished} of them during a save")
    assert kills == 1 or unfinished
    assert start(run, steps).wait(timeout=300) == 0, (run.parent / "log").read_text()[-3000:]


def check_same(run: Path, whole: Path, changes: dict) -> None:
    """Both runs have made their steps, with the same state and the same lines."""
    run_files.assert_same(run_files.saved(run, config(**changes)), run_files.saved(whole, config(**changes)))
    repeatable = [[run_files.repeatable(line) for line in run_files.lines(folder)] for folder in (run, whole)]
    assert len(repeatable[1]) == changes["steps"] + 1 and repeatable[0] == repeatable[1]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(tmp_path):
    run, whole, steps = tmp_path / "killed" / "run", tmp_path / "whole" / "run", 15 * KILLS
    run.mkdir(parents=True)
    killed_until_done(run, KILLS, steps)
    loop.train(config(steps=steps), whole)
    check_same(run, whole, {"steps": steps})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is on a new branch")
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_run_of_any_kind_leaves_is_enough(tmp_path, kind):
    """The line of step 5 is written, and the checkpoint of step 3."""
    whole, changes = tmp_path / "run", {"steps": 8, "checkpoint.every": 3, **KINDS[kind]}
    run_files.left_behind(config(**changes), whole, step=5)
    killed = tmp_path / "run-5"
    assert run_files.lines(killed)[-1]["step"] == 5 and not (killed / "checkpoints/6").exists()
    loop.train(config(**changes), killed, resume=True)
    check_same(killed, whole, changes)


@pytest.mark.slow
def test_three_hundred_steps_in_constant_memory(tmp_path):
    loop.train(config(steps=300, **{"checkpoint.every": 50}), tmp_path / "run")  # a step that recompiles raises
    memory = [line["host/rss_gb"] for line in run_files.lines(tmp_path / "run") if "host/rss_gb" in line]
    early, late = np.median(memory[100:150]), np.median(memory[250:])
    assert late < 1.03 * early, (early, late)
