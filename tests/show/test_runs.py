"""The facts of run folders, and the messages about them."""
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from run_folder import make_run

from jaxrl_llm.show.health import findings
from jaxrl_llm.show.runs import differences, phases, read_runs, short_names
from jaxrl_llm.show.terminal import print_summary, sparkline


def test_facts_of_a_run(tmp_path):
    run, = read_runs([make_run(tmp_path / "one")])
    assert run.facts["held-out score, first"] == "0.0%"
    assert run.facts["held-out score, last"] == "60.0% (59.0% to 61.0%)"
    assert run.facts["steps"] == "30 of 30"
    assert run.facts["tokens sampled"] == f"{30 * 4 * 8 * 8:,}"  # steps x mean length x prompts x group
    assert run.facts["wall time"] == "1 min 33 s"  # 31 lines of 3 seconds; time/step is no further phase
    assert phases(run.metrics) == {"rollout": 62.0, "update": 31.0}
    assert run.facts["training reward"] == "0.033 → 1.000"


def test_a_run_in_an_environment_names_it_and_no_task(tmp_path):
    run, = read_runs([make_run(tmp_path / "one", environment="treasure(size=4)")])
    assert run.facts["environment"] == "treasure(size=4)" and "task" not in run.facts


def test_names_tell_runs_apart():
    assert short_names([Path("/a/grpo/0"), Path("/a/rloo/0")]) == ["grpo/0", "rloo/0"]
    assert short_names([Path("/a/x"), Path("/b/y")]) == ["x", "y"]


def test_settings_that_differ(tmp_path):
    one, two = make_run(tmp_path / "one", seed=1), make_run(tmp_path / "two", seed=2, method="rloo")
    columns, rows = differences(read_runs([one, two]))
    assert columns == ["one", "two"] and rows == [("method", ['"grpo"', '"rloo"']), ("seed", ["1", "2"])]
    columns, rows = differences(read_runs([two]))
    assert columns == ["default", "two"]
    assert rows == [("method", ['"grpo"', '"rloo"']), ("seed", ["0", "2"]), ("steps", ["100", "30"])]


@pytest.mark.parametrize("break_it, message", [
    (lambda path: None, "no run folder"),
    (lambda path: make_run(path) and (path / "metrics.jsonl").unlink(), "no metrics yet")])
def test_folders_that_are_no_runs(tmp_path, break_it, message):
    break_it(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=message):
        read_runs([tmp_path / "x"])


def test_a_folder_twice(tmp_path):
    with pytest.raises(ValueError, match="twice"):
        read_runs([make_run(tmp_path / "x"), tmp_path / "x"])


def healthy() -> dict[str, np.ndarray]:
    step = np.arange(1.0, 51.0)
    return {"step": step, "skipped_updates": 0 * step, "mismatch/kl": 1e-4 + 0 * step, "groups/all_equal": 0.5 + 0 * step,
            "completion/truncated": 0.1 + 0 * step, "entropy": 1.0 / step**0.5, "clip_fraction": 0.01 + 0 * step,
            "eval/score": step / 50, "eval/score_low": step / 50 - 0.05, "eval/score_high": step / 50 + 0.05}


@pytest.mark.parametrize("name, value", [
    ("skipped_updates", 3.0), ("mismatch/kl", -0.5), ("groups/all_equal", 0.99), ("completion/truncated", 0.6),
    ("entropy", 1e-3), ("clip_fraction", 0.5), ("reward_failures/boxed", 1.0)])
def test_each_symptom_is_found_and_named(name, value):
    metrics = healthy()
    assert findings(metrics) == []
    metrics[name] = np.append(metrics.get(name, np.zeros(50))[:40], np.full(10, value))
    result, = findings(metrics)
    assert f"({name})" in result


def test_a_falling_score_is_distinguished_from_noise():
    metrics = healthy()
    metrics["eval/score"][-1] -= 0.04
    assert findings(metrics) == []
    for name in ("eval/score", "eval/score_low", "eval/score_high"):
        metrics[name][-1] -= 0.3
    assert findings(metrics) == ["held-out score ends clearly below its best (eval/score)"]


def test_the_thresholds_read_the_end_of_the_run_only():
    metrics = healthy()
    metrics["groups/all_equal"][:40] = 1.0
    assert findings(metrics) == []


def test_sparkline():
    assert sparkline(np.array([0.0, np.nan, 1.0, 0.5])) == "▁█▅"  # 3.5 of 7 levels rounds to the even 4
    assert sparkline(np.array([2.0, 2.0])) == "▁▁"
    assert sparkline(np.array([np.nan])) == ""
    assert len(sparkline(np.arange(1000.0))) == 24
    assert sparkline(np.repeat([0.0, 7.0, 3.0], 8), width=3) == "▁█▄"


def test_summary_in_the_terminal(tmp_path):
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    one = make_run(tmp_path / "one", seed=1).rename(tmp_path / "[red]one")
    print_summary(read_runs([one, make_run(tmp_path / "two")]), console)
    text = console.file.getvalue()
    assert "[red]one" in text  # a folder's name is no markup
    assert "60.0% (59.0% to 61.0%)" in text and "rollout 67%, update 33%" in text and "seed" in text
