"""Metrics on Weights & Biases, with a stand-in for the package: its calls, and that a resumed run is the same run."""
import sys
import types

import pytest

from jaxrl_llm.runs.metrics import MetricWriter
from jaxrl_llm.runs.tracking import tracked


@pytest.fixture
def calls(monkeypatch):
    """Everything the package was called with."""
    result = []

    class Run:
        def finish(self, exit_code):
            result.append(("finished", exit_code))

        def define_metric(self, name, step_metric):
            result.append((name, step_metric))

        def log(self, metrics):
            result.append(metrics)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **given: result.append(given) or Run()))
    return result


def write(folder, step, resume):
    with (tracked("sums", folder, {"steps": 3}, resume) as log,
          MetricWriter(folder, restored_step=step - 1 if resume else None, also=log) as writer):
        writer.write(step, {"loss": float(step)})


def test_a_resumed_run_continues_the_same_run_and_a_fresh_one_does_not(calls, tmp_path):
    folder = tmp_path / "first"
    folder.mkdir()
    for step, resume in ((1, False), (2, True), (1, False)):
        write(folder, step, resume)
    starts = [entry for entry in calls if "project" in entry]
    assert starts[0] == starts[1] and starts[0].pop("id") != starts[2]["id"]
    assert starts[0] == {"project": "sums", "name": "first", "resume": "allow", "dir": folder, "config": {"steps": 3}}
    assert calls[1:4] == [("*", "step"), {"step": 1, "loss": 1.0}, ("finished", 0)] and calls[6] == {"step": 2, "loss": 2.0}


def test_without_a_project_nothing_is_imported_and_with_one_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with tracked("", tmp_path, {}, False) as log:
        log(1, {})
    with pytest.raises(ValueError, match=r"config.wandb='sums' needs a package: pip install 'jaxrl_llm\[wandb\]'"):
        with tracked("sums", tmp_path, {}, False):
            pass
