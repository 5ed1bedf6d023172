"""Updates from packed rows that groups straddle give the same gradient on meshes as on one device, and compile once."""
import json

import job
import pytest


@pytest.fixture(scope="module")
def found():
    """What `packing_cases.py` prints under eight virtual devices."""
    return json.loads(job.lines_of("packing_cases.py", 8)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ("all", "data", "fsdp", "seq", "cut", "experts"))
def test_gradients_and_metrics_on_eight_devices_equal_those_on_one(found, mesh):
    assert found["rows"][0] >= 16 and found["norm"] > 0.1  # two micro-batches at least
    assert found[mesh]["apart"] < 1e-5 and found[mesh]["ruled"]
    for name, (ours, wanted) in found[mesh]["metrics"].items():
        assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("cut", (False, True))
def test_a_run_on_eight_devices_learns_what_rectangular_rows_on_one_do(found, cut):
    run = found["runs"][cut]
    assert run["largest"] > 0.01 and run["apart"] < 1e-5
    for name, (ours, wanted) in run["metrics"].items():
        assert ours == pytest.approx(wanted, rel=1e-3, abs=1e-5), name
