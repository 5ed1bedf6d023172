"""Runs by name of the rows that change how a ratio is bounded: three steps, several updates of each batch."""
import numpy as np
import pytest
import three_steps

ROWS = ("sapo", "gmpo", "luspo")


@pytest.mark.slow
@pytest.mark.parametrize("method", ROWS)
def test_three_steps(method):
    """Ratios leave 1 within a step, since later mini-batches meet weights that earlier ones changed; the weights move."""
    metrics, moved = three_steps.taken(method)
    assert len(metrics) == 3 and all(np.isfinite(one["loss"]) and one["grad_norm"] > 0 for one in metrics)
    assert min(one["max/ratio"] for one in metrics) > 1
    assert moved
