"""Updates from packed rows that groups straddle give the same gradient on meshes as on one device, and compile once."""

import job
import pytest


@pytest.fixture(scope="module")
def result():
    """What `packing_cases.py` prints under eight virtual devices."""
    return job.result_of("packing_cases.py", 8)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ("all", "fsdp", "seq", "cut", "experts"))
def test_gradients_and_metrics_on_eight_devices_equal_those_on_one(result, mesh):
    assert result["rows"][0] >= 16 and result["norm"] > 0.1  # two micro-batches at least
    assert result[mesh]["apart"] < 1e-5 and result[mesh]["ruled"]
    for name, (ours, wanted) in result[mesh]["metrics"].items():
        assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("case", ("spread", "cut", "poise", "ppo"))
def test_a_run_on_eight_devices_learns_what_rectangular_rows_on_one_do(result, case):
    run = result["runs"][case]
    assert run["largest"] > 0.01 and run["apart"] < 1e-5
    for name, (ours, wanted) in run["metrics"].items():
        assert ours == pytest.approx(wanted, rel=1e-3, abs=1e-5), name
