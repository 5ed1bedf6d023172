"""Gradients of single completions: by an independent computation, in VCPO's runs, and in GVM's allocation of rollouts."""
import dataclasses

import jax
import numpy as np
import optax
import pytest
import tiny_config

from jaxrl_llm import advantages, objectives, topologies
from jaxrl_llm.data.rollouts import from_lists
from jaxrl_llm.learning import gradient_norms
from jaxrl_llm.learning.step import advance
from jaxrl_llm.recorders.base import texts_of
from jaxrl_llm.setup import setup
from jaxrl_llm.topologies.gvm_raft import share_out


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"model.num_layers": 1, **changes})
    return config


@pytest.mark.slow
@pytest.mark.parametrize("rank", (0, pytest.param(2, marks=pytest.mark.slow)))
def test_norms_are_those_of_each_completion_alone(rank):
    """Against the gradient of the whole packed batch with all other completions masked; of adapters too."""
    run, params = setup.build(tiny(method="grpo", **{"lora.rank": rank}))
    state = setup.initial_state(run, params)
    texts = texts_of(run.source.next(run.learner.publish(state)).rollouts)
    if rank:  # adapters begin with a matrix of zeros: away from there
        state = state.replace(lora=jax.tree.map(lambda x: x + 0.01, state.lora))
    result = gradient_norms.make(run.learner.policy)(state.params, state.lora, texts.replace(filled=4))

    def alone(tree, p, g):
        at = state.with_trainable(tree)
        logprobs = run.learner.policy.logprobs(at.params, at.lora, texts.replace(filled=4))[0]
        return logprobs[p, g][texts.mask[p, g]].sum()

    for p, g in ((0, 0), (1, 3), (3, 2)):
        wanted = optax.tree.norm(jax.grad(alone)(state.trainable, p, g), squared=True)
        np.testing.assert_allclose(result[p, g], wanted, rtol=1e-4)
    empty = texts.replace(filled=4, mask=texts.mask & (np.arange(4) != 1)[None, :, None])
    zeroed = gradient_norms.make(run.learner.policy)(state.params, state.lora, empty)
    assert not np.asarray(zeroed)[:, 1].any() and (np.asarray(zeroed)[:, 0] > 0).all()


@pytest.mark.slow
def test_vcpo_records_them_and_scales_its_step():
    run, params = setup.build(tiny(method="vcpo"))
    state = setup.initial_state(run, params)
    before = jax.device_get(state.params)
    learned = run.learner.learn(state, run.source.next(run.learner.publish(state)).rollouts)
    assert (np.asarray(learned.rollouts.extras["score_sq_norms"])[np.asarray(learned.rollouts.valid)] > 0).all()
    assert learned.metrics["step_scale"] == pytest.approx(1, abs=1e-3)  # on-policy
    grads = jax.tree.map(np.ones_like, before)
    moves = []
    for scale in (1.0, 0.25):
        run, params = setup.build(tiny(method="vcpo"))
        state = setup.initial_state(run, params)
        metrics = {"loss": np.float32(1.0), "step_scale": np.float32(scale)}
        new, _ = advance(run.learner.optimizer, None, None, state, grads, metrics, state.objective_state)
        moves.append(jax.tree.map(lambda a, b: np.asarray(a) - b, jax.device_get(new.params), before))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, 0.25 * a, rtol=1e-3, atol=1e-7), *moves)


@pytest.mark.slow
def test_rollouts_are_conserved_and_bounded():
    """Totals equal the given total, or the capacity if it is smaller; the paper's own example has no bounds."""
    p, g = np.float32([0, 0.05, 0.25, 0.6, 1]), np.float32([0, 3, 2, 1.5, 0.4])
    assert share_out(p, g, 40, 40).tolist() == [0, 26, 9, 4, 1]
    assert share_out(p, g, 40, 10).tolist() == [0, 10, 10, 10, 10]  # prompts without a success get none while others have room
    assert share_out(p, g, 45, 10).tolist() == [5, 10, 10, 10, 10] and share_out(p, g, 99, 10).tolist() == [10] * 5
    assert share_out(np.zeros(4), np.zeros(4), 8, 5).tolist() == [2] * 4
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, most = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        total = int(rng.integers(0, 40))
        result = share_out((rng.integers(0, 5, n) / 4).astype(np.float32), rng.gamma(1, size=n).astype(np.float32), total, most)
        assert result.sum() == min(total, most * n) and result.min() >= 0 and result.max() <= most


def test_the_rule_shares_out_whole_groups_once():
    rule = topologies.make_rule("gvm_raft", mean=3.0)
    rewards, valid = np.float32([[0, 0], [1, 0], [1, 1]]), np.ones((3, 2), bool)
    wide = np.pad(rewards, ((0, 0), (0, 6))), np.pad(valid, ((0, 0), (0, 6)))
    result = rule.more(*wide, 2, 8, gradient_norms=np.float32([0, 4, 1]))
    assert result.sum() == 2 * 3 * 2 and (result % 2 == 0).all() and result[1] == 6 and result[0] == 0
    later = wide[1].copy()
    later[1, 2:4] = True
    assert not rule.more(wide[0], later, 2, 8, gradient_norms=np.ones(3, np.float32)).any()
    with pytest.raises(ValueError, match="mean=0.5 pilots a prompt"):
        topologies.make_rule("gvm_raft", mean=0.5)


def test_single_rollouts_after_a_pilot_of_several():
    """The worked example: of 40 rollouts beyond the pilot the hard prompt gets 26; with 100, as many as it may have."""
    rule, counts = topologies.make_rule("gvm_raft", pilot=20), np.array([0, 1, 5, 12, 20])
    rewards = (np.arange(60) < counts[:, None]).astype(np.float32)
    norms = np.float32([0, 3, 2, 1.5, 0.4])
    more = rule.more(rewards, np.broadcast_to(np.arange(60) < 20, (5, 60)), 20, 60, norms)
    assert more.sum() == 5 * 20 and more[0] == 0 and more[1] == 40 and more[2:].tolist() == share_out(
        np.float32([0.25, 0.6, 1]), norms[2:], 60, 40).tolist()
    half = topologies.make_rule("gvm_raft", pilot=20, mean=1.4)
    assert half.more(rewards, np.broadcast_to(np.arange(60) < 20, (5, 60)), 20, 60, norms).tolist() == [0, 26, 9, 4, 1]
    topology = topologies.by_rule(2, group=1, most=9, rule=topologies.make_rule("gvm_raft", pilot=3))
    assert topology.most == 9
    with pytest.raises(ValueError, match="sampling.max_group=6 is no more than 2 x pilot=3; raise one"):
        setup.build(tiny(method="gvm_raft", allocation="pilot=3", **{"sampling.group": 1, "sampling.max_group": 6}))


def test_the_loss_weighs_prompts_alike_and_learns_from_right_rollouts():
    """Two right of three, one of three, none: by hand, -log p has the weights 1/4, 1/4 and 1/2."""
    rollouts = from_lists([[1, 0, 1], [1, 0, 0], [0, 0, 0]], [[1, 1, 2], [1, 1, 1], [1, 1, 1]])
    values, _ = advantages.make("gvm_raft").update(rollouts, ())
    np.testing.assert_allclose(values[..., 0], [[2.25, 0, 2.25], [4.5, 0, 0], [0, 0, 0]])
    made, old = objectives.make("ppo_clip", clip_high=0.3, aggregation="seq_mean_token_sum"), np.zeros((3, 3, 2), np.float32)
    rollouts = rollouts.replace(old_logprobs=old)
    loss, gradient = jax.value_and_grad(lambda lp: made.update(lp, rollouts, values, made.init())[0])(old)
    np.testing.assert_allclose(loss, -(0.25 + 0.5 + 0.5), rtol=1e-6)
    np.testing.assert_allclose(gradient[..., 0], [[-0.25, 0, -0.25], [-0.5, 0, 0], [0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(gradient[..., 1], [[0, 0, -0.25], [0, 0, 0], [0, 0, 0]], rtol=1e-6)
    empty, _ = advantages.make("gvm_raft").update(from_lists([[0, 0]]), ())
    assert not np.any(empty)


@pytest.mark.slow
@pytest.mark.parametrize("method, changes", [
    ("gvm_raft", {"sampling.group": 1, "sampling.max_group": 9, "allocation": "pilot=3"}),
    ("gvm_raft_pp", {"sampling.group": 2, "sampling.max_group": 8})])
def test_three_steps_by_name(method, changes):
    """Single rollouts after a pilot of three groups of one, and rejection sampling: the totals are two pilots per prompt."""
    run, params = setup.build(tiny(method=method, **changes))
    state, before, pilot = setup.initial_state(run, params), jax.device_get(params), 3 if method == "gvm_raft" else 2
    for number in range(3):
        finished = run.source.next(run.learner.publish(state))
        size = np.bincount(finished.forest.prompt[finished.forest.ends])
        assert size.sum() == 2 * 4 * pilot and (size >= pilot).all() and (finished.forest.facts["gradient_norms"] >= 0).all()
        learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
        assert all(np.isfinite(value) for value in (finished.metrics | learned.metrics).values())
        state = learned.state
        assert int(state.step) == number + 1
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), before, jax.device_get(state.params))
    assert max(jax.tree.leaves(moved)) > 0


@pytest.mark.slow
def test_a_run_measures_its_pilot_and_fills_the_batch():
    """The fact is the mean norm of right completions, and 0 without a right one; the total is two groups per prompt."""
    run, params = setup.build(tiny(method="gvm_raft", **{"sampling.group": 2, "sampling.max_group": 8}))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    forest = finished.forest
    size = np.bincount(forest.prompt[forest.ends])
    norms = forest.facts["gradient_norms"]
    rollouts = run.source.view(forest, 0)
    pilot = texts_of(rollouts).replace(filled=4)
    pilot = dataclasses.replace(pilot, **{name: getattr(pilot, name)[:, :2] for name in ("mask", "valid", "tokens")})
    square = np.asarray(gradient_norms.make(run.learner.policy)(state.params, None, pilot))
    right = rollouts.rewards[:, :2] > 0.5
    wanted = np.sum(np.sqrt(square), axis=1, where=right) / np.maximum(right.sum(1), 1)
    np.testing.assert_allclose(norms, wanted, rtol=1e-4)
    assert size.sum() == 2 * 4 * 2 and (size >= 2).all() and right.any() and not norms[~right.any(1)].any()
    learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
    assert np.isfinite(learned.metrics["loss"]) and learned.metrics["grad_norm"] > 0
