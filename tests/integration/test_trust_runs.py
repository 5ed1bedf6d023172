"""Rows that weigh rollouts by how far the policy is from the one that sampled take three steps of two updates."""
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.runs import loop


@pytest.mark.slow
@pytest.mark.parametrize("method, group", [("dppo", 4), ("vespo", 4), ("klpo", 1), ("bpo", 4), ("sao", 1)])
def test_three_steps(method, group, tmp_path):
    """KLPO has no baseline and SAO has a critic: both learn from one rollout of each prompt."""
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"steps": 3, "method": method, "model.num_layers": 1, "learner.epochs": 1,
                                       "learner.minibatches": 2, "eval.every": 0, "sampling.group": group,
                                       "critic.pretrain_steps": 0})
    loop.train(config, tmp_path)
    steps = [line for line in run_files.lines(tmp_path) if "loss" in line]
    assert len(steps) == 3 and all(np.isfinite(line["loss"]) for line in steps)
    norms = [line["grad_norm"] for line in steps]
    assert np.isfinite(norms).all() and max(norms) > 0
