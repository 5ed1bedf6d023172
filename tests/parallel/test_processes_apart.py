"""Processes that sample apart: what they sample is what one process samples, and what they refuse together."""
import dataclasses
import json
import pickle

import apart_runs
import job
import numpy as np
import pytest
from jax.sharding import Mesh
from test_processes import several

from jaxrl_llm import parallel, rewards
from jaxrl_llm.parallel.mesh import MESH_AXES

# Single turns, a group and one more of each prompt, with a reward of the batch over replicas of two devices; lost trajectories
# and unequal numbers by a rule; a replay; tools; a compiled game.
CASES = {"turns": {"mesh.fsdp": 4, "mesh.data": 1, "sampling.tensor": 2, "sampling.micro_batches": 1}, "lost": {},
         "greedy": {}, "replay": {}, "tools": {"mesh.tensor": 2}, "game": {}}


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder and the logs of `apart_cases.py`, in two processes with two devices each."""
    folder = tmp_path_factory.mktemp("apart")
    started = job.start_script("apart_cases.py", 2, 2, folder / "logs", str(folder), json.dumps(CASES))
    codes = job.finish(started, 400)
    logs = [(folder / "logs" / name).read_text() for name in "01"]
    assert codes == [0, 0], "\n".join(log[-3000:] for log in logs)
    return folder, logs


def assert_equal(ours, theirs, where: str):
    """Equal, and numbers within 1e-5."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for name in ours:
            assert_equal(ours[name], theirs[name], f"{where} {name}")
    elif isinstance(ours, np.ndarray) and ours.dtype.kind == "f":
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=where)
    else:
        np.testing.assert_array_equal(ours, theirs, err_msg=where)


@pytest.fixture
def named():
    """The reward of `apart_runs`, for a test."""
    apart_runs.register()
    yield
    del rewards.REWARDS["rank"]


@several
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("named")
def test_two_processes_sample_what_one_samples(together, case):
    alone = apart_runs.forests(case)
    for process in "01":
        found = pickle.loads((together[0] / f"{case}-{process}").read_bytes())
        for number, (ours, theirs) in enumerate(zip(alone, found, strict=True)):
            assert_equal(ours, theirs, f"forest {number} of process {process}")
    lost = any(forest["counts"][1] for forest in alone)
    assert len(alone[1]["columns"]["tokens"]) > 50 and lost == (case in ("lost", "greedy"))


@several
def test_processes_that_differ_end_with_both_values(together):
    first, second = (json.loads(log.splitlines()[-1]) for log in together[1])
    assert first == second
    assert "differ in the held-out problems: process 0 on " in first["data"] and "give all hosts the same" in first["data"]
    assert "the code of jaxrl_llm" in first["code"] and "has code 0, process 1 on" in first["code"]
    assert "differ in temperature before batch 1: process 0 on" in first["control"]
    assert "has 1.0, process 1 on" in first["control"] and "has 2.0;" in first["control"]


@several
def test_an_environment_that_hangs_in_one_process_is_named_in_all(together):
    for log in together[1]:
        found = json.loads(log.splitlines()[-1])
        lost, told, kinds = json.loads(found["lost"])
        assert lost == told > 0 and len(kinds) == 1 and kinds[0].startswith("timeout ") and kinds[0].endswith(" (process 1)")
        assert found["hangs"].startswith("TooManyInvalid") and "(process 1)" in found["hangs"]


@dataclasses.dataclass(frozen=True)
class Device:
    """What meshes read of a device."""

    platform: str
    process_index: int
    id: int


def test_replicas_that_cannot_be_are_refused():
    devices = np.array([Device("cpu", i // 2, i) for i in range(8)])
    mesh = Mesh(devices.reshape(2, 2, 1, 1, 2), MESH_AXES)
    assert parallel.sampler_mesh(mesh) is parallel.sampler_mesh(mesh, 2) is mesh
    assert [parallel.sampler_mesh(mesh, n).shape["data"] for n in (1, 4, 8)] == [8, 2, 1]
    for tensor in (3, 5, 16):
        with pytest.raises(ValueError, match=f"sampling.tensor={tensor}: .*that divides 8, or 0"):
            parallel.sampler_mesh(mesh, tensor)
    here = parallel.local_mesh(mesh)
    assert dict(here.shape) == {"data": 1, "fsdp": 1, "seq": 1, "expert": 1, "tensor": 2} and here.devices.flat[1].id == 1
    with pytest.raises(ValueError, match="replicas of 4 devices straddle .* has 2 devices.*set sampling.tensor to a divisor"):
        parallel.local_mesh(parallel.sampler_mesh(mesh, 4))
    parallel.check_heads(mesh, 8, 2)
    with pytest.raises(ValueError, match="replica of 2 devices cannot share 9 heads and 3 .*sampling.tensor to a divisor of 3"):
        parallel.check_heads(mesh, 9, 3)
