"""Damaged files, other models and machines without room: an older checkpoint, or an error that says why."""

import os
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from stored_states import assert_identical, files_of, make_state

from jaxrl_llm.store.checkpoints import Checkpoints


def flip_byte(directory):
    path = max((p for p in files_of(directory, 2) if "/d/" in p), key=os.path.getsize)
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def truncate_data(directory):
    for path in [p for p in files_of(directory, 2) if "/d/" in p]:
        os.truncate(path, os.path.getsize(path) // 2)


def garble_metadata(directory):
    (directory / "2" / "state" / "_METADATA").write_text('{"tree_')


def delete_metadata(directory):
    (directory / "2" / "state" / "_METADATA").unlink()


def delete_state(directory):
    shutil.rmtree(directory / "2" / "state")


def empty_step(directory):
    shutil.rmtree(directory / "2")
    (directory / "2").mkdir()


def truncate_host(directory):
    os.truncate(directory / "2" / "host" / "metadata", 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [flip_byte, truncate_data, garble_metadata, delete_metadata, delete_state, empty_step, truncate_host]
)
def test_damaged_latest_falls_back_and_is_reported(tmp_path, damage):
    states = [
        {"w": jnp.asarray(np.random.default_rng(seed).standard_normal((64, 64)), jnp.float32)} for seed in range(3)
    ]
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        checkpoints.save(1, states[1], host="one")
        checkpoints.save(2, states[2], host="two")
    damage(tmp_path)
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        with pytest.warns(RuntimeWarning, match="restored step 1.*step 2: "):
            restored = checkpoints.restore(states[0])
        assert (restored.step, restored.host) == (1, "one")
        assert [step for step, _ in restored.skipped] == [2]
        if damage is flip_byte:  # nothing in the file format notices this one
            assert "checksum of w differs" in restored.skipped[0][1]
        assert_identical(restored.state, states[1])
        with pytest.raises((OSError, FileNotFoundError), match="step 2"):
            checkpoints.restore(states[0], step=2)
        # Training continues from 1 and must be able to save step 2 again.
        checkpoints.restore(states[0], step=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            checkpoints.save(2, states[0], host="again")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            again = checkpoints.restore(states[1])
    assert (again.step, again.host) == (2, "again")
    assert_identical(again.state, states[0])


def test_all_damaged_is_an_error_with_the_reasons(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, {"w": jnp.ones(3)})
    garble_metadata(tmp_path)
    with pytest.raises(OSError, match="no intact checkpoint.*step 2: .*no other checkpoint is left"):
        Checkpoints(tmp_path, read_only=True).restore({"w": jnp.ones(3)})


def test_resuming_from_an_older_step_sets_the_newer_ones_aside(tmp_path):
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"w": jnp.full(2, step)})
    for value in (7, 8):
        with Checkpoints(tmp_path, keep=5) as checkpoints:
            checkpoints.restore({"w": jnp.zeros(2, int)}, step=10)
            with pytest.warns(RuntimeWarning, match="abandoned"):
                checkpoints.save(20, {"w": jnp.full(2, value)})
            checkpoints.wait()
            assert checkpoints.steps() == [10, 20]
            assert checkpoints.restore({"w": jnp.zeros(2, int)}).state["w"].tolist() == [value, value]
    assert sorted(os.listdir(tmp_path / "abandoned")) == ["20-0", "20-1", "30-0"]


def test_saving_twice_is_harmless_and_going_back_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {"w": jnp.ones(2)})
        checkpoints.save(5, {"w": jnp.ones(2)})
        with pytest.raises(ValueError, match="step=4.*after step 5"):
            checkpoints.save(4, {"w": jnp.ones(2)})
        checkpoints.wait()
        assert sorted(os.listdir(tmp_path)) == ["5"]


def test_nothing_to_restore(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint directory .*missing"):
        Checkpoints(tmp_path / "missing", read_only=True)
    with Checkpoints(tmp_path / "new") as checkpoints:
        with pytest.raises(FileNotFoundError, match="no complete checkpoint in .*none"):
            checkpoints.restore({"w": jnp.ones(2)})
        checkpoints.save(3, {"w": jnp.ones(2)})
        with pytest.raises(FileNotFoundError, match=r"step 4 .*available steps: \[3\]"):
            checkpoints.restore({"w": jnp.ones(2)}, step=4)


def test_another_model_is_an_error_that_names_the_tensors(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state())
        checkpoints.save(2, make_state())
        with pytest.raises(ValueError, match=r"params\.dense\.kernel: expected float32\[2, 4\], got float32\[2, 3\]"):
            checkpoints.restore(make_state(width=4))
        state = make_state()
        other_type = state.replace(params={"dense": {**state.params["dense"], "bias": jnp.ones(3)}})
        with pytest.raises(ValueError, match=r"bias: expected float32\[3\], got bfloat16\[3\]") as caught:
            checkpoints.restore(other_type)
        assert "kernel" not in str(caught.value)
        renamed = state.replace(
            params={"dense": {"weight": state.params["dense"]["kernel"], "bias": state.params["dense"]["bias"]}}
        )
        with pytest.raises(
            ValueError, match="params.dense.weight: not in the checkpoint.*params.dense.kernel: in the checkpoint only"
        ):
            checkpoints.restore(renamed)
        # A group of keys of another implementation has another number of words.
        with pytest.raises(ValueError, match=r"key: expected uint32\[4\], got uint32\[2\]"):
            checkpoints.restore(state.replace(key=jax.random.key(0, impl="rbg")))


def test_leaf_that_is_no_array_and_host_that_is_no_json(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, host="good")
        with pytest.raises(TypeError, match="state leaf 'a.name' is a str"):
            checkpoints.save(2, {"a": {"name": "gpt"}})
        with pytest.raises(TypeError, match="JSON serializable"):
            checkpoints.save(2, {"w": jnp.ones(2)}, host={1, 2})
        checkpoints.save(3, {"w": jnp.ones(2)}, host="still works")
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]


def test_disk_that_lacks_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    state = {"w": jnp.ones(2_000_000)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(4)})
        checkpoints.wait()
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=8_000_000))
        with pytest.raises(OSError, match=r"step 2 needs 9.45 MB but 8.00 MB is free.*steps \[1\]"):
            checkpoints.save(2, state)
        monkeypatch.undo()
        assert sorted(os.listdir(tmp_path)) == ["1"]
        checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_host_that_lacks_memory_for_the_copy_is_reported(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        memory = psutil.virtual_memory()
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=3_000_000))
        with pytest.warns(RuntimeWarning, match="copies 4.00 MB to the host, which has 3.00 MB available"):
            checkpoints.save(1, {"w": jnp.ones(1_000_000)})
        checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_reader_sees_what_a_live_run_publishes(tmp_path):
    with Checkpoints(tmp_path) as writer, Checkpoints(tmp_path, read_only=True) as reader:
        for step in (1, 2):
            writer.save(step, {"w": jnp.full(2, step)})
            writer.wait()
            assert reader.restore({"w": jnp.zeros(2, int)}).step == step
