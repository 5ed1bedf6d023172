"""Controllers in runs: a reference that follows the policy, resets when validation stagnates; both over resumes."""
import jax
import numpy as np
import pytest
import run_files
import tiny_config
from run_files import assert_same, lines, repeatable

from jaxrl_llm import control, methods
from jaxrl_llm.control.prorl import prorl
from jaxrl_llm.training import loop, setup

NAMES = {"prorl", "t1"}


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict(changes)
    return config


def test_they_are_runnable_and_adapters_are_refused():
    assert set(methods.runnable()) >= NAMES
    for name in NAMES:
        with pytest.raises(ValueError, match="moves the reference with the policy's weights, which adapters leave"):
            setup.build(tiny(method=name, **{"lora.rank": 2}))


def test_a_reference_that_follows_the_policy():
    """Three steps against the average of the weights by hand; the log-probs recorded are those of the average."""
    run, params = setup.build(tiny(method="t1", **{"optimizer.learning_rate": 3e-2}))
    state, anchor = setup.initial_state(run, params), jax.tree.map(np.asarray, params)
    assert run.learner.frozen(state.params) == {}
    rollouts = run.source.next(state).rollouts
    rewards = np.linspace(-1, 1, rollouts.rewards.size, dtype=np.float32).reshape(rollouts.rewards.shape)
    for _ in range(3):
        before = anchor
        learned = run.learner.learn(state, rollouts.replace(rewards=rewards))
        state = learned.state
        anchor = jax.tree.map(lambda old, new: np.float32(0.99) * old + np.float32(0.01) * new, anchor,
                              jax.device_get(state.params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.control["t1"], anchor)
        expected, _ = run.learner.policy.logprobs(before, None, learned.rollouts)
        seen = np.asarray(learned.rollouts.token_mask)
        np.testing.assert_allclose(np.asarray(learned.rollouts.ref_logprobs)[seen], np.asarray(expected)[seen], atol=1e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), anchor, state.params)
    assert max(jax.tree.leaves(moved)) > 1e-3


def resumed_is_straight(tmp_path, **changes):
    """A run of six steps, and one that stops after three: the same weights and lines. Returns the lines."""
    options = {"checkpoint.every": 3, "eval.every": 1, "optimizer.learning_rate": 3e-2, **changes}
    loop.train(tiny(**options, steps=6), tmp_path / "straight")
    loop.train(tiny(**options, steps=3), tmp_path / "resumed")
    with pytest.warns(RuntimeWarning, match="steps: 3 -> 6"):
        loop.train(tiny(**options, steps=6), tmp_path / "resumed", resume=True)
    found, wanted = (run_files.saved(tmp_path / name, tiny(**options, steps=6)) for name in ("resumed", "straight"))
    assert_same(found, wanted)
    told = [[repeatable(line) for line in lines(tmp_path / name)] for name in ("resumed", "straight")]
    assert told[0] == told[1]
    return told[0]


@pytest.mark.slow
def test_an_anchor_over_a_resume(tmp_path):
    assert not (tmp_path / "straight/reference").exists()
    resumed_is_straight(tmp_path, method="t1")


@pytest.mark.slow
def test_resets_over_a_resume(tmp_path, monkeypatch):
    """A controller that is shown the errors of a policy that learns sees validation fall, and resets soon."""
    patient = prorl(patience=1, drop=0.0)
    shown_errors = patient._replace(observe=lambda state, facts: patient.observe(state, {"score": 1 - facts["score"]}))
    monkeypatch.setitem(control.base.CONTROLLERS, "prorl", lambda **hyper: shown_errors)
    told = resumed_is_straight(tmp_path, method="prorl", objective="kl_coef=0.1")
    resets = [line["step"] for line in told if line.get("control/reset") == 1]
    assert resets and len(resets) < 6
    stored = sorted(int(path.name) for path in (tmp_path / "straight/reference").iterdir() if path.name.isdecimal())
    assert stored == sorted({0, *resets})[-2:]
    for line in told[1:]:  # the step after a reset meets a reference that it equals, at the rate of a first update
        if line["step"] - 1 in resets and "learning_rate" in line:
            assert line["learning_rate"] == told[1]["learning_rate"]
