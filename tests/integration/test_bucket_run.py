"""A run in a bucket that knows whole objects only: cut short, continued, and read by what reads runs."""
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import objects
import pytest
import run_files
import tiny_config

from jaxrl_llm.compare import plan, report
from jaxrl_llm.runs import loop
from jaxrl_llm.runs.trained import trained
from jaxrl_llm.show.page import write_page
from jaxrl_llm.show.runs import read_runs
from jaxrl_llm.store import bucket
from jaxrl_llm.store.workdir import checkpoint_steps

store = objects.store


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(store, tmp_path, monkeypatch):
    """The store as it was in the middle of the upload of a checkpoint is what a kill leaves."""
    entries = plan.read_entries("grpo", tiny_config.get_config())
    budget = plan.Budget("steps", 4)
    job, = plan.jobs_of(entries, [0], budget, Path("compared/runs"))
    config, left, put = plan.run_config(job, budget), tmp_path / "left", objects.put
    config.checkpoint.every, home = 1, f"s3://bucket/{job.folder}"
    one_at_a_time = threading.Lock()

    def killed(name, content):
        with one_at_a_time:
            put(name, content)
            if name.endswith("checkpoints/3/host/metadata") and not left.exists():
                shutil.copytree(store, left)

    monkeypatch.setattr(objects, "put", killed)
    loop.train(config, home)
    lines, weights = run_files.lines(bucket.local(home)), trained(bucket.place(home)).params
    run, = read_runs([home])
    page = write_page([run], tmp_path / "page.html", 100).read_text()
    assert run.facts["steps"] == "4 of 4" and '"step": 4' in page.replace('"step":4', '"step": 4')
    with bucket.kept(bucket.place("s3://bucket/compared")) as (out, _):
        jobs = plan.jobs_of(entries, [0], budget, out / "runs")
        assert [*report.finished_runs(jobs, budget)[0]] == ["grpo"]
        plan.check_folder(jobs[0], budget)
    monkeypatch.undo()
    monkeypatch.setattr(bucket, "BEAT", 0.05)
    objects.register(left)
    names = objects.names()
    assert f"bucket/{job.folder}/run.lock" in names and checkpoint_steps(bucket.place(f"{home}/checkpoints"))[-1] == 2
    loop.train(config, home, resume="auto")
    again = run_files.lines(bucket.local(home))
    assert [run_files.repeatable(line) for line in again] == [run_files.repeatable(line) for line in lines]
    for mine, straight in zip(*map(_leaves, (trained(bucket.place(home)).params, weights))):
        np.testing.assert_array_equal(mine, straight)


def _leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
