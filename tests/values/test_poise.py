"""The rule of POISE: worked examples, unbiasedness by enumeration, the inputs of a baseline, the first batches."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, values
from jaxrl_llm.data.rollouts import from_lists
from jaxrl_llm.values import diagnostics
from jaxrl_llm.values.poise import cross_rollout

F = 9  # two states of width 3 and three entropies


@functools.lru_cache
def make(**hyper):
    small = {"feature_size": F, "capacity": 64, "bootstrap": 2, "first_fit": 2, "alpha": 1.0}
    result = advantages.make("poise", **{**small, **hyper})
    return result._replace(update=jax.jit(result.update))


def batch(seed, prompts=6, group=2, valid=None, slope=1.0):
    """Rewards that depend on the features."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(prompts, group, F)).astype(np.float32)
    chance = 1 / (1 + np.exp(-2 * slope * features[..., :1].mean(1)))
    rewards = (rng.random((prompts, group)) < chance).astype(np.float32)
    rollouts = from_lists(rewards.tolist(), features=features)
    return rollouts if valid is None else rollouts.replace(valid=jnp.asarray(valid))


def run(estimator, seeds, **options):
    """The state after batches with these seeds."""
    state = estimator.init()
    for seed in seeds:
        _, state = estimator.update(batch(seed, **options), state)
    return state


@pytest.mark.parametrize("g, r, b, a, y", [
    ((.7, .4), (1, 0), (.4, .7), (.6, -.7), (0, 1)),
    ((.8, .4, .6, .2), (1, 0, 1, 0), (.4, .533333, .466667, .6), (.6, -.533333, .533333, -.6),
     (.333333, .666667, .333333, .666667))])
def test_cross_rollout_baselines_and_labels(g, r, b, a, y):
    g, r = jnp.array([g]), jnp.array([r], jnp.float32)
    valid = jnp.ones(g.shape, bool)
    np.testing.assert_allclose(cross_rollout(g, valid), [b], atol=6e-7)
    np.testing.assert_allclose(r - cross_rollout(g, valid), [a], atol=6e-7)
    np.testing.assert_allclose(cross_rollout(r, valid), [y], atol=6e-7)


def test_invalid_rollouts_take_no_part_in_a_baseline():
    g, valid = jnp.array([[.7, .4, 9.0], [.5, 9.0, 9.0]]), jnp.array([[True, True, False], [True, False, False]])
    np.testing.assert_allclose(cross_rollout(g, valid), [[.4, .7, 0], [0, 0, 0]], atol=1e-6)


def with_probe(estimator, weights, intercept, steps=16):
    """A state whose probe is the given line."""
    (state,) = estimator.init()
    scaler, params = state.probe
    params = {"weights": jnp.asarray(weights, jnp.float32), "intercept": jnp.float32(intercept)}
    return (state.replace(probe=(scaler, params), steps=jnp.int32(steps)),)


@pytest.mark.slow
def test_the_gradient_is_unbiased_by_enumeration():
    """One Bernoulli token, P(a = 1) = .3, r = a, g = .2 + .5 a, score a - .3: the true gradient is .3 * .7 = .21."""
    outcomes = np.array([(a, b) for a in (0, 1) for b in (0, 1)], np.float32)
    chance = np.prod(np.where(outcomes == 1, .3, .7), axis=1)
    rollouts = from_lists(outcomes.tolist(), features=np.stack([0 * outcomes, outcomes, *3 * [0 * outcomes]], axis=-1))
    estimator = advantages.make("poise", feature_size=5, capacity=8)
    result, _ = estimator.update(rollouts, with_probe(estimator, [0, .5, 0, 0, 0], .2))
    score = outcomes - .3
    np.testing.assert_allclose(chance @ (result[..., 0] * score).mean(1), .21, atol=1e-7)
    own = outcomes - (.2 + .5 * outcomes)  # the mistake: a baseline from the rollout's own features
    np.testing.assert_allclose(chance @ (own * score).mean(1), .105, atol=1e-7)


def test_starts_with_the_mean_of_the_others():
    estimator, rloo = make(bootstrap=3), advantages.make("rloo")
    state = estimator.init()
    for seed in range(5):
        rollouts = batch(seed)
        result, state = estimator.update(rollouts, state)
        wanted, _ = rloo.update(rollouts, ())
        assert np.allclose(result, wanted) == (seed < 3)
    assert int(state[0].steps) == 5


def test_no_fit_before_its_time():
    estimator = make(bootstrap=0, first_fit=4)
    state = run(estimator, range(3))
    assert not np.any(state[0].probe[1]["weights"]) and int(state[0].buffer.real.sum()) == 36
    rollouts = batch(9)
    result, state = estimator.update(rollouts, state)
    np.testing.assert_allclose(result, advantages.make("rloo").update(rollouts, ())[0], atol=1e-6)  # nothing is fitted yet
    assert np.any(state[0].probe[1]["weights"])


def test_a_batch_is_judged_by_the_probe_of_earlier_batches():
    estimator, model = make(), values.poise(feature_size=F, capacity=64, first_fit=2, alpha=1.0)
    state, rollouts = run(estimator, range(5)), batch(7)
    predicted = model.predict(state[0], rollouts.features)
    result, after = estimator.update(rollouts, state)
    np.testing.assert_allclose(result[..., 0], rollouts.rewards - predicted[:, ::-1], atol=1e-6)
    # The other order of events gives something else, so the line above would see it:
    leaked = rollouts.rewards - model.predict(after[0], rollouts.features)[:, ::-1]
    assert np.abs(leaked - result[..., 0]).max() > 0.03


def test_rewards_and_features_reach_only_the_baselines_they_may():
    estimator = make()
    state, rollouts = run(estimator, range(5), group=3), batch(7, group=3)
    result = np.asarray(estimator.update(rollouts, state)[0])[..., 0]
    rewards = rollouts.rewards.at[0, 1].set(1 - rollouts.rewards[0, 1])
    changed = np.asarray(estimator.update(rollouts.replace(rewards=rewards), state)[0])[..., 0] != result
    assert changed[0, 1] and changed.sum() == 1  # the reward of a rollout: its own advantage, no baseline
    features = rollouts.features.at[0, 1].add(1.0)
    changed = np.abs(np.asarray(estimator.update(rollouts.replace(features=features), state)[0])[..., 0] - result) > 1e-5
    assert changed[0].tolist() == [True, False, True] and not changed[1:].any()  # its features: the others' baselines


def test_labels_are_the_rewards_of_the_others_and_groups_without_others_teach_nothing():
    valid = np.ones((6, 3), bool)
    valid[0, 2], valid[1, 1:], valid[2] = False, False, False
    rollouts = batch(0, group=3, valid=valid)
    estimator = make()
    result, (state,) = estimator.update(rollouts, estimator.init())
    r, rows = np.asarray(rollouts.rewards), state.buffer.rows
    assert int(state.buffer.real.sum()) == 2 + 3 * 3
    assert rows["label"][:2].tolist() == [r[0, 1], r[0, 0]]
    np.testing.assert_allclose(rows["label"][2:5], (r[3].sum() - r[3]) / 2, atol=1e-6)
    np.testing.assert_array_equal(rows["features"][2], rollouts.features[3, 0])
    assert not np.any(result[1:3])
    lonely = estimator.update(batch(0, group=1), estimator.init())
    assert not np.any(lonely[0]) and int(lonely[1][0].steps) == 0


def test_padding_changes_nothing_once_the_probe_is_in_use():
    estimator = make()
    state, rollouts = run(estimator, range(4), group=3), batch(7, group=3)
    result, after = estimator.update(rollouts, state)
    def grow(x):
        return np.pad(x, [(0, 2), (0, 1)] + [(0, 0)] * (x.ndim - 2),
                                constant_values=np.nan if x.dtype.kind == "f" else 0)
    padded, padded_after = estimator.update(jax.tree.map(lambda x: jnp.asarray(grow(np.asarray(x))), rollouts), state)
    np.testing.assert_allclose(padded[:6, :3], result, atol=2e-5)
    assert not np.any(padded[6:]) and not np.any(padded[:, 3:])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), padded_after, after)


def test_prompts_in_another_order():
    estimator = make()
    state, rollouts = run(estimator, range(4), group=3), batch(7, group=3)
    order = np.array([3, 0, 5, 1, 2, 4])
    result, after = estimator.update(rollouts, state)
    moved, moved_after = estimator.update(jax.tree.map(lambda x: x[order], rollouts), state)
    np.testing.assert_allclose(moved, result[order], atol=1e-6)
    np.testing.assert_allclose(moved_after[0].probe[1]["weights"], after[0].probe[1]["weights"], atol=1e-4)


def test_each_domain_has_its_own_probe():
    estimator, state = make(domains=2, alpha=5.0), make(domains=2).init()
    for seed in range(8):  # in domain 1 the same feature means the opposite
        one, two = batch(seed, prompts=8), batch(100 + seed, prompts=8, slope=-1.0)
        both = jax.tree.map(lambda *x: jnp.concatenate(x), one, two)
        both = both.replace(extras={"task": jnp.repeat(jnp.arange(2), 8)})
        _, state = estimator.update(both, state)
    weights = [np.asarray(one.probe[1]["weights"])[0] for one in state]
    assert weights[0] > 0.05 and weights[1] < -0.05
    with pytest.raises(ValueError, match="extras\\['task'\\]"):
        estimator.update(batch(0), state)


@pytest.mark.slow
def test_metrics_of_a_batch():
    estimator = make()
    state, rollouts = run(estimator, range(5), prompts=16), batch(7, prompts=16)
    result, _ = estimator.update(rollouts, state)
    measured = estimator.metrics(rollouts, result, state)
    model = values.poise(feature_size=F, capacity=64, alpha=1.0)
    g, r = (np.asarray(x, np.float64) for x in (model.predict(state[0], rollouts.features), rollouts.rewards))
    y = r[:, ::-1]
    wanted = {"mae": np.abs(g - y).mean(), "rmse": ((g - y) ** 2).mean() ** .5, "bias": (g - y).mean(),
              "pearson": np.corrcoef(g.ravel(), y.ravel())[0, 1], "brier_skill": 1 - ((g - y) ** 2).mean() / y.var(),
              "variance_reduction": 1 - (r - g[:, ::-1]).var() / r.var(), "rows": 64,
              "pair_accuracy": np.mean([(a > b) + .5 * (a == b) for a, s in zip(g.ravel(), y.ravel()) if s == 1
                                        for b, t in zip(g.ravel(), y.ravel()) if t == 0])}
    assert measured.keys() == {f"value/{name}" for name in wanted} | {"bootstrap"} and measured["bootstrap"] == 0
    for name, value in wanted.items():
        np.testing.assert_allclose(measured[f"value/{name}"], value, atol=1e-5, err_msg=name)
    early = estimator.metrics(rollouts, result, estimator.init())
    assert early["bootstrap"] == 1 and np.isnan(early["value/mae"]) and np.isfinite(early["value/variance_reduction"])


def test_the_history_has_predictions_from_before_the_rewards():
    estimator, model = make(), values.poise(feature_size=F, capacity=64, first_fit=2, alpha=1.0)
    state = run(estimator, range(4))
    rollouts = batch(7)
    predicted, actual, group, real = estimator.history(estimator.update(rollouts, state)[1])
    assert int(real.sum()) == 3 * 12  # the first two batches came before the first fit
    last = slice(48, 60)
    np.testing.assert_allclose(predicted[last], model.predict(state[0], rollouts.features).ravel(), atol=1e-6)
    np.testing.assert_array_equal(actual[last], rollouts.rewards[:, ::-1].ravel())
    assert group[last].tolist() == np.repeat(range(24, 30), 2).tolist()


def test_quality_of_constants_and_of_nothing():
    real = np.array([True, True, False])
    result = diagnostics.quality(jnp.array([.5, .5, .9]), jnp.array([1.0, 0.0, 5.0]), real)
    wanted = {"mae": .5, "rmse": .5, "bias": 0, "pearson": 0, "brier_skill": 0, "pair_accuracy": .5}
    assert {name: float(x) for name, x in result.items()} == pytest.approx(wanted)
    nothing = diagnostics.quality(jnp.zeros(3), jnp.zeros(3), np.zeros(3, bool))
    assert all(np.isfinite(x) for x in nothing.values()) and nothing["pair_accuracy"] == .5


def test_labels_that_are_equal_up_to_rounding_are_ties():
    """Means of the others in groups of 4: 1/3 by two ways, 2/3 and 0. Of the pairs that differ, 3 of 5 are ordered alike."""
    third = np.float32(1) - np.float32(2) / np.float32(3)
    labels = jnp.array([np.float32(1) / np.float32(3), third, 2 / 3, 0], jnp.float32)
    assert labels[0] != labels[1], "the labels of this test differ by rounding"
    predicted = jnp.array([0.7, 0.3, 0.5, 0.3 + 3e-8], jnp.float32)  # (0, 2) wrong, (1, 2), (0, 3), (2, 3) right, (1, 3) a tie
    accuracy = diagnostics.pair_accuracy(predicted, labels, jnp.ones(4, bool))
    assert float(accuracy) == pytest.approx((3 + 0.5) / 5)


def test_calibration_in_equal_bins():
    predicted, actual = np.repeat([.2, .8], 50), np.concatenate([np.arange(50) < 20, np.arange(50) < 40]).astype(float)
    rows = diagnostics.reliability(predicted, actual, bins=2)
    result = [(row["predicted"], row["actual"], row["count"]) for row in rows]
    assert result == [(pytest.approx(.2), .4, 50), (pytest.approx(.8), .8, 50)]
    assert diagnostics.calibration_error(predicted, actual, bins=2) == pytest.approx(.1)
    assert diagnostics.reliability([], []) == [] and diagnostics.calibration_error([], []) == 0


def test_mistakes_are_explained():
    for hyper, words in ((dict(feature_size=8), "2 D \\+ 3"), (dict(domains=0), "domains=0"),
                         (dict(first_fit=0), "first_fit=0"), (dict(probe="rdge"), "Did you mean 'ridge'")):
        with pytest.raises(ValueError, match=words):
            make(**hyper)
    with pytest.raises(ValueError, match="features"):
        make().update(from_lists([[1, 0]]), make().init())
