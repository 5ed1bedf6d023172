"""Runs with other optimisers than AdamW: interrupted and resumed runs equal uninterrupted ones, wherever the state is."""
import jax
import numpy as np
import pytest
import run_files
import tiny_config
from run_files import assert_same, lines, repeatable

from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup
from jaxrl_llm.store import checkpoints
from jaxrl_llm.store.checkpoints import Checkpoints

RATES = {"adamw": 3e-3, "muon": 3e-3, "sgd": 0.3, "adafactor": 3e-2, "own_optimizers:steady": 0.3}


def config(name, offload="", **changes):
    c = tiny_config.get_config()
    c.update_from_flattened_dict({
        "optimizer.name": name, "optimizer.learning_rate": RATES[name], "learner.offload": offload, "steps": 4, "eval.every": 0,
        "checkpoint.every": 1, "checkpoint.keep": 5, "samples_every": 0, "learner.minibatches": 2, **changes})
    return c


@pytest.fixture(scope="module", params=RATES)
def straight(request, tmp_path_factory):
    """The name of an optimiser and the folder of its run of four steps."""
    workdir = tmp_path_factory.mktemp(request.param.replace(":", "_"))
    loop.train(config(request.param), workdir)
    return request.param, workdir


class Broken(RuntimeError):
    """Ends a run in the middle of a step."""


def break_off(monkeypatch, workdir, step, name, offload):
    """Ends a run during the step after the saved step; returns the memory kinds of the saved states."""
    kinds, save, learn = set(), Checkpoints.save, Learner.learn

    def watched(self, number, state, host=None):
        kinds.update(leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state))
        return save(self, number, state, host)

    def broken(learner, state, *others):
        if int(state.step) == step:
            raise Broken
        return learn(learner, state, *others)

    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(Checkpoints, "save", watched)
        patch.setattr(Learner, "learn", broken)
        loop.train(config(name, offload), workdir)
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize("offload", ("", "optimizer"), ids=("near", "away"))
def test_a_run_broken_off_in_a_step_resumes_bit_for_bit(straight, tmp_path, monkeypatch, offload):
    name, workdir = straight
    kinds = break_off(monkeypatch, tmp_path, 2, name, offload)
    assert kinds == {"pinned_host" if offload else "device"}
    moved = []
    monkeypatch.setattr(loop.offload, "moments_near", lambda c, state, near=loop.offload.moments_near: (
        moved.append(int(state.step)), near(c, state))[1])
    loop.train(config(name, offload), tmp_path, True)
    assert moved == [2, 3]  # for the two steps, and not for saves
    assert_same(run_files.saved(tmp_path, config(name)), run_files.saved(workdir, config(name)))
    assert [repeatable(line) for line in lines(tmp_path)] == [repeatable(line) for line in lines(workdir)]


@pytest.mark.slow
def test_every_optimiser_moves_the_weights_and_reports_its_rate(straight):
    name, workdir = straight
    first, last = (run_files.saved(workdir, config(name), step) for step in (0, 4))
    for leaf in first:
        if leaf.startswith(".params"):
            assert np.isfinite(last[leaf]).all() and (last[leaf] != first[leaf]).any(), leaf
    result = lines(workdir)
    if ":" in name:  # it counts no updates, so it has no schedule
        assert all("learning_rate" not in line for line in result)
    else:  # two updates a step; the first has half of the rate
        assert [line["learning_rate"] for line in result[1:]] == pytest.approx([RATES[name]] * 4)
    assert all(("adam_noise" in line) == (name == "adamw") for line in result[1:])


@pytest.mark.slow
def test_a_damaged_moment_on_the_host_is_detected(straight, tmp_path):
    """The checksum of a state on the host equals that of the same numbers on a device."""
    name, workdir = straight
    run, params = setup.build(config(name, "optimizer"))
    target = loop.offload.moments_away(run.learner.offload, setup.initial_state(run, params))
    with Checkpoints(workdir / "checkpoints", read_only=True) as store:
        result = store.restore(target).state
    arrays = checkpoints._to_storage(result.opt_state)
    assert all(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(arrays))
    near = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), arrays)
    sums = checkpoints.checksums(arrays)
    assert sums == checkpoints.checksums(near)
    largest = max(jax.tree.leaves(arrays), key=lambda x: x.size)
    flipped = np.array(largest)
    flipped.view(np.uint32).flat[flipped.size // 2] ^= 1
    changed = jax.tree.map(lambda x: jax.device_put(flipped, x.sharding) if x is largest else x, arrays)
    assert sum(sums[key] != value for key, value in checkpoints.checksums(changed).items()) == 1
