"""Checkpoints hold every kind of leaf, keep the newest, and restore onto another mesh."""

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stored_states import Counters, assert_identical, make_state, run_child

from jaxrl_llm.models.lora import Adapters
from jaxrl_llm.store.checkpoints import Checkpoints, _checksum


def test_round_trip_is_bit_exact_for_every_kind_of_leaf(tmp_path):
    state = make_state(scale=0.1)
    host = {"data": {"epoch": 1, "position": 37}, "note": None, "ratio": 0.1, "list": [1, "a"]}
    with Checkpoints(tmp_path / "deep" / "er") as checkpoints:
        checkpoints.save(4, state, host)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        restored = Checkpoints(tmp_path / "deep" / "er", read_only=True).restore(target)
    assert (restored.step, restored.host, restored.skipped) == (4, host, ())
    assert_identical(restored.state, state)
    assert jax.random.key_impl(restored.state.keys) == "rbg"
    np.testing.assert_array_equal(jax.random.normal(restored.state.key, 5), jax.random.normal(state.key, 5))


def test_a_reader_gets_no_warning_for_being_one(tmp_path, caplog):
    Checkpoints(tmp_path).close()
    caplog.clear()
    Checkpoints(tmp_path, read_only=True).close()
    assert not caplog.records
    logging.getLogger("absl").warning("others are heard")
    assert [record.message for record in caplog.records] == ["others are heard"]


def test_a_part_of_a_checkpoint_is_read_and_checked_alone(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": {"w": jnp.arange(3.0)}, "rest": jnp.zeros(5)})
    reader, part = Checkpoints(tmp_path, read_only=True), {"params": {"w": jnp.zeros(3)}}
    assert reader.restore(part, part=True).state["params"]["w"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="rest: in the checkpoint only"):
        reader.restore(part)
    with pytest.raises(ValueError, match="params.v: not in the checkpoint"):
        reader.restore({"params": {"v": jnp.zeros(3)}}, part=True)


def test_a_state_of_a_later_version_has_further_branches_without_arrays(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, Counters(jnp.int32(5), None)._asdict())
    later = {"seen": jnp.int32(0), "nothing": None, "replayed": None, "models": {}}
    assert Checkpoints(tmp_path, read_only=True).restore(later).state == {
        "seen": 5, "nothing": None, "replayed": None, "models": {}}


def test_adapters_at_any_place_of_a_state_are_read(tmp_path):
    """A dict of a type of its own, with a number that is no leaf."""
    adapters = Adapters({"query": {"a": jnp.ones(2), "b": jnp.zeros(3)}}, 0.5)
    state = make_state().replace(params=adapters, opt_state=optax.adam(1e-3).init(adapters))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    assert_identical(Checkpoints(tmp_path, read_only=True).restore(state).state, state)


def test_buffers_may_be_donated_right_after_save(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    expected = np.random.default_rng(0).standard_normal((512, 2048)).astype(np.float32)
    array = jnp.array(expected)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": array})
        array = overwrite(array)
        assert float(array[0, 0]) == -1
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.restore({"w": array}).state["w"], expected)


def test_keeps_the_newest_and_every_kth(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, {"w": jnp.full(2, step)}, host=step)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6, 7]
        old = checkpoints.restore({"w": jnp.zeros(2, int)}, step=4)
    assert (old.step, old.host, old.state["w"].tolist()) == (4, 4, [4, 4])


def test_checksum_sees_single_changes_and_swaps():
    for dtype in ("float32", "bfloat16", "int32", "uint8"):
        x = jnp.arange(24).reshape(2, 3, 4).astype(dtype)
        index = np.arange(24, dtype=np.uint64)
        bits = np.asarray(x).view({4: np.uint32, 2: np.uint16, 1: np.uint8}[x.dtype.itemsize]).ravel().astype(np.uint64)
        assert int(_checksum(x)) == int((bits * (2 * index + 1)).sum() % 2**32)
        assert int(_checksum(x)) != int(_checksum(x.at[1, 2, 3].set(1)))
        assert int(_checksum(x)) != int(_checksum(x[::-1]))
    assert int(_checksum(jnp.array([True, False, True]))) == 1 + 5


@pytest.mark.slow
def test_restores_onto_another_mesh(tmp_path):
    """Saved sharded over four devices, restored here on one: the checksum does not depend on the layout."""
    body = """
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        state = {"w": put(jnp.arange(48.0).reshape(8, 6), P("fsdp")),
                 "k": put(jax.random.split(jax.random.key(3), 8), P("fsdp")), "r": put(jnp.int32(9), P())}
        checkpoints.save(5, state)
        checkpoints.wait()
        again = checkpoints.restore(state).state
        pairs = zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True)
        print("SHARDINGS", all(a.sharding == s.sharding for a, s in pairs))
        checkpoints.close()
    """
    result = run_child(tmp_path, body, flags="--xla_force_host_platform_device_count=4")
    assert "SHARDINGS True" in result.stdout, result.stderr
    expected = {"w": jnp.arange(48.0).reshape(8, 6), "k": jax.random.split(jax.random.key(3), 8), "r": jnp.int32(9)}
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), expected)
    assert_identical(Checkpoints(tmp_path, read_only=True).restore(target).state, expected)


@pytest.mark.slow
def test_checksums_of_many_sharded_tensors_do_not_wait_for_each_other(tmp_path):
    """Each tensor's checksum is a program with an all-reduce; forty in flight at once can block all threads of a CPU."""
    body = """
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        put = lambda i, spec: jax.device_put(jnp.arange(1024.0 * (1 + i % 4)).reshape(16, -1), NamedSharding(mesh, spec))
        state = {f"w{i}": put(i, P("fsdp") if i % 3 else P()) for i in range(40)}
        for step in range(2, 12):
            checkpoints.save(step, state)
        print("RESTORED", checkpoints.restore(state).step)
        checkpoints.close()
    """
    flags = "--xla_force_host_platform_device_count=2 --xla_cpu_collective_call_terminate_timeout_seconds=15"
    result = run_child(tmp_path, body, flags=flags)
    assert "RESTORED 11" in result.stdout, result.stderr[-2000:]
