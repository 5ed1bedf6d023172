"""Objectives of single positions learn on a mesh that cuts the vocabulary as on one device."""
import job
import pytest


@pytest.mark.slow
def test_one_token_rollouts_on_four_devices_are_those_of_one():
    """Each device has other chunks without trained tokens, and sums along the vocabulary wait for all devices."""
    result = job.result_of("position_cases.py", 4)
    assert result["largest"] > 0.1
    for rows in ("rectangular", "packed"):
        assert result[rows]["apart"] < 2e-5 and result[rows]["loss"] == pytest.approx(result["loss"], rel=1e-5), rows
