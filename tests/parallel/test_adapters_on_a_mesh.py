"""Adapters of Tinker's clients learn and are sampled on meshes as on one device."""
import job
import pytest


@pytest.fixture(scope="module")
def result():
    """What `adapter_cases.py` prints under eight virtual devices."""
    return job.result_of("adapter_cases.py", 8)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ("spread", "cut"))
def test_passes_and_steps_on_eight_devices_equal_those_on_one(result, mesh):
    assert result["largest"] > 0.1
    assert result[mesh]["apart"] < 2e-5 and result[mesh]["ruled"]


@pytest.mark.slow
def test_samples_under_a_loaded_adapter_are_the_same(result):
    alone, spread = result["tokens"]
    assert alone == spread and len({tuple(x) for x in alone}) > 1
