"""The command `experiments/compare.py`: it runs, stops at the budget, continues, survives a failing run, and tunes."""
import json
import runpy
import subprocess
import time
from pathlib import Path

import pytest
from run_folders import command_of, started, write_run

from jaxrl_llm.compare import plan
from jaxrl_llm.store.lock import is_locked
from jaxrl_llm.store.workdir import checkpoint_steps

ROOT = Path(__file__).parents[2]
CONFIG_FILE = ROOT / "tests/integration/tiny_config.py"


def compare_py(out, *arguments):
    return started(out, f"--config={CONFIG_FILE}", "--config.eval.every=1", "--config.warmup.steps=2",
                   "--config.warmup.batch=8", *arguments)


def until(holds):
    end = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.05)


@pytest.mark.slow
def test_two_methods_two_seeds_then_more_of_one_beside_one_that_breaks(tmp_path):
    done = compare_py(tmp_path, "--methods=rloo, grpo", "--seeds=0,1", "--budget=steps=2")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "report.json").read_text())
    assert set(result["methods"]) == {"rloo", "grpo"} and result["methods"]["rloo"]["seeds"] == [0, 1]
    assert result["methods"]["grpo"]["spent"]["steps"] == 2 and result["common"]["tokens"] > 0
    metrics = (tmp_path / "runs/rloo/seed1/metrics.jsonl").read_bytes()
    shared = [path.name for path in (tmp_path / "warm_starts").iterdir()]  # a warm start for each seed, which rloo makes first
    logs = {name: (tmp_path / f"runs/{name}/seed1/log.txt").read_text() for name in ("rloo", "grpo")}
    assert len(shared) == 2 and [f"loading the warm start {tmp_path}" in logs[name] for name in logs] == [False, True]

    # More of one method, in tokens: the run continues from its last step and stops at the budget.
    budget = 1.5 * result["common"]["tokens"]
    more = compare_py(tmp_path, "--methods=tis_mis(sampling.top_k=5), rloo", "--seeds=1", f"--budget=tokens={budget}")
    assert more.returncode == 1 and "1 of 2 runs failed" in more.stderr, more.stderr[-3000:]
    assert "tis_mis seed 1: FAILED with exit code 1" in more.stdout and "top_p and min_p" in more.stdout
    again = (tmp_path / "runs/rloo/seed1/metrics.jsonl").read_bytes()
    assert again.startswith(metrics) and again.count(b"\n") >= 4  # steps 0 to 3 at least
    assert json.loads((tmp_path / "runs/rloo/seed1/config.json").read_text())["config"]["steps"] == 1_000_000
    result = json.loads((tmp_path / "report.json").read_text())
    assert list(result["methods"]) == ["rloo"] and "tis_mis has no finished run" in " ".join(result["warnings"])


@pytest.mark.slow
def test_runs_of_a_killed_comparison_save_their_last_step_and_end(tmp_path):
    """A SIGKILL leaves the comparison no time to end its run."""
    command = command_of(tmp_path, f"--config={CONFIG_FILE}", "--config.eval.every=1", "--config.eval.problems=1",
                         "--config.prompts.per_step=1", "--methods=rloo", "--seeds=0", "--budget=steps=100000")
    run = tmp_path / "runs/rloo/seed0"
    with open(tmp_path / "killed", "w") as log, subprocess.Popen(**command, stdout=log, stderr=log) as killed:
        until(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").read_text().count("\n") > 1)
        assert is_locked(run)
        killed.kill()
    until(lambda: not is_locked(run))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert "SIGTERM: the run " in (run / "log.txt").read_text() and checkpoint_steps(run / "checkpoints")[-1] == last


@pytest.mark.slow
def test_settings_are_chosen_on_tuning_seeds(tmp_path):
    """The better setting on the tuning seeds is the worse one on the testing seed, which must not affect the choice."""
    config = runpy.run_path(str(CONFIG_FILE))["get_config"]()
    config.eval.every, config.warmup.steps, config.warmup.batch = 1, 2, 8
    budget, grid = plan.Budget("tokens", 100.0), [{"optimizer.learning_rate": 1e-3}, {"optimizer.learning_rate": 2e-3}]
    rloo, = plan.read_entries("rloo", config)
    for i, (choice, scores) in enumerate(zip(grid, ((0.3, 0.5), (0.2, 0.4)))):
        for job, score in zip(plan.jobs_of([plan.tuned(rloo, choice)], [7, 8], budget, tmp_path / "tuning" / str(i)), scores):
            write_run(job, budget, [0.1, score], every=10)
    for choice, root, score in ((grid[0], "testing/0", 0.25), (grid[1], "testing/1", 0.65)):
        job, = plan.jobs_of([plan.tuned(rloo, choice)], [0], budget, tmp_path / root)
        write_run(job, budget, [0.1, score], every=10)
    done = compare_py(tmp_path, "--methods=rloo", "--seeds=0", "--budget=tokens=100", "--tuning_seeds=7,8", "--only_report",
                      "--grid=optimizer.learning_rate=1e-3|2e-3", "--test_all")
    assert done.returncode == 0, done.stderr[-3000:]
    tuning = json.loads((tmp_path / "report.json").read_text())["tuning"]["rloo"]
    share = 100 / 800  # of the ten steps of 16 completions of 5 tokens
    assert tuning["grid"] == ["optimizer.learning_rate=0.001", "optimizer.learning_rate=0.002"]
    assert tuning["chosen"] == tuning["grid"][0]
    assert tuning["means"] == pytest.approx([0.1 + share * 0.3, 0.1 + share * 0.2])
    assert tuning["gap"] == pytest.approx(share * 0.15)
    assert tuning["regret"] == pytest.approx(share * 0.4) and tuning["runs"] == 4
    assert tuning["test_scores"] == [pytest.approx([0.1 + share * 0.15]), pytest.approx([0.1 + share * 0.55])]
    assert (tmp_path / "tuning.png").is_file()
    text = (tmp_path / "report.md").read_text()
    assert "## Tuning" in text and "on seeds 7, 8, which no table" in text


def test_mistakes_are_explained_before_anything_runs(tmp_path):
    shared = compare_py(tmp_path / "a", "--methods=rloo", "--seeds=0,7", "--grid=sampling.group=2|4", "--tuning_seeds=7")
    assert shared.returncode == 1 and "share a seed" in shared.stderr and "Traceback" not in shared.stderr
    assert not (tmp_path / "a").exists()
