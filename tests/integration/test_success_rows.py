"""Rows that weigh rare successes, by name: three steps each, in which the weights move by finite losses."""
import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.learning import schedules
from jaxrl_llm.setup import setup

SETS = {"estimator": "k=2"}  # the groups have four completions
ROWS = {"maxrl": {}, "pass_at_k": SETS, "pass_at_k_bootstrap": SETS, "pass_at_k_full": SETS, "pass_at_k_combined": SETS,
        "best_of_group": {}, "gapo": {}, "gapo_token": {}}


@pytest.mark.slow
@pytest.mark.parametrize("method", ROWS)
def test_three_steps(method):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": method, "model.num_layers": 1, "learner.minibatches": 2, **ROWS[method]})
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    before = jax.device_get(state.params)
    metrics = []
    for _, step in zip(range(3), schedules.make("sync").steps(run.source, run.learner, state)):
        metrics.append(step.learned.metrics)
        state = step.learned.state
    assert len(metrics) == 3 and all(np.isfinite(one["loss"]) for one in metrics)
    assert any(one["grad_norm"] > 0 for one in metrics)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params)))
    if method.startswith("gapo"):
        low, high = (3e-3, 5e-3) if method == "gapo" else (0.2, 0.28)
        assert all(low <= one["clip_high"] <= high for one in metrics)
