"""Runs by name of the rows that change how a ratio is bounded: three steps, several updates of each batch."""
import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.learning import schedules
from jaxrl_llm.setup import setup

ROWS = ("sapo", "gmpo", "luspo")


@pytest.mark.slow
@pytest.mark.parametrize("method", ROWS)
def test_three_steps(method):
    """Ratios leave 1 within a step, since later mini-batches meet weights that earlier ones changed; the weights move."""
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": method, "model.num_layers": 1, "learner.minibatches": 2})
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    before = jax.device_get(state.params)
    metrics = []
    for _, step in zip(range(3), schedules.make("sync").steps(run.source, run.learner, state)):
        metrics.append(step.learned.metrics)
        state = step.learned.state
    assert len(metrics) == 3 and all(np.isfinite(one["loss"]) and one["grad_norm"] > 0 for one in metrics)
    assert min(one["max/ratio"] for one in metrics) > 1
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params)))
