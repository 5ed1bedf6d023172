"""SignBalance by name: three steps with the row's pull towards the reference."""
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.runs import loop


@pytest.mark.slow
def test_three_steps(tmp_path):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"steps": 3, "method": "sign_balance", "model.num_layers": 1, "eval.every": 0})
    loop.train(config, tmp_path)
    steps = [line for line in run_files.lines(tmp_path) if "loss" in line]
    assert len(steps) == 3 and all(np.isfinite(line["loss"]) for line in steps)
    assert max(line["grad_norm"] for line in steps) > 0
