"""Updates of trajectories with tokens of others on eight virtual devices: gradients equal those of plain rows."""
import json

import job
import numpy as np
import pytest


@pytest.mark.slow
def test_gradients_on_eight_devices_are_those_of_plain_rows():
    result = json.loads(job.lines_of("hole_cases.py", 8)[-1])
    assert list(result) == ["one pass", "micro-batches", "whole batch", "adapters", "adapters in micro-batches",
                            "adapters, whole batch", "joint", "joint, adapters", "critic", "norms"]
    for path, facts in result.items():
        assert facts["apart"] < 2e-5 and np.isfinite(facts["loss"]), (path, facts)
        if path not in ("critic", "norms"):  # whose log-probs, if any, are in no loss
            assert facts["targets"] == [True, False], path  # none goes back through tokens of others
