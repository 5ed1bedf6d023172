"""The run of configs/tools.py at small size: its warm-up writes calls, its trajectories have turns of the calculator."""
import json
import pathlib
import runpy

import pytest
import run_files

from jaxrl_llm.runs import loop

CONFIG = pathlib.Path(__file__).parents[2] / "configs/tools.py"


@pytest.mark.slow
def test_a_policy_that_imitates_calls_learns_from_answers(tmp_path):
    config = runpy.run_path(str(CONFIG))["get_config"]()
    config.steps, config.prompts.per_step, config.sampling.group, config.samples_every = 2, 4, 4, 1
    config.eval.problems, config.eval.every, config.warmup.steps, config.warmup.learning_rate = 8, 2, 60, 1e-2
    loop.train(config, tmp_path)
    lines = run_files.lines(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2] and 0 <= lines[-1]["eval/score"] <= 1
    assert all(line["skipped_updates"] == 0 and line["environment/invalid"] == 0 for line in lines[1:])
    rows = [json.loads(line) for line in (tmp_path / "samples/step_000002.jsonl").read_text().splitlines()]
    assert all(row["messages"][0]["role"] == "assistant" for row in rows)
    assert any('"calculator"' in row["messages"][0]["content"] for row in rows)
