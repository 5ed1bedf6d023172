"""Checkpoints survive the hazards of real runs: kills, full disks, damaged files, changed models, changed meshes."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest

from jaxrl_llm.models.lora import Adapters
from jaxrl_llm.store.checkpoints import Checkpoints, _checksum


class Counters(NamedTuple):
    seen: jax.Array
    nothing: None


@flax.struct.dataclass
class State:
    params: dict
    opt_state: tuple
    key: jax.Array
    keys: jax.Array
    counters: Counters
    empty: tuple


def make_state(scale=1.0, width=3):
    params = {
        "dense": {
            "kernel": scale * jnp.arange(2.0 * width).reshape(2, width),
            "bias": jnp.full(width, scale, jnp.bfloat16),
        }
    }
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return State(
        params=params,
        opt_state=optimiser.init(params),
        key=jax.random.key(7),
        keys=jax.random.split(jax.random.key(8, impl="rbg"), 4),
        counters=Counters(jnp.int32(5), None),
        empty=(),
    )


def raw(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and raw(a).tobytes() == raw(e).tobytes()


def files_of(directory, step):
    return [os.path.join(root, name) for root, _, names in os.walk(directory / str(step)) for name in names]


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


def run_child(directory, body, prefix=(), flags=None):
    """Runs `body` in a process of its own with `checkpoints` open on `directory` (keep=1) and step 1 safely saved."""
    head = f"""
        import os, signal, sys, threading, time
        import jax, jax.numpy as jnp, numpy as np
        from jaxrl_llm.store.checkpoints import Checkpoints
        checkpoints = Checkpoints({str(directory)!r}, keep=1)
        checkpoints.save(1, {{"w": jnp.arange(8.0)}}, host="good")
        checkpoints.wait()
        big = {{"w": jnp.asarray(np.random.default_rng(0).standard_normal(4_000_000), jnp.float32)}}
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    if flags is not None:
        environment["XLA_FLAGS"] = flags
    return subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(body)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


KILL_WHILE_WRITING = """
    def kill():
        while not any("2.orbax-checkpoint-tmp" in name for name in os.listdir(checkpoints.directory)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()
    checkpoints.save(2, big)
    checkpoints.wait()
"""
# The audit hook sees every rename of the process, whichever library asks: the data is written, not yet published.
KILL_BEFORE_PUBLISHING = """
    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("/2"):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    checkpoints.save(2, big)
    checkpoints.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("body", [KILL_WHILE_WRITING, KILL_BEFORE_PUBLISHING], ids=["writing", "publishing"])
def test_kill_during_save_keeps_the_last_good_one(tmp_path, body):
    result = run_child(tmp_path, body)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert any(name.startswith("2.orbax-checkpoint-tmp") for name in os.listdir(tmp_path)), (
        "the kill came too late to test anything"
    )
    with (
        Checkpoints(tmp_path, read_only=True) as reader,
        pytest.warns(RuntimeWarning, match="step 2: its save was cut short"),
    ):
        restored = reader.restore({"w": jnp.zeros(8)})
    assert any(name.startswith("2.orbax") for name in os.listdir(tmp_path)), (
        "a reader must not tidy up a run that may be alive"
    )
    assert (restored.step, restored.host, restored.state["w"].tolist()) == (1, "good", list(range(8)))
    with Checkpoints(tmp_path, keep=1) as writer:
        with pytest.warns(RuntimeWarning, match="cut short"):
            assert writer.restore({"w": jnp.zeros(8)}).skipped == ((2, "its save was cut short"),)
        writer.save(2, {"w": jnp.ones(8)})
        writer.wait()
        assert sorted(os.listdir(tmp_path)) == ["2"]


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "a handler was left behind"


def interrupt_in(seconds):
    """SIGINT to this process after a while, as Ctrl-C would send it; returns a function that waits until it was sent."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer.join


@pytest.mark.slow
def test_an_interrupt_waits_for_the_save(interruptible, tmp_path, capfd):
    """At whatever moment it comes: the step is published, the interrupt is raised, and the same step can be saved again."""
    state, moments = make_state(), np.geomspace(0.001, 0.1, 13)
    for i, moment in enumerate(moments):
        with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path / str(i)) as checkpoints:
            checkpoints.save(1, state)
            try:
                sent = interrupt_in(moment)
                checkpoints.save(2, state, {"seen": 2})
                checkpoints.wait()
                sent()
            except KeyboardInterrupt:
                checkpoints.save(2, state, {"seen": 2})
                raise
        with Checkpoints(tmp_path / str(i), read_only=True) as reader:
            restored = reader.restore(state)
        assert (restored.step, restored.host, restored.skipped) == (2, {"seen": 2}, ())
        assert sorted(os.listdir(tmp_path / str(i))) == ["1", "2"]
    assert capfd.readouterr().err.count("interrupted: the run stops when") >= 3, "it hardly ever came during a save"


def test_a_second_interrupt_does_not_wait(interruptible, tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        def never_ends():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second interrupt was ignored")

        checkpoints.save(1, make_state())
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(checkpoints._manager, "wait_until_finished", never_ends)
            checkpoints.wait()


def test_a_save_that_was_left_by_an_exception_is_not_made_again(tmp_path, monkeypatch):
    """orbax may wait for ever for such a save."""
    calls = []

    def left(step, **given):
        calls.append(step)
        raise KeyboardInterrupt

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state())
        checkpoints.wait()
        monkeypatch.setattr(checkpoints._manager, "save", left)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, make_state())
        with pytest.raises(OSError, match="interrupted twice cannot be made again"):
            checkpoints.save(2, make_state())
    assert calls == [2] and [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()] == [1]


def test_an_ignored_interrupt_stays_ignored(interruptible, tmp_path, monkeypatch):
    """As in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state())
        finish = checkpoints._manager.wait_until_finished
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", lambda: (signal.raise_signal(signal.SIGINT), finish()))
        checkpoints.wait()
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN
    assert os.listdir(tmp_path) == ["1"]


@pytest.mark.slow
def test_write_error_during_save_keeps_the_last_good_one_and_is_reported(tmp_path):
    """A limit on file size makes write() fail in the middle of the data, as a full disk does."""
    result = run_child(
        tmp_path,
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        try:
            checkpoints.save(2, big)
            checkpoints.wait()
        except OSError as error:
            print("ERROR", error)
        print("LEFT", sorted(os.listdir(checkpoints.directory)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        restored = checkpoints.restore({"w": jnp.zeros(8)})
        print("RESTORED", restored.step, restored.host, restored.state["w"].tolist() == list(range(8)))
        checkpoints.save(3, big)
        checkpoints.close()
        print("LATER", sorted(os.listdir(checkpoints.directory)))
    """,
    )
    assert "ERROR checkpoint of step 2 was not written" in result.stdout, result.stdout + result.stderr
    assert "LEFT ['1']" in result.stdout
    assert "RESTORED 1 good True" in result.stdout
    assert "LATER ['3']" in result.stdout


@pytest.mark.slow
def test_disk_that_fills_during_save_keeps_the_last_good_one(tmp_path):
    """A real full disk: a file system of 24 MB, of which another file takes 12 after the check for room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    body = """
        def hook(event, arguments):  # the temporary folder of step 2 appears: the check is over, the data is to come
            if event != "os.mkdir" or "2.orbax-checkpoint-tmp" not in str(arguments[0]):
                return
            if not os.path.exists("DISK/other"):
                with open("DISK/other", "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 12_000_000)
        sys.addaudithook(hook)
        try:
            checkpoints.save(2, big)
            checkpoints.wait()
        except OSError as error:
            print("ERROR", error)
        print("LEFT", sorted(os.listdir(checkpoints.directory)))
        restored = checkpoints.restore({"w": jnp.zeros(8)})
        print("RESTORED", restored.step, restored.state["w"].tolist() == list(range(8)))
        os.remove("DISK/other")
        checkpoints.save(3, big)
        checkpoints.close()
        print("LATER", sorted(os.listdir(checkpoints.directory)))
    """.replace("DISK", str(disk))
    mount = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs -o size=24m tmpfs "{disk}" && exec "$@"',
        "sh",
    ]
    try:
        subprocess.run([*mount, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system does not let a test mount a file system")
    result = run_child(disk / "checkpoints", body, prefix=mount)
    assert "ERROR checkpoint of step 2 was not written" in result.stdout, result.stdout + result.stderr
    assert "LEFT ['1']" in result.stdout
    assert "RESTORED 1 True" in result.stdout
    assert "LATER ['3']" in result.stdout


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
