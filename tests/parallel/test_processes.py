"""Two processes with four devices each against one device; and jobs that lose a process or get a signal."""
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import job
import numpy as np
import pytest
import run_files

from jaxrl_llm.parallel import runtime
from jaxrl_llm.sampling.scoring import shared_scores
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.store import lock, preemption, workdir


# On a busy machine the processes' connections to each other may stall, which is nothing that a job could mend.
def several(test):
    return pytest.mark.slow(pytest.mark.flaky(reruns=2)(test))

STEPS = 4
MESHES = {"fsdp": (1, 8, 1), "mixed": (2, 2, 2)}  # the methods below run on data alone


def on(data: int, fsdp: int, tensor: int) -> list[str]:
    return [f"--config.mesh.data={data}", f"--config.mesh.fsdp={fsdp}", f"--config.mesh.tensor={tensor}"]


DATA = on(4, 1, 1)


def starts_again(code: int | None) -> bool:
    """Whether launchers restart a job with this exit code: killed by a signal, or so reported by a shell.

    The runtime aborts and prints every thread's stack; it may crash while it prints.
    """
    return code is not None and (code < 0 or code > 128)


def trained(processes: int, folder: Path, *arguments: str, devices: int = 4) -> Path:
    """The run folder of a job with this many devices in this many processes."""
    run = folder / "run"
    options = [f"--workdir={run}", f"--config.steps={STEPS}", *arguments]
    started = job.start(processes, devices // processes, options, folder / "logs")
    codes = job.finish(started, 240)
    assert codes == [0] * processes, "\n".join((folder / "logs" / str(i)).read_text()[-3000:] for i in range(processes))
    return run


def reported(run: Path) -> list[dict]:
    """The metrics of every step that do not depend on the clock."""
    return [{name: float(x) for name, x in run_files.repeatable(line).items()} for line in run_files.lines(run)]


def weights(run: Path) -> dict[str, np.ndarray]:
    """Parameters and moments of the last checkpoint by name, read by one process with one device."""
    config = default_config()
    config.update(json.loads((run / "config.json").read_text())["config"])
    config.mesh.update({"data": 1, "fsdp": 1, "tensor": 1})
    leaves = run_files.saved(run, config, STEPS)
    return {name: leaf for name, leaf in leaves.items() if name.startswith((".params", ".opt_state"))}


def assert_same(one: Path, other: Path, distance: float):
    """Samples, metrics and weights equal up to the order of sums, by which a draw on a boundary may take the other token."""
    pages = sorted(path.name for path in (one / "samples").glob("*.txt"))
    assert pages == sorted(path.name for path in (other / "samples").glob("*.txt")) and len(pages) == 3
    for page in pages:
        ours, theirs = ((run / "samples" / page).read_text().splitlines() for run in (one, other))
        assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 0.01 * len(ours), page
    for ours, theirs in zip(reported(one), reported(other), strict=True):
        for metrics in (ours, theirs):  # which the slot engine alone reports
            metrics.pop("completion/computed", None)
            metrics.pop("sampling/balance", None)
        assert ours == pytest.approx(theirs, rel=2e-2, abs=1e-4, nan_ok=True), ours["step"]
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    apart = np.concatenate([np.abs(ours[name] - theirs[name]).ravel() for name in ours])
    # Adam's first steps have one length whatever the gradient, so sums that nearly cancel may take a weight either way.
    assert np.mean(apart > distance) < 1e-4 and apart.max() < 10 * distance
    assert max(np.ptp(leaf) for leaf in theirs.values()) > 100 * distance


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process with one device."""
    return trained(1, tmp_path_factory.mktemp("alone"), devices=1)


@several
@pytest.mark.parametrize("mesh", MESHES)
def test_two_processes_do_what_one_device_does(alone, tmp_path, mesh):
    together = trained(2, tmp_path, *on(*MESHES[mesh]), devices=8)
    assert_same(alone, together, 1e-4)
    assert [entry["step"] for entry in reported(together)] == list(range(STEPS + 1))
    assert min(entry["grad_norm"] for entry in reported(together)[1:]) > 0
    assert "step 4/4" in (tmp_path / "logs" / "0").read_text()
    assert "step" not in (tmp_path / "logs" / "1").read_text()  # only the first process prints


METHODS = {
    "poise": ("estimator=bootstrap=1,first_fit=2",),
    "v0_5": (),
    "ppo": ("learner.minibatches=2", "sampling.micro_batches=2"),
    "dapo": ("lora.rank=2", "objective=+ kl(0.1)", "learner.minibatches=2"),
}


@several
@pytest.mark.parametrize("method", METHODS)
def test_methods_with_more_to_keep_together(tmp_path, method):
    """Steps along the gradient itself, which sums in another order change by as little as themselves."""
    options = [*DATA, f"--config.method={method}", "--config.optimizer.name=sgd", "--config.optimizer.learning_rate=0.1",
               *(f"--config.{option}" for option in METHODS[method])]
    assert_same(trained(1, tmp_path / "one", *options), trained(2, tmp_path / "two", *options), 1e-4)


@several
def test_a_job_with_a_signal_saves_and_continues_in_one_process(alone, tmp_path):
    run = tmp_path / "run"
    arguments = [f"--workdir={run}", f"--config.steps={STEPS}", *DATA, "--config.checkpoint.every=100",
                 "--config.sampling.engine=slots"]
    started = job.start(2, 2, arguments, tmp_path / "logs")
    wait_for(lambda: (run / "metrics.jsonl").is_file() and len((run / "metrics.jsonl").read_text().splitlines()) > 1, started)
    started[1].send_signal(signal.SIGTERM)  # only one process gets the signal
    assert job.finish(started, 120) == [preemption.EXIT_CODE] * 2
    assert job.finish(job.start(1, 4, [*arguments, "--resume"], tmp_path / "again"), 300) == [0]
    assert_same(alone, run, 1e-4)


@several
def test_a_run_of_one_process_continues_in_two_that_sample_apart(alone, tmp_path):
    shutil.copytree(alone, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    assert_same(alone, trained(2, tmp_path, "--resume", "--config.sampling.engine=slots", devices=2), 1e-4)
    assert "step 2/4" in (tmp_path / "logs" / "0").read_text()  # where it took the run up


@several
@pytest.mark.parametrize(("victim", "number"), ((0, signal.SIGKILL), (1, signal.SIGSTOP)), ids=("killed", "silent"))
def test_a_job_that_loses_a_process_ends(tmp_path, victim, number):
    """A killed process breaks its connections; a stopped one, like a machine lost from the network, is only silent."""
    run = tmp_path / "run"
    started = job.start(2, 2, [f"--workdir={run}", "--config.steps=1000", *DATA], tmp_path / "logs")
    wait_for(lambda: (run / "metrics.jsonl").is_file() and len((run / "metrics.jsonl").read_text().splitlines()) > 1, started)
    started[victim].send_signal(number)
    job.finish(started[1 - victim:2 - victim], 150)
    codes = job.finish(started, 0)
    text = (tmp_path / "logs" / str(1 - victim)).read_text()
    assert starts_again(codes[1 - victim]), text[-3000:]
    assert "a process was lost" in text or "task" in text, text[-3000:]


@several
def test_an_error_in_one_process_ends_the_job_and_is_reported(tmp_path):
    started = job.start(2, 2, [f"--workdir={tmp_path / 'run'}", "--config.steps=1000", *DATA, "--config.warmup.steps=0",
                               "--config.rewards=isolated(target='job:picky')"], tmp_path / "logs")
    codes = job.finish(started, 150)
    failed, other = ((tmp_path / "logs" / name).read_text() for name in "10")
    assert codes[1] == 1 and starts_again(codes[0]), other[-2000:]
    assert "not in process 1" in failed and "process 1 of 2 ends, and with it the job: RewardError" in failed


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Exit codes and logs of `restore_cases.py`."""
    folder = tmp_path_factory.mktemp("damaged")
    codes = job.finish(job.start_script("restore_cases.py", 2, 2, folder / "logs", str(folder / "checkpoints")), 120)
    return codes, [(folder / "logs" / name).read_text() for name in "01"]


@several
def test_a_checkpoint_that_one_process_cannot_read_is_skipped_by_all(damaged):
    for log in damaged[1]:
        result = json.loads(next(line for line in log.splitlines() if line.startswith("{")))
        assert (result["step"], result["host"], result["same"]) == (1, "of 1", [True] * 4), log[-2000:]
        (late, why_late), (early, why_early) = result["skipped"]
        assert (late, early) == (3, 2) and why_late.endswith("(in process 1)") and why_early.endswith("(in process 0)")
        assert len(result["warnings"]) == 1 and "unusable: step 3: " in result["warnings"][0]
        assert result["again"] == [2, "again"]
        assert "no intact checkpoint" in result["refusal"] and "no other checkpoint is left" in result["refusal"]


@several
def test_folders_that_only_look_like_one_are_refused_by_all(damaged):
    for log in damaged[1]:
        apart = json.loads(next(line for line in log.splitlines() if line.startswith("{")))["apart"]
        assert "is another folder on" in apart and "mount -t nfs" in apart, log[-2000:]


@several
def test_a_barrier_to_which_one_does_not_come_ends_the_job(damaged):
    (first, second), logs = damaged
    assert first == 134 and starts_again(second), logs
    assert "not all 2 processes reached the barrier 'the end of the world' within 2 s" in logs[0] and "waited True" in logs[0]


@several
def test_a_job_that_is_not_complete_does_not_start(tmp_path):
    """Only process 0 is started."""
    with (tmp_path / "log").open("w") as log:
        alone = subprocess.Popen([sys.executable, "-c", "from jaxrl_llm.parallel import runtime; runtime.START_SECONDS = 3\n"
                                  f"with runtime.job('127.0.0.1:{job.free_port()}', 2, 0): print('started')"],
                                 cwd=job.ROOT, env=job.with_devices(1), stdout=log, stderr=log)
    codes, text = job.finish([alone], 60), (tmp_path / "log").read_text()
    assert starts_again(codes[0]) and "started" not in text.splitlines(), text[-2000:]
    assert "until 3 s have passed: see whether all 2 were started" in text and "reach process 0 at 127.0.0.1:" in text


def wait_for(done, started, seconds: float = 200):
    """Waits for `done()`; fails when a process ends before it is."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end or any(one.poll() is not None for one in started):
            codes = job.finish(started, 0)
            raise AssertionError(f"the job did not come so far: exit codes {codes}")
        time.sleep(0.1)


def test_a_process_alone_needs_no_other():
    with runtime.job():
        runtime.barrier("here")
    with pytest.raises(ZeroDivisionError), runtime.job():
        1 / 0
    assert not runtime.several() and runtime.is_primary() and runtime.agree(3) == 3
    rows = np.arange(6.0).reshape(3, 2)
    assert runtime.gather(rows) is rows and runtime.gather_objects({"a": [1, "x"]}) == [{"a": [1, "x"]}]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = {"a": rows.astype(np.float32), "key": jax.random.key(1)}
    put = runtime.put(tree, sharding)
    np.testing.assert_array_equal(runtime.fetch(put)["a"], tree["a"])


@pytest.mark.parametrize("given", ({"coordinator": "localhost:1"}, {"processes": 2, "process_id": 0}, {"process_id": 1}))
def test_half_an_address_is_refused(given):
    with pytest.raises(ValueError, match="give all three, or none"), runtime.job(**given):
        pass


def test_only_what_starting_again_may_help_counts_as_the_loss_of_a_process():
    lost, full = (jax.errors.JaxRuntimeError(text) for text in ("UNKNOWN: Gloo failed", "RESOURCE_EXHAUSTED: memory"))
    saving = OSError("checkpoint of step 3 was not written")
    saving.__cause__ = lost
    assert runtime._is_loss(lost) and runtime._is_loss(saving)
    assert not runtime._is_loss(full) and not runtime._is_loss(OSError("disk full")) and not runtime._is_loss(ValueError())


def test_processes_that_see_different_things_are_refused(monkeypatch, tmp_path):
    work = workdir.Workdir(lock.at_home(tmp_path), True, {"steps": 3}, [])
    workdir.check_agreement(work)
    monkeypatch.setattr(workdir.parallel, "gather_objects", lambda mine: [mine, {**mine, "checkpoints": [4]}])
    with pytest.raises(ValueError, match="differ in checkpoints: start them"):
        workdir.check_agreement(work)


def test_built_in_rewards_are_scored_in_shares():
    from jaxrl_llm import rewards
    made = [rewards.make(name) for name in ("exact", "numeric", "boxed")] + [
        rewards.make("soft_overlong", max_length=8, cache=4), rewards.make("isolated", target="math:sqrt")]
    assert all(one.by_row for one in made)
    assert not rewards.Reward("mine", lambda *a: 0, per="batch").by_row


@pytest.mark.parametrize("per", ("completion", "batch"))
def test_shares_of_a_batch_make_the_whole(monkeypatch, per):
    """Each row is scored once, rewards of the batch see it whole, and failures are counted once."""
    from jaxrl_llm import parallel, rewards

    seen = []

    def by_row(completion, answer, problem):
        seen.append(completion)
        if completion == "3":
            raise RuntimeError("no number")
        return float(completion)

    def by_batch(completions, answers, problems):
        seen.append(list(completions))
        return np.array([float(x) for x in completions]) / sum(float(x) for x in completions)

    one = rewards.Reward(name="r", fn=by_row if per == "completion" else by_batch, per=per, weight=2.0)
    combined = rewards.combine([one], on_error="zero")
    texts, problems = [str(i) for i in range(7)], [type("P", (), {"answer": ""})()] * 7
    whole = shared_scores(combined, texts, problems, np.ones(7, int))
    seen.clear()
    monkeypatch.setattr(parallel, "several", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 3)

    def run(process, gather, gather_objects):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        monkeypatch.setattr(parallel, "gather", gather)
        monkeypatch.setattr(parallel, "gather_objects", gather_objects)
        return shared_scores(combined, texts, problems, np.ones(7, int))

    sent, reported = [[], [], []], [[], [], []]  # by process
    for process in range(3):
        run(process, lambda rows: sent[process].append(rows) or np.concatenate([rows] * 3),
            lambda value: reported[process].append(value) or [value] * 3)
    assert len(seen) == (7 if per == "completion" else 1)
    arrived = iter([np.concatenate([one[k] for one in sent]) for k in range(2)])
    result = run(1, lambda rows: next(arrived), lambda value: [one[0] for one in reported])
    np.testing.assert_array_equal(result.total, whole.total)
    np.testing.assert_array_equal(result.components, whole.components)
    assert result.failures == whole.failures and result.names == whole.names
