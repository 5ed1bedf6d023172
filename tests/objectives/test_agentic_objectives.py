"""Objectives of trajectories, ranked lists, sibling steps and paired rewards: literal losses, gradients by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, methods, objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists, take
from jaxrl_llm.objectives.step_apo import sibling_pairs


def run(objective, new, rollouts, advantage=None):
    advantage = jnp.zeros(rollouts.mask.shape) if advantage is None else jnp.asarray(advantage, jnp.float32)
    update = jax.value_and_grad(objective.update, has_aux=True)
    (loss, (metrics, _)), gradient = update(jnp.asarray(new, jnp.float32), rollouts, advantage, objective.init())
    return float(loss), metrics, np.asarray(gradient)


# --- multi-context GRPO ---


def conversations():
    return from_lists([[1, 1, 0]], lengths=[[2, 1, 2]], extras={"traj": jnp.array([[0, 0, 1]])},
                      old_logprobs=jnp.zeros((1, 3, 2)))


@pytest.mark.slow
def test_multi_context_worked_example():
    rollouts = conversations()
    values, _ = advantages.make("multi_context_grpo").update(rollouts, ())
    for aggregation, expected in (("token_mean", -0.1414212), ("trajectory_mean", 0.0)):
        objective = objectives.make("multi_context_grpo", aggregation=aggregation)
        loss, _, gradient = run(objective, np.zeros((1, 3, 2)), rollouts, values)
        np.testing.assert_allclose(loss, expected, atol=1e-7)
    share = 0.7071058 / 2
    np.testing.assert_allclose(gradient, [[[-share / 3] * 2, [-share / 3, 0], [share / 2] * 2]], rtol=1e-5)


@pytest.mark.slow
def test_multi_context_trajectories_weigh_the_same_in_micro_batches():
    rng = np.random.default_rng(0)
    rollouts = Rollouts(mask=jnp.asarray(rng.random((2, 4, 3)) < 0.8), valid=jnp.ones((2, 4), bool),
                        ref_logprobs=jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32),
                        old_logprobs=jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32),
                        extras={"traj": jnp.array([[0, 1, 1, 0], [5, 5, 5, 2]])})
    objective = objectives.of("multi_context_grpo(aggregation=trajectory_mean) + kl(0.001)")
    new, values = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4, 1)) * np.ones((2, 4, 3))
    mask, old, ref = (np.asarray(x, np.float64) for x in (rollouts.mask, rollouts.old_logprobs, rollouts.ref_logprobs))
    ratio, d = np.exp(new - old), ref - new
    token = np.maximum(-values * ratio, -values * np.clip(ratio, 0.8, 1.2))
    token = np.where(values < 0, np.minimum(token, -3 * values), token) + 1e-3 * np.minimum(np.exp(d) - d - 1, 10)
    groups = [(0, [0, 3]), (0, [1, 2]), (1, [0, 1, 2]), (1, [3])]
    expected = np.mean([(token * mask)[p, rows].sum() / mask[p, rows].sum() for p, rows in groups])
    loss, _, _ = run(objective, new, rollouts, values)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    whole = rollouts.replace(loss_weights=objective.weights(rollouts))
    parts = [run(objective, new[i : i + 1], take(whole, i, 1), values[i : i + 1])[0] for i in (0, 1)]
    np.testing.assert_allclose(sum(parts), expected, rtol=1e-5)


# --- Rank-GRPO ---

CHANGE = np.array([[[0.1, -0.04, 0, 0.02], [0.2, 0, 0, 0]]])


def ranked(ranks=((0, 0, 1, 1), (0, 1, 1, 1)), eos=((0, 0, 0, 1), (0, 0, 0, 1)), hits=((1, 0), (0, 1))):
    ranks = jnp.asarray(ranks)[None]
    return Rollouts(mask=jnp.ones(ranks.shape, bool), valid=jnp.ones(ranks.shape[:2], bool),
                    old_logprobs=jnp.zeros(ranks.shape), ref_logprobs=jnp.zeros(ranks.shape),
                    extras={"hits": jnp.asarray(hits)[None], "ranks": ranks, "eos": jnp.asarray(eos, bool)[None]})


@pytest.mark.slow
@pytest.mark.parametrize("aggregation, expected", [("token_mean", -0.1868054), ("rank_mean", 0.0355268)])
def test_rank_grpo_worked_example(aggregation, expected):
    rollouts = ranked()
    values, _ = advantages.make("rank_grpo", variant="exp_inf").update(rollouts, ())
    loss, metrics, gradient = run(objectives.make("rank_grpo", aggregation=aggregation), CHANGE, rollouts, values)
    np.testing.assert_allclose(loss, expected, atol=1e-7)
    np.testing.assert_allclose(metrics["max/ratio"], 1.2214028, rtol=1e-6)
    a, first, second = 0.7070068, 1.0304545, 1.0100502
    shares = {"token_mean": [-a * first / 8] * 2 + [(a - 0.1) * second / 2 / 8] * 2,
              "rank_mean": [-a * first / 2 / 2 / 2] * 2 + [a * second / 2 / 2 / 2] * 2}
    np.testing.assert_allclose(gradient[0, 0], shares[aggregation], rtol=1e-5)


def test_rank_grpo_clip_separators_and_surplus_items():
    rollouts = ranked(ranks=((0, -1, 1, 1), (0, 2, 3, 3)), eos=((0, 0, 0, 0), (0, 0, 0, 0)))
    new = np.array([[[0.2, 9, 0, 0], [0, 0.3, 0, 0.3]]])
    loss, metrics, gradient = run(objectives.make("rank_grpo"), new, rollouts, np.ones((1, 2, 4)))
    # ratios e^.2, none, 1, 1 | 1, e^.2 three times, clipped at 1.08; seven tokens count
    np.testing.assert_allclose(loss, -(1.08 * 4 + 3) / 7, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction"], 4 / 8, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[[0, 0, -1 / 7, -1 / 7], [-1 / 7, 0, 0, 0]]], rtol=1e-6)


def test_rank_grpo_pays_for_stopping_before_the_first_item():
    """A single stop token has no rank, but its own ratio and the penalty of -0.1."""
    rollouts = ranked(ranks=((0, 1, 1, 1), (-1, -1, -1, -1)), eos=((0, 0, 0, 1), (1, 0, 0, 0)), hits=((0, 0), (0, 0)))
    rollouts = rollouts.replace(mask=jnp.asarray([[[1, 1, 1, 1], [1, 0, 0, 0]]], bool))
    values, _ = advantages.make("rank_grpo").update(rollouts, ())
    np.testing.assert_allclose(values, [[[0, 0, 0, 0.1], [-0.1, 0, 0, 0]]], atol=1e-7)
    new = np.array([[[0, 0, 0, 0], [0.05, 0, 0, 0]]])
    loss, _, gradient = run(objectives.make("rank_grpo"), new, rollouts, values)
    np.testing.assert_allclose(loss, (-0.1 + 0.1 * np.exp(0.05)) / 5, atol=1e-8)
    np.testing.assert_allclose(gradient[0, 1], [0.1 * np.exp(0.05) / 5, 0, 0, 0], rtol=1e-5)


def test_rank_grpo_kl():
    plain, _, _ = run(objectives.make("rank_grpo"), CHANGE, ranked())
    loss, metrics, _ = run(objectives.of("rank_grpo + kl(0.5)"), CHANGE, ranked())
    k3 = np.mean(np.exp(-CHANGE) + CHANGE - 1)
    np.testing.assert_allclose(metrics["kl"], k3, rtol=1e-4)
    np.testing.assert_allclose(loss - plain, 0.5 * k3, rtol=1e-4)


def test_table_gpt_r1_has_its_bonus_from_step_50_on():
    """The worked example of the method at step 60, and without the bonus at step 49."""
    half = np.log(np.full((1, 2, 2), 0.5, np.float32))
    rollouts = from_lists([[1.2, -0.3]], lengths=[[2, 1]], old_logprobs=half,
                          extras={"current_entropies": jnp.full((1, 2, 2), 0.5)})
    new, A = np.log([[[0.6, 0.5], [0.5, 1.0]]]), np.array([[[0.707106] * 2, [-0.707106] * 2]])
    objective = methods.build("table_gpt_r1")[1]
    losses = [float(objective.update(jnp.asarray(new, jnp.float32), rollouts, jnp.asarray(A, jnp.float32),
                                     objective.init()._replace(updates=jnp.int32(step)))[0]) for step in (49, 50, 60)]
    np.testing.assert_allclose(losses, [-0.033745, -0.034245, -0.034245], atol=1e-6)


# --- Step-APO ---


@pytest.mark.slow
def test_step_apo_worked_example():
    rollouts = from_lists([[0.6, -0.4]], ref_logprobs=jnp.full((1, 2, 1), -11.0), extras={"final": jnp.array([False])})
    new = np.array([[[-10.0], [-12.0]]])
    loss, metrics, gradient = run(objectives.make("step_apo"), new, rollouts)
    np.testing.assert_allclose(loss, 0.9130153, rtol=1e-6)
    slope = 0.3 / (1 + np.exp(-0.4))
    np.testing.assert_allclose(gradient[0, :, 0], [-slope, slope], rtol=1e-5)
    np.testing.assert_allclose(metrics["margin"] / metrics["paired"], 0.6, rtol=1e-5)
    assert metrics["paired"] == 0.5 and metrics["accuracy"] == 0.5
    loss, _, _ = run(objectives.make("step_apo", alpha=0.0), new, rollouts)
    np.testing.assert_allclose(loss, 0.437488, rtol=1e-5)
    loss, _, _ = run(objectives.make("step_apo", label_smoothing=0.1), new, rollouts)
    np.testing.assert_allclose(loss, 0.9 * np.log1p(np.exp(0.4)) + 0.1 * np.log1p(np.exp(-0.4)), rtol=1e-6)


def test_step_apo_pairs():
    values = jnp.array([[0.5, -0.2, -0.7], [0.9, -0.4, 0.3], [0.9, 0.4, 0.3]])
    live = jnp.ones((3, 3), bool)
    pairs = sibling_pairs(values, jnp.array([False, True, True]), live)
    assert np.argwhere(pairs).tolist() == [[0, 0, 1], [0, 0, 2], [1, 0, 1]]
    pairs = sibling_pairs(values, jnp.array([False, True, True]), live.at[:, 0].set(False))
    assert np.argwhere(pairs).tolist() == [[1, 2, 1]]


def test_step_apo_against_loops():
    rng = np.random.default_rng(5)
    p, g, t = 4, 5, 3
    mask, valid = rng.random((p, g, t)) < 0.7, rng.random((p, g)) < 0.8
    q, new, ref = rng.uniform(-1, 1, (p, g)), rng.normal(size=(p, g, t)), rng.normal(size=(p, g, t))
    final = np.array([False, True, False, True])
    losses = []
    for k in range(p):
        d = ((new - ref) * mask).sum(-1)[k]
        live = [i for i in range(g) if valid[k, i] and mask[k, i].any()]
        pairs = [(i, j) for i in live for j in live if q[k, i] > 0 > q[k, j]]
        if final[k] and pairs:
            pairs = [(max(live, key=lambda i: q[k, i]), min(live, key=lambda i: q[k, i]))]
        scale = 0.3 if final[k] else 1.0
        losses += [np.log1p(np.exp(-(0.3 * (d[i] - d[j]) - scale * (q[k, i] - q[k, j])))) for i, j in pairs]
    rollouts = Rollouts(mask=jnp.asarray(mask), valid=jnp.asarray(valid), rewards=jnp.asarray(q, jnp.float32),
                        ref_logprobs=jnp.asarray(ref, jnp.float32), extras={"final": jnp.asarray(final)})
    loss, _, _ = run(objectives.make("step_apo"), new, rollouts)
    assert len(losses) > 4
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


# --- LightningRL ---


def test_lightningrl_worked_example():
    half = np.full((2, 4, 1), np.log(0.5), np.float32)
    extras = {"perf": jnp.array([[2.0, 4, 6, 8], [1, 2, 3, 4]]), "truncated": jnp.zeros((2, 4), bool)}
    rollouts = from_lists([[1, 1, 0, 0], [0, 0, 0, 0]], extras=extras, old_logprobs=half, ref_logprobs=half)
    values, _ = advantages.make("lightningrl").update(rollouts, ())
    loss, metrics, gradient = run(objectives.of("lightningrl + kl(0.01)"), half, rollouts, values)
    np.testing.assert_allclose(loss, 0.0693147, atol=1e-6)
    assert metrics["kl"] == 0
    expected = -np.array([-0.643886, 1.041830, -1.041830, 0.643886]) / 4 - np.array([0.05, 0.05, 0, 0])
    np.testing.assert_allclose(gradient[..., 0], [expected, np.zeros(4)], atol=1e-6)


@pytest.mark.slow
def test_lightningrl_terms_have_their_own_denominators():
    new, old, ref = (np.log(pad_lists([rows], fill=1)) for rows in (
        [[0.6, 0.5], [0.2]], [[0.5, 0.5], [0.4]], [[0.3, 0.5], [0.2]]))
    extras = {"truncated": jnp.array([[False, False]])}
    rollouts = from_lists([[1, 0]], lengths=[[2, 1]], extras=extras, old_logprobs=old, ref_logprobs=ref)
    text = "lightningrl(perf=length, right_coef=0.7) + kl(0.3)"
    loss, _, _ = run(objectives.of(text), new, rollouts, [[[1, 1], [-1, 0]]])
    pg = np.mean([np.mean([-1.2, -1.0]), 0.8])
    kl = (0.3 / 0.6 - np.log(0.3 / 0.6) - 1) / 3
    nll = -(np.log(0.6) + np.log(0.5)) / 2
    np.testing.assert_allclose(loss, pg + 0.3 * kl + 0.7 * nll, rtol=1e-5)
    wrong = rollouts.replace(rewards=jnp.zeros((1, 2)))
    loss, _, gradient = run(objectives.of(text), new, wrong, [[[1, 1], [-1, 0]]])
    assert loss == 0 and not np.any(gradient)


def test_unknown_names_are_refused():
    for slug, hyper in (
        ("multi_context_grpo", {"aggregation": "trajectory"}),
        ("rank_grpo", {"aggregation": "item_mean"}),
        ("lightningrl", {"perf": "tokens"}),
    ):
        with pytest.raises(ValueError, match="Allowed"):
            objectives.make(slug, **hyper)
    with pytest.raises(ValueError, match=r"extras\['final'\]"):
        run(objectives.make("step_apo"), np.zeros((1, 1, 1)), from_lists([[1]], ref_logprobs=jnp.zeros((1, 1, 1))))
