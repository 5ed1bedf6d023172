"""Saves that are cut short by kills, interrupts, errors and full disks leave the last good checkpoint."""

import os
import signal
import subprocess
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from stored_states import make_state, run_child

from jaxrl_llm.store.checkpoints import Checkpoints

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
