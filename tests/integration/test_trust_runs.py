"""Rows that weigh rollouts by how far the policy is from the one that sampled take three steps of two updates."""
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.runs import loop


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dppo", "vespo", "klpo"])
def test_three_steps(method, tmp_path):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"steps": 3, "method": method, "model.num_layers": 1, "learner.epochs": 1,
                                       "learner.minibatches": 2, "eval.every": 0})
    loop.train(config, tmp_path)
    steps = [line for line in run_files.lines(tmp_path) if "loss" in line]
    assert len(steps) == 3 and all(np.isfinite([line["loss"], line["grad_norm"]]).all() for line in steps)
