"""Rows that weigh rare successes, by name: three steps each, in which the weights move by finite losses."""
import numpy as np
import pytest
import three_steps

SETS = {"estimator": "k=2"}  # the groups have four completions
ROWS = {"maxrl": {}, "pass_at_k": SETS, "pass_at_k_bootstrap": SETS, "pass_at_k_full": SETS, "pass_at_k_combined": SETS,
        "best_of_group": {}, "gapo": {}, "gapo_token": {}}


@pytest.mark.slow
@pytest.mark.parametrize("method", ROWS)
def test_three_steps(method):
    metrics, moved = three_steps.taken(method, **ROWS[method])
    assert len(metrics) == 3 and all(np.isfinite(one["loss"]) for one in metrics)
    assert any(one["grad_norm"] > 0 for one in metrics)
    assert moved
    if method.startswith("gapo"):
        low, high = (3e-3, 5e-3) if method == "gapo" else (0.2, 0.28)
        assert all(low <= one["clip_high"] <= high for one in metrics)
