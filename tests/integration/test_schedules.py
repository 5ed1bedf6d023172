"""Schedules: true ages under a lag, equal data whatever runs beside what, resumes bit for bit, refusals."""
import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import chatter
import jax
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm import methods
from jaxrl_llm.learning import schedules
from jaxrl_llm.learning.schedules import pipelined, sync
from jaxrl_llm.models.config import Experts
from jaxrl_llm.parallel.rules import path_name
from jaxrl_llm.recorders.base import texts_of
from jaxrl_llm.runs import loop
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.setup import setup
from jaxrl_llm.store import pending

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"eval.every": 0, "samples_every": 0, "checkpoint.every": 1} | changes)
    return config


def stepped(config, count):
    """A run with its first steps, and the weights after each of them."""
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    running = run.schedule.steps(run.source, run.learner, state, run.learner.frozen(state.params))
    steps, after = [], []
    for step in itertools.islice(running, count):
        steps.append(step)
        after.append([np.array(x) for x in jax.tree.leaves(step.learned.state.params)])  # before the next step consumes them
    return run, steps, after


def versions(step):
    rollouts = step.finished.rollouts
    return set(rollouts.policy_version[rollouts.mask].tolist())


@pytest.fixture(scope="module")
def lagged():
    return {lag: stepped(tiny(schedule=f"pipelined(lag={lag})"), 4) for lag in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("lag", (1, 2))
def test_batch_n_is_sampled_by_the_weights_of_version_n_minus_lag(lagged, lag):
    run, steps, _ = lagged[lag]
    for n, step in enumerate(steps):
        extras = step.learned.rollouts.extras
        assert versions(step) == {max(n - lag, 0)}
        assert set(np.asarray(extras["current_version"]).tolist()) == {n}
        live = np.asarray(step.learned.rollouts.live)
        assert set(np.asarray(extras["age"])[live].tolist()) == {min(n, lag)}
        assert len(step.pending) == lag and step.learned.metrics["clip_fraction"] >= 0
    assert steps[0].learned.metrics["max/ratio"] == pytest.approx(1, abs=1e-4)  # the weights that sampled
    assert steps[-1].learned.metrics["max/ratio"] > 1.001  # ratios to the log-probs of sampling
    assert [one.name for one in run.learner.recorders] == [] and run.learner.as_sampled


@pytest.mark.slow
def test_the_gap_of_sampler_and_learner_is_measured_under_a_lag(lagged):
    """At step 1 only programs differ; later the log-probs are those of sampling and of the weights before the step."""
    run, steps, after = lagged[1]
    assert 0 < steps[0].learned.metrics["max/mismatch"] < 1e-4
    batch, metrics = steps[2].learned.rollouts, steps[2].learned.metrics
    before = jax.tree.unflatten(jax.tree.structure(steps[2].learned.state.params), after[1])
    mask = np.asarray(batch.token_mask)
    now = run.learner.layout.logprobs(before, None, texts_of(batch))[0]
    gap = (np.asarray(batch.behavior_logprobs) - np.asarray(now))[mask]
    assert metrics["mismatch/kl"] == pytest.approx(gap.mean(), abs=1e-6) and np.abs(gap).max() > 1e-3
    assert metrics["max/mismatch"] == pytest.approx(np.abs(gap).max(), rel=1e-4)


@pytest.mark.slow
def test_the_gap_under_a_lag_is_that_of_the_first_update():
    """Further updates of a batch move the weights away from those before the step."""
    _, steps, _ = stepped(tiny(schedule="pipelined(lag=1)", **{"learner.epochs": 3, "optimizer.learning_rate": 0.1,
                                                               "optimizer.warmup_updates": 0}), 1)
    assert 0 < steps[0].learned.metrics["max/mismatch"] < 1e-4 < 0.1 < steps[0].learned.metrics["max/ratio"] - 1


@pytest.mark.slow
def test_what_is_sampled_beside_learning_is_what_is_sampled_before_it(lagged, monkeypatch):
    monkeypatch.setattr(pipelined, "_beside", pipelined._at_once)
    (_, beside, moved), (_, apart, wanted) = lagged[2], stepped(tiny(schedule="pipelined(lag=2)"), 4)
    for one, other in zip(beside, apart, strict=True):
        for x, y in zip(jax.tree.leaves(one.finished.rollouts), jax.tree.leaves(other.finished.rollouts), strict=True):
            np.testing.assert_array_equal(x, y)
    for x, y in zip(moved[-1], wanted[-1], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_lag_by_hand(lagged):
    """Batch 1 under a lag of 1: sampled by the first weights, learned by those after batch 0."""
    run, params = setup.build(tiny(schedule="pipelined(lag=1)"))
    state = setup.initial_state(run, params)
    first = run.source.next(run.learner.publish(state))
    kept = run.learner.publish(state, apart=True)
    learned = run.learner.learn(state, first.rollouts)
    second = run.source.next(kept)  # after its state was consumed
    after = run.learner.learn(learned.state, second.rollouts)
    for x, y in zip(jax.tree.leaves(after.state.params), lagged[1][2][1], strict=True):
        np.testing.assert_array_equal(x, y)


HALVES = {  # with what reads the weights beside the sampler
    "experts, a probe": {"method": "v0_5", "prior.source": "probe", "model.experts": 4, "sampling.max_group": 8},
    "gradient norms": {"method": "gvm_raft", "sampling.group": 2, "sampling.max_group": 8},
    "slots, adapters": {"sampling.engine": "slots", "lora.rank": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HALVES)
def test_copies_in_the_dtype_of_the_sampler_give_the_same_batch(kind):
    """Matrices are copied in bfloat16, as the model casts them; norms and routers stay in float32."""
    found = []
    for apart in (False, True):
        run, params = setup.build(tiny(**HALVES[kind] | {"model.dtype": "bfloat16", "model.num_layers": 1}))
        state = setup.initial_state(run, params)
        params, lora = (jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(1), x.shape), tree)
                        for tree in (state.params, state.lora))  # numbers that bfloat16 does not hold
        snapshot = run.learner.publish(state.replace(params=params, lora=lora), apart)
        found.append(run.source.next(snapshot))
    one, other = found
    assert len(one.metrics) > 5 and one.metrics == other.metrics
    for x, y in zip(jax.tree.leaves((one.rollouts, one.counts)), jax.tree.leaves((other.rollouts, other.counts)), strict=True):
        np.testing.assert_array_equal(x, y)
    for name, facts in one.forest.facts.items():
        np.testing.assert_array_equal(facts, other.forest.facts[name])
    dtypes = {path_name(path): str(leaf.dtype) for path, leaf in jax.tree.leaves_with_path(snapshot.params)}
    whole = {name for name, dtype in dtypes.items() if dtype == "float32"}
    assert {*dtypes.values()} == {"float32", "bfloat16"}
    assert all(name.endswith(("norm/scale", "router/kernel")) for name in whole) and "layers/q/kernel" not in whole
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(snapshot.lora))


READ = ("age", "current_version", "policy_version")
ROWS = [slug for slug, row in methods.METHODS.items() if {*row.needs} & {*READ} or slug.startswith("areal")]


@pytest.mark.slow
@pytest.mark.parametrize("slug", ROWS)
def test_rows_that_read_ages_read_true_ones(slug):
    run, params = setup.build(tiny(method=slug, schedule="pipelined(lag=1)", **{"critic.pretrain_steps": 0}))
    state = setup.initial_state(run, params)
    running = run.schedule.steps(run.source, run.learner, state, run.learner.frozen(state.params))
    for n, step in enumerate(itertools.islice(running, 3)):
        batch = step.learned.rollouts
        oldest = np.where(np.asarray(batch.token_mask), np.asarray(batch.policy_version), n).min(-1)
        age, live = np.asarray(batch.extras["age"]), np.asarray(batch.live)
        np.testing.assert_array_equal(age[live], (n - oldest)[live])
        assert set(age[live & np.asarray(batch.fresh)].tolist()) <= {min(n, 1)}
        assert set(np.asarray(batch.extras["current_version"]).tolist()) == {n}


PROGRAM = """import json, sys; from jaxrl_llm.runs import loop; from jaxrl_llm.setup.config import default_config
config = default_config(); config.update(json.load(open(sys.argv[1])))
loop.train(config, sys.argv[2])"""


def begun(config, workdir):
    """The process of a run in this folder."""
    file = workdir.with_name("config.json")
    file.write_text(config.to_json_best_effort())
    path = os.pathsep.join(map(str, (ROOT, HERE, ROOT / "tests")))
    return subprocess.Popen([sys.executable, "-c", PROGRAM, file, workdir], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            text=True, env=os.environ | {"PYTHONPATH": path})


def check_same(folder, config):
    """The runs `ended` and `whole` of a folder reached the same state, with the same metrics in every step."""
    run_files.assert_same(*(run_files.saved(folder / one, config) for one in ("ended", "whole")))
    ended, whole = ([{k: v for k, v in run_files.repeatable(line).items() if not k.startswith("beside/")}
                     for line in run_files.lines(folder / one)] for one in ("ended", "whole"))
    assert ended == whole and len(whole) == config.steps + 1


DEATHS = {"sampling": ("next", 1, "letters"), "learning": ("learn", 2, "single"), "between": ("step", 2, "letters")}


@pytest.mark.slow
@pytest.mark.parametrize("death", DEATHS)
def test_a_run_that_ends_anywhere_is_resumed_bit_for_bit(death, tmp_path, monkeypatch):
    """Its schedule is one file outside the package; batches wait in its checkpoints."""
    place, lag, kind = DEATHS[death]
    monkeypatch.syspath_prepend(str(HERE))
    changes = {"schedule": f"dying_schedule:dying(mark='{tmp_path}/mark', place='{place}', lag={lag}, count=4)", "steps": 6,
               "eval.every": 6, "checkpoint.every": 2, "samples_every": 1}
    config = tiny(**changes) if kind == "single" else chatter.get_config(**changes)
    ended = begun(config, tmp_path / "ended")
    _, stderr = ended.communicate()
    assert ended.returncode == 9 and (tmp_path / "mark").exists(), stderr[-3000:]
    loop.train(config, tmp_path / "ended", resume=True)
    loop.train(config, tmp_path / "whole")
    check_same(tmp_path, config)
    for page in sorted((tmp_path / "whole/samples").iterdir()):
        assert page.read_text() == (tmp_path / "ended/samples" / page.name).read_text(), page.name


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_is_resumed_bit_for_bit(tmp_path):
    """SIGKILL after a random number of steps and a random time: in sampling, learning, saving or writing."""
    config = tiny(schedule="pipelined(lag=1)", steps=36, **{"checkpoint.every": 3, "model.num_layers": 1})
    when = random.randint(4, 26), random.random() / 20
    print("killed after step and seconds", when)
    program, metrics = begun(config, tmp_path / "ended"), tmp_path / "ended/metrics.jsonl"
    while program.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= when[0]):
        time.sleep(0.002)
    time.sleep(when[1])
    program.send_signal(signal.SIGKILL)
    _, stderr = program.communicate()
    assert program.returncode == -signal.SIGKILL, (when, stderr[-3000:])
    loop.train(config, tmp_path / "ended", resume=True)
    loop.train(config, tmp_path / "whole")
    check_same(tmp_path, config)


@pytest.mark.slow
@pytest.mark.parametrize("error", (OSError("the environment is gone"), KeyboardInterrupt()), ids=("error", "interrupt"))
def test_an_error_of_sampling_beside_a_step_loses_no_step(error, tmp_path, monkeypatch):
    config = tiny(schedule="pipelined(lag=1)", steps=3, **{"checkpoint.every": 3})
    calls, inner = itertools.count(1), Source.next

    def third_fails(source, *given):
        if next(calls) == 3:
            raise error
        return inner(source, *given)

    monkeypatch.setattr(Source, "next", third_fails)
    with pytest.raises(type(error)) as raised:
        loop.train(config, tmp_path)
    assert raised.value.__notes__ == ["step 2 was saved; continue with --resume"]
    assert "third_fails" in [entry.name for entry in raised.traceback]
    loop.train(config, tmp_path, resume=True)
    lines = run_files.lines(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]


def test_a_lag_of_zero_is_sync():
    assert schedules.make("pipelined", lag=0).steps is sync.steps is schedules.make("sync").steps


@pytest.mark.parametrize(("changes", "match"), [
    ({"schedule": "pipelined(lag=-1)"}, "schedule 'pipelined': lag=-1; give 0 or more"),
    ({"schedule": "pipelined(lag=0.5)"}, "lag=0.5; give a whole number"),
    ({"schedule": "pipelined(lag=inf)"}, "lag=inf; give 0 or more, finite"),
    ({"schedule": "pipelined(lag=None)"}, "lag=None; give a number"),
    ({"schedule": "pipelind(lag=1)"}, "Did you mean 'pipelined'"),
    ({"schedule": "pipelined(delay=1)"}, "keyword of schedule 'pipelined' 'delay'"),
    ({"schedule": "sync, pipelined"}, "names 2 schedules"),
    ({"schedule": "pipelined", "method": "rloo"}, "no ratio that corrects for it.*tis_mis.*areal_decoupled_ppo"),
    ({"schedule": "pipelined", "sampling.top_p": 0.9}, "which top_k, top_p and min_p change"),
    ({"schedule": "pipelined", "server.url": "http://127.0.0.1:1", "server.weights": "/tmp"}, "needs the sampler of this"),
])
def test_schedules_that_cannot_be_are_refused_before_the_first_step(changes, match):
    with pytest.raises(ValueError, match=match):
        setup.build(tiny(**changes))


@pytest.mark.slow
def test_batches_that_wait_are_refused_by_a_run_that_cannot_learn_from_them(lagged):
    run, steps, _ = lagged[2]
    stored = [pending.encode(one) for one in steps[-1].pending]
    assert len(pending.restored(stored, run.source, 2)) == len(pending.restored(stored, run.source, 3)) == 2
    for lag in (0, 1):
        with pytest.raises(ValueError, match=rf"2 sampled batches wait in the checkpoint, and config.schedule keeps {lag}; "
                                             r'continue with schedule="pipelined\(lag=2\)"'):
            pending.restored(stored, run.source, lag)
    for changes, numbers in (({"sampling.group": 2}, "2, 6 and 8"), ({"sampling.max_tokens": 4}, "4, 4 and 8")):
        other, _ = setup.build(tiny(**changes))
        with pytest.raises(ValueError, match=f"4 rollouts of a prompt, up to 6 tokens .* up to 8, and this .* {numbers}"):
            pending.restored(stored, other.source, 2)


def test_snapshots_that_cannot_be_are_refused_before_anything_is_sampled():
    run, params = setup.build(tiny())
    state = setup.initial_state(run, params)
    position = run.source.position()
    model = run.learner.policy.model
    wide, deep, experts = (dataclasses.replace(model, config=dataclasses.replace(model.config, **change)).abstract_params()
                           for change in ({"hidden_size": 48}, {"num_layers": 3, "local_layers": (), "rotary_layers": ()},
                                          {"experts": Experts(4, 2, 24)}))
    lost = {name: leaf for name, leaf in params.items() if name != "final_norm"}
    for other, match in ((wide, r"embed is \[259, 48\], and \[259, 32\] in the model that samples"),
                         (deep, r"is \[3, .*\], and \[2, "), (experts, "layers/down/kernel is absent, and .2, 48, 32. in"),
                         (lost, "final_norm/scale is absent, .*; 1 of 11 arrays differ")):
        with pytest.raises(ValueError, match=f"a snapshot of another model: .*{match}"):
            run.source.next(run.learner.publish(state)._replace(params=other))
    used = run.learner.publish(state)
    jax.tree.map(lambda x: x.delete(), state.params)  # as an update does
    with pytest.raises(ValueError, match="weights of version 0 were consumed by the update that began from them"):
        run.source.next(used)
    assert run.source.position() == position


def test_a_learner_of_newest_weights_is_no_part_of_a_lag():
    run, params = setup.build(tiny())
    with pytest.raises(ValueError, match=r"pipelined\(lag=2\): this learner was made for batches of its newest weights"):
        next(schedules.make("pipelined", lag=2).steps(run.source, run.learner, setup.initial_state(run, params)))
