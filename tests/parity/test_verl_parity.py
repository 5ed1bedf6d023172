"""The same numbers as verl's public functions, where verl is installed; rewards, losses and gradients in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.advantages.ppo_gae import value_targets
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives import kl

torch = pytest.importorskip("torch")
verl = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)

P, G, T = 3, 4, 6
AGGREGATIONS = {"token_mean": "token-mean", "seq_mean_token_sum": "seq-mean-token-sum",
                "seq_mean_token_mean": "seq-mean-token-mean"}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G, 1))
    old = -rng.gamma(1.0, size=(P, G, T))
    return {"mask": mask, "old": old, "new": old + 0.4 * rng.normal(size=old.shape), "ref": old + 0.1,
            "rewards": rng.choice([0.0, 0.5, 1.0], (P, G)), "advantages": np.repeat(rng.normal(size=(P, G, 1)), T, -1)}


def rollouts(data):
    return Rollouts(mask=jnp.asarray(data["mask"]), valid=jnp.ones((P, G), bool), rewards=jnp.asarray(data["rewards"]),
                    old_logprobs=jnp.asarray(data["old"]), ref_logprobs=jnp.asarray(data["ref"]))


def rows(x):
    """[P, G, T] as verl's [batch, T]."""
    return torch.tensor(np.asarray(x, np.float64).reshape(P * G, T))


@pytest.mark.parametrize("slug, function, options", [
    ("grpo", "compute_grpo_outcome_advantage", {}),
    ("dr_grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
    ("rloo", "compute_rloo_outcome_advantage", {}), ("opo", "compute_opo_outcome_advantage", {})])
def test_advantages(data, slug, function, options):
    token_rewards = np.zeros((P, G, T))
    token_rewards[..., 0] = data["rewards"]
    index = np.repeat(np.arange(P), G)
    theirs, _ = getattr(verl, function)(rows(token_rewards), rows(data["mask"]), index, **options)
    ours, _ = advantages.make(slug).update(rollouts(data), ())
    np.testing.assert_allclose(np.asarray(ours).reshape(P * G, T), theirs.numpy(), rtol=1e-9, atol=1e-12)


@pytest.fixture
def turns(data):
    """The same with tool output inside the completions: rewards lie on the last counting token."""
    data["mask"] &= np.random.default_rng(1).random((P, G, T)) < 0.7
    data["mask"][..., 0] = True
    last = np.asarray(masked.last_token(jnp.asarray(data["mask"])))
    return data | {"token_rewards": np.where(last, data["rewards"][..., None], 0)}


@pytest.mark.parametrize("variant, function, gamma", [
    ("rfpp", "compute_reinforce_plus_plus_outcome_advantage", 1.0),
    ("rfpp", "compute_reinforce_plus_plus_outcome_advantage", 0.9),
    ("rfpp_baseline", "compute_reinforce_plus_plus_baseline_outcome_advantage", 1.0)])
def test_reinforce_plus_plus(turns, variant, function, gamma):
    from verl.trainer.config import AlgoConfig

    rest = {"index": np.repeat(np.arange(P), G)} if variant == "rfpp_baseline" else {}
    theirs, _ = getattr(verl, function)(
        rows(turns["token_rewards"]), rows(turns["mask"]), config=AlgoConfig(gamma=gamma), **rest)
    ours, _ = advantages.reinforce(variant=variant, gamma=gamma).update(rollouts(turns), ())
    np.testing.assert_allclose(np.asarray(ours).reshape(P * G, T), theirs.numpy(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0)])
def test_gae_and_value_targets(turns, gamma, lam):
    values = np.random.default_rng(2).normal(size=(P, G, T))
    arrays = rows(turns["token_rewards"]), rows(values), rows(turns["mask"])
    theirs, targets = verl.compute_gae_advantage_return(*arrays, gamma, lam)
    batch = rollouts(turns).replace(extras={"values": jnp.asarray(values)})
    ours, _ = advantages.make("ppo_gae", gamma=gamma, lambda_policy=lam).update(batch, ())
    mask = turns["mask"].reshape(P * G, T)  # verl leaves numbers outside the mask
    np.testing.assert_allclose(np.asarray(ours).reshape(P * G, T)[mask], theirs.numpy()[mask], rtol=1e-7, atol=1e-9)
    fitted = np.asarray(value_targets(batch, gamma=gamma, lambda_critic=lam)).reshape(P * G, T)
    np.testing.assert_allclose(fitted[mask], targets.numpy()[mask], rtol=1e-9)


def actor_config(**options):
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=G, ppo_micro_batch_size_per_gpu=1, **options)


@pytest.mark.parametrize("mode, slug, hyper, options, aggregations", [
    ("vanilla", "ppo_clip", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5},
     {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}, tuple(AGGREGATIONS)),
    ("gspo", "gspo", {"clip_low": 0.02, "clip_high": 0.03}, {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, (None,)),
    ("cispo", "cispo", {"min_ratio": 0.8, "max_ratio": 1.3}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
     tuple(AGGREGATIONS)),
    ("sapo", "sapo", {"tau_pos": 0.8, "tau_neg": 1.5}, {"tau_pos": 0.8, "tau_neg": 1.5}, (None,)),
    ("geo_mean", "gmpo", {"clip_low": 0.1, "clip_high": 0.2}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}, (None,))],
    ids=["dapo", "gspo", "cispo", "sapo", "gmpo"])
def test_losses_and_gradients(data, mode, slug, hyper, options, aggregations):
    for aggregation in aggregations:
        new = rows(data["new"]).requires_grad_()
        named = {} if aggregation is None else {"loss_agg_mode": AGGREGATIONS[aggregation]}
        arrays = rows(data["old"]), new, rows(data["advantages"]), rows(data["mask"])
        theirs, _ = verl.get_policy_loss_fn(mode)(*arrays, config=actor_config(**options), **named)
        theirs.backward()
        objective = objectives.make(slug, **hyper, **({} if aggregation is None else {"aggregation": aggregation}))
        update = jax.value_and_grad(objective.update, has_aux=True)
        (ours, _), gradient = update(
            jnp.asarray(data["new"]), rollouts(data), jnp.asarray(data["advantages"]), objective.init())
        np.testing.assert_allclose(ours, theirs.item(), rtol=1e-7)  # verl adds 1e-8 to lengths
        np.testing.assert_allclose(np.asarray(gradient).reshape(P * G, T), new.grad.numpy(), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("slug, hyper, options, least", [
    ("kl_cov", {"held_coef": 0.7, "fraction": 0.3}, {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}, 3),
    # All candidates are drawn, so that chance plays no part.
    ("clip_cov", {"clip_low": 0.2, "clip_high": 0.28, "fraction": 1.0, "cov_low": 0.1, "cov_high": 0.8},
     {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.8}, 3)])
def test_covariance_losses_and_gradients(data, slug, hyper, options, least):
    from verl.workers.config import PolicyLossConfig

    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    config = actor_config(policy_loss=PolicyLossConfig(loss_mode=slug, **options), **clips)
    objective = objectives.make(slug, **hyper)
    new = rows(data["new"]).requires_grad_()
    arrays = rows(data["old"]), new, rows(data["advantages"]), rows(data["mask"])
    theirs, _ = verl.get_policy_loss_fn(slug)(*arrays, loss_agg_mode="token-mean", config=config)
    theirs.backward()
    (ours, (metrics, _)), gradient = jax.value_and_grad(objective.update, has_aux=True)(
        jnp.asarray(data["new"]), rollouts(data), jnp.asarray(data["advantages"]), objective.init())
    chosen = metrics["held" if slug == "kl_cov" else "drawn"] * data["mask"].sum()
    assert least <= round(float(chosen)) < data["mask"].sum() - least
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-7)
    np.testing.assert_allclose(np.asarray(gradient).reshape(P * G, T), new.grad.numpy(), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_kl_estimators(data, estimator):
    new = rows(data["new"]).requires_grad_()
    theirs = verl.kl_penalty(new, rows(data["ref"]), estimator)
    theirs.sum().backward()
    ours = kl.token_kl(jnp.asarray(data["new"]), jnp.asarray(data["ref"]), estimator)
    gradient = jax.grad(lambda x: kl.token_kl(x, jnp.asarray(data["ref"]), estimator).sum())(jnp.asarray(data["new"]))
    np.testing.assert_allclose(np.asarray(ours).reshape(P * G, T), theirs.detach().numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.asarray(gradient).reshape(P * G, T), new.grad.numpy(), rtol=1e-9, atol=1e-12)
