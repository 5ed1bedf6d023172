"""Hazards of a run and its folder: a second run, a full disk, signals at bad moments, a lost history, failing pictures."""
import dataclasses
import errno
import fcntl
import functools
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import psutil
import pytest
import run_files
import small_run

from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.runs import beginning, loop, tracking
from jaxrl_llm.runs.metrics import MetricWriter
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.setup import setup, sources
from jaxrl_llm.show.runs import read_runs
from jaxrl_llm.store import preemption
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.store.lock import FILE_NAME, locked
from jaxrl_llm.store.workdir import open_workdir
from jaxrl_llm.tasks.loader import Batches


def child(body: str) -> subprocess.Popen:
    """A Python process, after its first line of output."""
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(body)], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": str(small_run.ROOT)})
    process.first = process.stdout.readline().strip()
    return process


def holder(folder: Path) -> subprocess.Popen:
    """A process that holds the folder of a run."""
    return child(f"""
        import time
        from jaxrl_llm.store.lock import locked
        with locked({str(folder)!r}):
            print("locked", flush=True)
            time.sleep(600)
    """)


# ---- one run at a time


def test_a_second_run_is_refused_by_name_and_changes_nothing_until_the_first_is_gone(tmp_path):
    folder = tmp_path / "run"
    other = holder(folder)
    try:
        for resume in (False, True, "auto"):
            with pytest.raises(RuntimeError) as refused:
                small_run.train(folder, resume)
            report = str(refused.value)
            assert f"{folder} is in use by another run (host {platform.node()}, process {other.pid}, since 20" in report
            assert "choose another --workdir" in report
        assert os.listdir(folder) == [FILE_NAME]
        other.send_signal(signal.SIGKILL)
        other.wait()
        with locked(folder):
            assert json.loads((folder / FILE_NAME).read_text())["pid"] == os.getpid()
    finally:
        other.kill()
        other.communicate()


def test_what_a_run_forks_does_not_keep_its_folder(tmp_path):
    parent = child(f"""
        import os, time
        from jaxrl_llm.store.lock import locked
        with locked({str(tmp_path)!r}):
            forked = os.fork()
            if forked == 0:
                time.sleep(600)
            print(forked, flush=True)
            time.sleep(600)
    """)
    try:
        with pytest.raises(RuntimeError, match=f"process {parent.pid}"), locked(tmp_path):
            pass
        parent.kill()
        parent.wait()
        assert psutil.pid_exists(int(parent.first))  # it is alive
        with locked(tmp_path):
            pass
    finally:
        os.kill(int(parent.first), signal.SIGKILL)
        parent.communicate()


def test_a_folder_in_use_can_be_looked_at(tmp_path):
    work = open_workdir(tmp_path, small_run.config())
    work.record()
    with MetricWriter(tmp_path) as writer, locked(tmp_path):
        writer.write(0, {"eval/score": 0.5, "time/other": 1.0})
        with Checkpoints(work.checkpoints) as checkpoints:
            checkpoints.save(1, {"w": jnp.ones(2)})
            checkpoints.wait()
            with Checkpoints(work.checkpoints, read_only=True) as reader:
                assert reader.restore({"w": jnp.zeros(2)}).step == 1
        run, = read_runs([tmp_path])
        assert run.facts["steps"] == "0 of 3"


@pytest.mark.parametrize("number", (errno.ENOLCK, errno.EOPNOTSUPP))
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, number):
    def flock(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RuntimeWarning, match="cannot be locked"), locked(tmp_path):
        assert (tmp_path / FILE_NAME).exists()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """The last holder removes a folder that it made in vain, after the next one opens the file."""
    flock, removed = fcntl.flock, []

    def late(file, how):
        if not removed:
            removed.append((tmp_path / FILE_NAME).unlink())
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="in use"), locked(tmp_path):
            pass


def test_a_start_that_is_refused_leaves_no_folder(tmp_path):
    for changes, error in (({"method": "grop"}, ValueError), ({"learner.minibatches": 3}, ValueError)):
        with pytest.raises(error):
            small_run.train(tmp_path / "new", **changes)
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        small_run.train(tmp_path / "new", True)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_commands_beside_a_living_run_are_refused_and_do_not_disturb_it(tmp_path):
    folder, settings = tmp_path / "run", {"steps": 200, "checkpoint.every": 5}
    first = small_run.start(folder, tmp_path / "first", **settings)
    try:
        small_run.wait_until(lambda: (folder / "checkpoints" / "5").exists(), first)
        for options in ((), ("--resume",)):
            second = small_run.start(folder, tmp_path / "second", *options, **settings)
            assert second.wait(120) == 1
            report = (tmp_path / "second").read_text()
            assert f"process {first.pid}" in report and "Traceback" not in report
        assert first.wait(240) == 0, (tmp_path / "first").read_text()[-2000:]
    finally:
        first.kill()
    assert [line["step"] for line in run_files.lines(folder)] == list(range(201))
    assert {"195", "200"} <= set(os.listdir(folder / "checkpoints"))


# ---- signals and interrupts


def kills_itself(function, when=lambda *arguments: True, number=signal.SIGTERM):
    """`function`, with a signal to the process at its beginning."""
    @functools.wraps(function)
    def wrapped(*arguments, **options):
        if when(*arguments):
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    return wrapped


MOMENTS = {"build": (setup, "opened"), "warm_up": (beginning, "imitate"), "evaluation": (loop, "evaluate"),
           "sampling": (Source, "next"), "learning": (Learner, "learn")}


@pytest.mark.slow
def test_sigterm_before_the_end_of_the_first_step_stops_at_once_and_loses_nothing(tmp_path, monkeypatch, capfd):
    settings = {"warmup.steps": 2, "steps": 1}
    small_run.train(tmp_path / "whole", **settings)
    whole = [run_files.repeatable(line) for line in run_files.lines(tmp_path / "whole")]
    for name, (module, function) in MOMENTS.items():
        folder = tmp_path / name
        monkeypatch.setattr(module, function, kills_itself(getattr(module, function)))
        with pytest.raises(SystemExit) as stopped:
            small_run.train(folder, **settings)
        monkeypatch.undo()
        assert stopped.value.code == preemption.EXIT_CODE == 75
        begun = (folder / "checkpoints" / "0").exists()
        assert begun == (name in ("sampling", "learning")), name
        report = capfd.readouterr().err
        assert "SIGTERM: the run stops, nothing is lost (exit code 75)" in report
        assert ("continue with --resume" if begun else "start it again, without --resume") in report
        if begun:
            assert [line["step"] for line in run_files.lines(folder)] == [0]
        small_run.train(folder, begun, **settings)
        assert [run_files.repeatable(line) for line in run_files.lines(folder)] == whole, name


@pytest.mark.slow
def test_sigterm_in_a_long_warm_up_ends_the_process(tmp_path):
    process = small_run.start(tmp_path / "run", tmp_path / "log", **{"warmup.steps": 1_000_000})
    small_run.wait_until(lambda: "supervised warm-up" in (tmp_path / "log").read_text(), process)
    process.terminate()
    assert process.wait(30) == 75
    assert "start it again, without --resume" in (tmp_path / "log").read_text()


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["interrupts", "in the background"])
def interrupts(request):
    """The effect of SIGINT, independent of the shell that starts these tests."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_save_is_not_broken_by_a_signal_that_may_stop_the_run_at_once(interrupts):
    reached = []
    with pytest.raises(preemption.Preempted), preemption.watch(), preemption.at_once():
        with preemption.undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("saved")
        preemption.check()
    assert reached == ["saved"]


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [signal.default_int_handler], indirect=True)
def test_an_interrupt_between_learning_and_the_position_of_the_data_saves_no_wrong_pair(tmp_path, monkeypatch, interrupts):
    """The position is that after the batch of the step that is saved: reading it again shows the interrupt's moment."""
    positions = []

    class Interrupted(Batches):
        def get_state(self):
            positions.append(super().get_state())
            if len(positions) == 3:  # at the start, after step 1, after step 2
                os.kill(os.getpid(), signal.SIGINT)
            return positions[-1]

    def interrupted(*arguments):
        made = batches(*arguments)
        return Interrupted(made._source, made._share, made._order, made._identity)

    batches = sources.batches
    monkeypatch.setattr(sources, "batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small_run.train(tmp_path, **{"checkpoint.every": 100})
    monkeypatch.undo()
    steps = [int(name) for name in os.listdir(tmp_path / "checkpoints") if name.isdecimal()]
    assert 1 in steps  # the interrupt comes in step 2
    for step in steps:
        stored = json.loads((tmp_path / "checkpoints" / str(step) / "host" / "metadata").read_text())
        assert stored["host"]["data"]["next_problem"] == 4 * step


# ---- a full disk, a lost history


def on_small_disks(folder: Path, body: str, *mounts: str) -> dict:
    """The JSON on the last output line of `body`, which runs with these `mounts` (of the shell)."""
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]
    try:
        subprocess.run([*mount, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system does not let a test mount a file system")
    done = subprocess.run([*mount, sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (
                              small_run.ROOT, small_run.ROOT / "tests", Path(__file__).parent)))})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_full_disk_is_named_with_what_to_free_and_the_run_continues_from_its_last_checkpoint(tmp_path):
    """A real full disk: another file takes the rest of it before step 3 is written."""
    result = on_small_disks(tmp_path, f"""
        import contextlib, errno, json, pathlib, warnings
        import run_files, small_run
        from jaxrl_llm.sampling.source import Source
        disk, collect = pathlib.Path({str(tmp_path)!r}), Source.next
        def filling(source, snapshot, *others):
            if snapshot.version == 2:
                with contextlib.suppress(OSError), open(disk / "other", "wb", buffering=0) as file:
                    while True:
                        file.write(bytes(512))
            return collect(source, snapshot, *others)
        settings = dict(steps=4, **{{"checkpoint.every": 1}})
        Source.next = filling
        try:
            small_run.train(disk / "run", **settings)
        except OSError as error:
            report = [str(error), *error.__notes__]
        Source.next = collect
        (disk / "other").unlink()
        small_run.train(disk / "run", True, **settings)
        small_run.train(disk / "whole", **settings)
        lines = [[run_files.repeatable(line) for line in run_files.lines(disk / name)] for name in ("run", "whole")]
        print(json.dumps([report, lines]))
    """, f'mount -t tmpfs -o size=48m tmpfs "{tmp_path}"')
    report, (lines, whole) = result
    # The last page of metrics.jsonl may have room for its line: then the save after it fails.
    assert "cannot append step 3 to" in report[0] or "checkpoint of step 3 needs" in report[0]
    assert "step 3 could not be saved" in report[1] and "the last saved one is step 2" in report[1]
    assert "samples 0." in report[2] and "checkpoints" in report[2] and "then continue with --resume" in report[2]
    assert lines == whole and len(whole) == 5


@pytest.mark.slow
@pytest.mark.parametrize("what", ("metrics.jsonl", "tensorboard"))
def test_metrics_that_cannot_be_written_end_the_run_after_its_last_step_was_saved(tmp_path, what):
    """The metrics are on a disk of their own, of two pages."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / what).symlink_to(tmp_path / "disk" / "metrics.jsonl" if what == "metrics.jsonl" else tmp_path / "disk")
    report, saved = on_small_disks(tmp_path, f"""
        import json, pathlib
        import small_run
        folder = pathlib.Path({str(tmp_path)!r}) / "run"
        try:
            small_run.train(folder, **{{"steps": 60, "checkpoint.every": 100}})
        except OSError as error:
            report = [str(error), *error.__notes__]
        print(json.dumps([report, sorted(int(path.name) for path in (folder / "checkpoints").iterdir())]))
    """, f'mount -t tmpfs -o size=8k tmpfs "{tmp_path / "disk"}"')
    step = saved[-1]
    assert 1 <= step < 60 and saved == [0, step]
    assert f"cannot append step {step} to " in report[0] and "No space left on device" in report[0]
    assert report[1] == f"step {step} was saved; continue with --resume"


@pytest.mark.slow
def test_a_lost_history_is_reported(tmp_path):
    small_run.train(tmp_path, steps=1)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl is gone or empty: .* history of steps 0 to 1"), \
            pytest.warns(RuntimeWarning, match="steps: 1 -> 2"):
        small_run.train(tmp_path, True, steps=2)
    assert [line["step"] for line in run_files.lines(tmp_path)] == [2]


# ---- errors that must be neither hidden nor caused


@pytest.mark.slow
def test_a_picture_that_fails_ends_no_run_and_hides_no_error(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no font was found")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", broken)
    with pytest.warns(RuntimeWarning, match=r"curves\.png was not drawn: RuntimeError: no font was found"):
        assert small_run.train(tmp_path / "finished", steps=1)["after"] is not None
    monkeypatch.setattr(Source, "next", broken_reward)
    with pytest.warns(RuntimeWarning, match="no font"), pytest.raises(ZeroDivisionError, match="a reward divides"):
        small_run.train(tmp_path / "broken", steps=1)


def broken_reward(*arguments):
    raise ZeroDivisionError("a reward divides by zero")


def test_a_save_that_fails_is_an_error_but_not_in_place_of_another(tmp_path):
    """A limit on the size of files makes the save in the background fail as a full disk does."""
    big = {"w": jnp.asarray(np.random.default_rng(0).random(300_000, np.float32))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for name, expected in (("alone", OSError), ("second", ZeroDivisionError)):
            with pytest.raises(expected) as caught, Checkpoints(tmp_path / name) as checkpoints:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
                checkpoints.save(1, big)
                if name == "second":
                    raise ZeroDivisionError
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            report = [str(caught.value), *getattr(caught.value, "__notes__", ())]
            assert report[-1].startswith("checkpoint of step 1 was not written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_tracker_that_cannot_be_closed_is_a_warning(tmp_path, monkeypatch):
    class Run:
        def define_metric(self, name, step_metric):
            pass

        def finish(self, exit_code):
            raise ConnectionError(f"no network, code {exit_code}")

    monkeypatch.setitem(sys.modules, "wandb", type("wandb", (), {"init": staticmethod(lambda **given: Run())}))
    with pytest.warns(RuntimeWarning, match="no network, code 0"), tracking.tracked("sums", tmp_path, {}, False):
        pass
    with pytest.warns(RuntimeWarning, match="no network, code 1"), pytest.raises(ZeroDivisionError):
        with tracking.tracked("sums", tmp_path, {}, False):
            raise ZeroDivisionError


@pytest.mark.slow
def test_a_finished_run_with_a_closed_output_is_a_success(tmp_path):
    process = subprocess.Popen(
        [sys.executable, small_run.ROOT / "experiments" / "train.py", f"--config={small_run.CONFIG}", "--config.steps=1",
         f"--workdir={tmp_path / 'run'}", f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(small_run.ROOT)})
    while "sampling (compiles" not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    report = process.stderr.read()
    assert process.wait(240) == 0, report[-2000:]
    assert (tmp_path / "run" / "checkpoints" / "1").exists() and "Traceback" not in report


def test_a_step_all_of_whose_rollouts_are_dropped_learns_nothing():
    """An estimator drops all rollouts, in a batch of several micro-batches."""
    run, params = setup.build(small_run.config(method="reinforce_ada", **{"learner.minibatches": 2}))
    none = run.learner.estimator._replace(keeps=lambda rollouts: jnp.zeros_like(rollouts.valid))
    learner, before = dataclasses.replace(run.learner, estimator=none), jax.device_get(params)
    state = setup.initial_state(run, params)
    state, metrics, *_ = learner.learn(state, run.source.next(run.learner.publish(state)).rollouts)
    assert state.step == 1 and "loss" not in metrics and metrics["reinforce_ada/rollouts"] >= 4
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


# ---- memory


@pytest.mark.slow
def test_saves_leave_little_in_memory(tmp_path):
    """Saves a state of 48 tensors, about as many as a model has with its moments, in a process that does nothing else.

    The test counts objects, which is exact: resident memory jumps by megabytes. The least of ten counts is that without what
    threads of a busy machine still hold. What stays are the strings of JSON values that tensorstore returns to orbax, ten a
    tensor; a state that is kept would add two a tensor.
    """
    process = child(f"""
        import gc, json, sys
        import jax.numpy as jnp
        from jaxrl_llm.store.checkpoints import Checkpoints
        state, counts = {{f"w{{i}}": jnp.full(64, i) for i in range(48)}}, []
        with Checkpoints({str(tmp_path)!r}, keep=2) as checkpoints:
            for step in range(100):
                checkpoints.save(step, state, {{"data": step}})
                if step % 50 >= 40:
                    checkpoints.wait()
                    gc.collect()
                    counts.append(sys.getallocatedblocks())
        print(json.dumps(counts))
    """)
    assert process.wait() == 0
    counts = json.loads(process.first)
    assert (min(counts[10:]) - min(counts[:10])) / 50 < 520
