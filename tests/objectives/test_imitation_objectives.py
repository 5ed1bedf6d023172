"""Objectives of self-imitation: literal numbers and float64 loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from mixed_batches import check, close, one_group, random_batch, run, to_rollouts, tokens

from jaxrl_llm import advantages
from jaxrl_llm.objectives.sil import value_loss

# ---- self-imitation

RETURNS, VALUES, WEIGHTS = (np.float32(x).reshape(1, 3, 1) for x in ([1, 0.2, 2], [0.4, 0.5, 0.3], [1, 1, 0.5]))


def test_sil_worked_example():
    extras = {"returns": RETURNS, "values": VALUES, "replay_weights": WEIGHTS}
    rollouts = one_group(np.ones((3, 1)), extras=extras)
    values, _ = advantages.make("sil").update(rollouts, ())
    close(values[0, :, 0], [0.6, 0, 1], atol=1e-6)
    policy, _, gradient = run("sil", np.float32([[[-1], [-2], [-7]]]), rollouts, values, min_count=2)
    close(policy, 1.55, atol=1e-6)
    close(gradient[0, :, 0], [-0.3, 0, -0.25], atol=1e-6)  # the third beyond the bound of 5: its gradient passes
    arrays = map(jnp.asarray, (VALUES, RETURNS, WEIGHTS))
    critic, slope = jax.value_and_grad(value_loss)(*arrays, rollouts.mask, min_count=2)
    close(critic, -0.000975, atol=1e-8)
    close(slope[0, :, 0], [-0.0015, 0, -0.00125], atol=1e-8)
    close(policy - 0.01 * (0.5 + 0.5 * 0.5) / 2 + critic, 1.545275, atol=1e-6)
    none = rollouts.replace(extras=extras | {"values": RETURNS + 1})
    assert run("sil", np.float32([[[-1], [-2], [-7]]]), none, advantages.make("sil").update(none, ())[0])[0] == 0


def test_sil_against_numpy(double):
    b = random_batch(7, P=3, T=5)
    returns, values, weights = (b["rng"].uniform(0, 1.5, b["mask"].shape) for _ in range(3))
    count = sum(returns[i] > values[i] for i in tokens(b))
    assert count > 3
    b["advantage"] = np.clip(returns - values, 0, 1)

    def each(new):
        loss, gradient = 0.0, np.zeros_like(new)
        for i in tokens(b):
            share = weights[i] * b["advantage"][i] / count
            loss += share * min(-new[i], 0.5)
            gradient[i] = -share
        return loss, gradient

    rollouts = to_rollouts(b, returns=returns, values=values, replay_weights=weights)
    check("sil", b, rollouts, lambda x: each(x)[0], lambda x: each(x)[1], min_count=3, max_nlp=0.5)


UNCUT = {"fraction": 0.0, "clip_high": 0.2, "aggregation": "token_mean"}  # of the row `spear`
SPEAR = one_group([[0.5]] * 3, (1, 1, 0), extras={"age": np.array([[5, 20, 1]]), "reward_baseline": np.float32([0.4])})


def spear_at(step, new, rollouts=SPEAR, **hyper):
    """The update of that step of a run, with its own advantages."""
    values, _ = advantages.make("spear").update(rollouts, ())
    stamps = {"current_version": np.full(len(rollouts.valid), step, np.int32)}
    return run("spear_clip", new, rollouts.replace(extras=rollouts.extras | stamps), values, **UNCUT | hyper)


def test_spear_worked_example():
    values, _ = advantages.make("spear").update(SPEAR, ())
    close(values[0, :, 0], [0.6, 0.6, -0.4], atol=1e-6)
    new = np.full((1, 3, 1), np.log(0.6), np.float32)
    loss, metrics, _ = spear_at(100, new)
    close(loss, -0.36, atol=1e-6)  # the ratio 1.2 is on the bound itself, where the gradient jumps
    close(metrics["kept_fraction"], 1 / 3, rtol=1e-6)
    inside = spear_at(100, new, clip_high=0.3)
    close([inside[0], *inside[2][0, :, 0]], [-0.36, -0.36, 0, 0], atol=1e-6)
    for step, coef in ((0, 0), (50, 0.1464466), (150, 0.8535534), (999, 1)):
        close(spear_at(step, new)[0], -0.72 * coef, atol=1e-6)
    assert spear_at(200, new, max_age=4)[0] == 0


def test_a_reward_equal_to_the_baseline_still_counts():
    """It has advantage 0 and no gradient, but its token is one of two in the mean."""
    rollouts = SPEAR.replace(extras={"age": np.array([[5, 20, 1]]), "reward_baseline": np.float32([0.0])})
    loss, metrics, _ = spear_at(200, np.full((1, 3, 1), np.log(0.6), np.float32), rollouts)
    close([loss, metrics["kept_fraction"]], [-1.2 / 2, 2 / 3], atol=1e-6)


def test_spear_is_ppo_on_what_is_kept(double):
    b = random_batch(8)
    age, base = b["rng"].integers(0, 20, b["valid"].shape), b["rng"].choice([0.3, 1.0], len(b["valid"]))
    kept = b["valid"] & (age <= 10) & (b["rewards"] >= base[:, None])
    assert 0 < kept.sum() < b["valid"].sum()
    rollouts = to_rollouts(b, age=age, reward_baseline=base, current_version=np.full(len(base), 300))
    loss, _, gradient = run("spear_clip", b["new"], rollouts, b["advantage"], coef=0.5, **UNCUT)
    ppo = run("ppo_clip", b["new"], rollouts.replace(valid=jnp.asarray(kept)), b["advantage"])
    close(loss, 0.5 * ppo[0], rtol=1e-12)
    close(gradient, 0.5 * ppo[2], rtol=1e-12, atol=1e-15)
