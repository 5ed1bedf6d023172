"""Soft caps, biases, norms over whole projections and the rest give the same gradient on a mesh as on one device."""

import job
import pytest


@pytest.mark.slow
def test_gradients_of_every_feature_on_eight_devices_equal_those_on_one():
    apart = job.result_of("feature_cases.py", 8)
    assert len(apart) == 21 and max(apart.values()) < 1e-5, apart
