"""The critic against plain unpacked rows and numpy; what its loss clips; that it learns a value function known by heart."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import Rollouts, from_lists, take
from jaxrl_llm.methods import provision
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.setup import config as config_lib
from jaxrl_llm.setup import setup
from jaxrl_llm.values.critic import Critic, make_update, metrics, value_loss

P, G, S, T, V, D = 4, 2, 3, 4, 20, 16
MODEL = Transformer(ModelConfig(vocab_size=V, hidden_size=D, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
                                mlp_size=24))
# A large epsilon keeps Adam's first step smooth in the gradient; with 1e-8 it is its sign, and rounding shows.
OPTIMIZER = optax.adam(1e-2, eps=1e-3)
SEPARATE, HEAD = Critic(MODEL, OPTIMIZER, clip=0.2), Critic(MODEL, OPTIMIZER, kind="head", clip=None)


def policy_params():
    params = MODEL.init(jax.random.key(0))
    return params | {"layers": jax.tree.map(lambda x: x * 6 if x.ndim == 3 else x, params["layers"]),
                     "embed": params["embed"] * 10}


def fresh(critic):
    """A critic with values other than 0, as after training."""
    state = critic.init(policy_params())
    head = {"weight": jax.random.normal(jax.random.key(1), (D,)) / D**0.5, "bias": jnp.float32(0.3)}
    return state.replace(params=state.params | {"head": head})


@functools.cache
def batch():
    """Prompts padded on both sides, completions of every length, one rollout that is only padding."""
    random = np.random.default_rng(3)
    prompt_mask = np.ones((P, S), bool)
    prompt_mask[0, 0], prompt_mask[1, 2] = False, False
    valid = np.ones((P, G), bool)
    valid[2, 1] = False
    rollouts = Rollouts(
        mask=np.arange(T) < np.array([[4, 2], [1, 3], [4, 4], [2, 4]])[..., None], valid=valid,
        tokens=random.integers(0, V, (P, G, T)).astype(np.int32),
        prompt_tokens=random.integers(0, V, (P, S)).astype(np.int32), prompt_mask=prompt_mask)
    old = 0.3 + random.normal(0, 0.7, (P, G, T))
    return rollouts.replace(extras={"values": old.astype(np.float32),
                                    "value_targets": random.normal(0, 1, (P, G, T)).astype(np.float32)})


def plain_values(critic, params, policy, rollouts):
    """`[P, G, T]` from P * G separate rows `[prompt, completion]`: V_t is read where token t is predicted."""
    trunk = policy if critic.kind == "head" else params["trunk"]
    def rows(x):
        return jnp.repeat(x, G, axis=0)
    tokens = jnp.concatenate([rows(rollouts.prompt_tokens), rollouts.tokens.reshape(P * G, T)], axis=1)
    mask = jnp.concatenate([rows(rollouts.prompt_mask), rollouts.mask.reshape(P * G, T)], axis=1)
    states = MODEL.hidden_states(trunk, tokens, mask)[0]
    last = S - 1 - jnp.argmax(rows(rollouts.prompt_mask)[:, ::-1], axis=1)
    before = jnp.concatenate([last[:, None], jnp.broadcast_to(jnp.arange(S, S + T - 1), (P * G, T - 1))], axis=1)
    states = jnp.take_along_axis(states, before[..., None], axis=1)
    return (states @ params["head"]["weight"] + params["head"]["bias"]).reshape(P, G, T)


def plain_loss(params, rollouts, clip):
    """The mean over real tokens of half the larger squared error, as the equation stands."""
    values, old, target = plain_values(SEPARATE, params, None, rollouts), *map(rollouts.extras.get, ("values", "value_targets"))
    near = old + jnp.clip(values - old, -clip, clip)
    real = rollouts.mask & rollouts.valid[..., None]
    return jnp.where(real, jnp.maximum((values - target) ** 2, (near - target) ** 2) / 2, 0).sum() / real.sum()


@functools.cache
def update_of(critic, micro_batches=1, clip_norm=0.5):
    return make_update(critic, clip_norm=clip_norm, micro_batches=micro_batches)


def close(result, wanted, tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0, err_msg=jax.tree_util.keystr(path))


def test_value_loss_of_three_tokens():
    old, new, target = np.array([0.5, 0.6, 0.8]), np.array([0.55, 1.2, 0.9]), np.ones(3)
    loss, clipped = value_loss(new, old, target, 0.5)
    np.testing.assert_allclose(loss, [0.10125, 0.02, 0.005], rtol=1e-6)
    assert not clipped.any()  # the second left the range, but its bound 1.1 is nearer to the target
    loss, clipped = value_loss(new, old, target, 0.05)
    np.testing.assert_allclose(loss, [0.10125, 0.35**2 / 2, 0.15**2 / 2], rtol=1e-5)
    assert clipped.tolist() == [False, True, True]


@pytest.mark.parametrize("new, target, gradient", (
    (0.9, 1.0, 0.0),  # far towards the target: enough for one batch
    (-0.9, 1.0, -1.9),  # far away from it: the full error draws it back
    (0.3, 1.0, -0.7),  # inside the range
    (0.9, 0.6, 0.3)))  # past the target, further from it than the bound is
def test_what_the_clip_takes_away(new, target, gradient):
    def slope(clip):
        return jax.grad(lambda v: value_loss(v, 0.0, target, clip)[0])(new)
    assert slope(0.5) == pytest.approx(gradient, abs=1e-6)
    assert slope(None) == pytest.approx(new - target, abs=1e-6)


def test_metrics_of_four_tokens():
    mask = np.array([True, True, True, True, False])
    values, returns = np.array([0.0, 0.5, 0.5, 1.0, np.nan], np.float32), np.array([0.0, 0.0, 1.0, 1.0, 9.0], np.float32)
    result = metrics(values, returns, mask)
    assert result["value/mean"] == 0.5 and result["value/return"] == 0.5
    assert result["value/explained_variance"] == pytest.approx(1 - 0.125 / 0.25)
    assert metrics(values, np.ones(5, np.float32), mask)["value/explained_variance"] == 0
    rounded = np.float32([1e-9, -2e-9, 3e-9, 0, 0])  # what is left of (0 - V) + V
    assert metrics(values, rounded, mask)["value/explained_variance"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("critic", (SEPARATE, HEAD), ids=("separate", "head"))
def test_packed_values_are_those_of_plain_rows(critic):
    state, policy = fresh(critic), policy_params()
    result = jax.jit(critic.values)(state.params, (policy, None), batch())
    real = batch().mask & batch().valid[..., None]
    wanted = np.where(real, jax.jit(plain_values, static_argnums=0)(critic, state.params, policy, batch()), 0)
    np.testing.assert_allclose(result, wanted, atol=2e-6)
    assert np.abs(wanted).max() > 0.3


def test_a_new_critic_values_everything_at_zero_and_shares_no_array_with_the_policy():
    params = policy_params()
    state = SEPARATE.init(params)
    assert not np.any(jax.jit(SEPARATE.values)(state.params, (None, None), batch()))
    close(state.params["trunk"], params, 0)
    assert not {id(x) for x in jax.tree.leaves(state.params)} & {id(x) for x in jax.tree.leaves(params)}
    assert set(HEAD.init(params).params) == {"head"}


def test_two_updates_equal_plain_ones_with_optax():
    state = fresh(SEPARATE)
    params, optimizer = jax.tree.map(jnp.copy, state.params), optax.chain(optax.clip_by_global_norm(0.5), OPTIMIZER)
    opt_state, differentiate = optimizer.init(params), jax.jit(jax.value_and_grad(plain_loss), static_argnums=2)
    for _ in range(2):
        loss, gradient = differentiate(params, batch(), 0.2)
        state, result = update_of(SEPARATE)(state, (None, None), batch())
        assert result["value/loss"] == pytest.approx(float(loss), abs=1e-5)
        assert result["value/grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-4)
        assert result["value/grad_norm"] > 0.5  # the clip of the norm acts
        changes, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, changes)
    assert 0 < result["value/clip_fraction"] < 1
    close(state.params, params, 5e-6)


@pytest.mark.slow
def test_micro_batches_change_nothing():
    whole, result = update_of(SEPARATE)(fresh(SEPARATE), (None, None), batch())
    parts, part_found = update_of(SEPARATE, 4)(fresh(SEPARATE), (None, None), batch())
    close(parts.params, whole.params, 2e-6)
    close(part_found, result, 1e-5)


def test_padding_teaches_nothing():
    """Other tokens, values and targets where nothing counts: the same new weights, bit for bit."""
    real = batch().mask & batch().valid[..., None]
    extras = {name: np.where(real, x, np.nan) for name, x in batch().extras.items()}
    other = batch().replace(tokens=np.where(batch().mask, batch().tokens, 7), extras=extras)
    close(update_of(SEPARATE)(fresh(SEPARATE), (None, None), other)[0].params,
          update_of(SEPARATE)(fresh(SEPARATE), (None, None), batch())[0].params, 0)


def test_a_target_that_is_not_finite_is_refused():
    extras = {**batch().extras, "value_targets": np.full((P, G, T), np.inf, np.float32)}
    state, result = update_of(SEPARATE)(fresh(SEPARATE), (None, None), batch().replace(extras=extras))
    assert result["value/skipped"] == 1
    close(state, fresh(SEPARATE), 0)
    with pytest.raises(ValueError, match="'value_targets'"):
        update_of(SEPARATE)(fresh(SEPARATE), (None, None), batch().replace(extras={"values": extras["values"]}))


@pytest.mark.slow
def test_a_head_comes_near_the_least_squares_fit_on_the_states_of_the_policy():
    policy, target = policy_params(), batch().extras["value_targets"]
    real = batch().mask & batch().valid[..., None]
    r = batch()
    states = np.asarray(MODEL.packed_states(policy, r.prompt_tokens, r.prompt_mask, r.tokens)[0])[real]
    design = np.concatenate([states, np.ones((len(states), 1))], axis=1)
    best = ((target[real] - design @ np.linalg.lstsq(design, target[real])[0]) ** 2).mean() / 2
    critic = Critic(MODEL, optax.adam(optax.cosine_decay_schedule(0.1, 300)), kind="head", clip=None)
    state, update = critic.init(policy), update_of(critic, clip_norm=None)
    before = jax.tree.map(np.array, policy)
    for _ in range(300):
        state, result = update(state, (policy, None), batch())
    assert best - 1e-5 <= result["value/loss"] < best + 0.05 < 0.2 < (target[real] ** 2).mean() / 2
    close(policy, before, 0)


def guessing_game(seed):
    """Tokens 1 or 2; a rollout is worth 1 if its second token is 2, as for half of them. So V = 1/2, 1/2, then 0 or 1."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 3, (P, G, T)).astype(np.int32)
    tokens[..., 1] = random.permutation([1, 2] * (P * G // 2)).reshape(P, G)
    returns = np.repeat((tokens[..., 1:2] == 2).astype(np.float32), T, axis=-1)
    true = returns.copy()
    true[..., :2] = 0.5
    rollouts = Rollouts(mask=np.ones((P, G, T), bool), valid=np.ones((P, G), bool), tokens=tokens,
                        prompt_tokens=np.full((P, S), 5, np.int32), prompt_mask=np.ones((P, S), bool))
    return rollouts, returns, true


@pytest.mark.slow
def test_a_critic_learns_what_states_are_worth():
    state, values = SEPARATE.init(policy_params()), jax.jit(SEPARATE.values)
    for seed in range(400):
        rollouts, returns, _ = guessing_game(seed)
        extras = {"values": values(state.params, (None, None), rollouts), "value_targets": returns}
        state, _ = update_of(SEPARATE)(state, (None, None), rollouts.replace(extras=extras))
    rollouts, returns, true = jax.tree.map(lambda *x: np.concatenate(x), *map(guessing_game, range(1000, 1010)))
    result = np.concatenate([values(state.params, (None, None), take(rollouts, i * P, P)) for i in range(10)])
    error = np.abs(result - true)
    assert error[..., 2:].mean() < 0.1 and error[..., :2].mean() < 0.1
    result = metrics(result, returns, rollouts.mask)
    assert result["value/explained_variance"] == pytest.approx(0.5, abs=0.1)  # half of the states know the answer


VALUES = {"values": jnp.array([[[0.5, 0.6, 0.8]]])}


def test_targets_come_from_the_estimator():
    example = from_lists([[1]], lengths=[[3]], extras=VALUES)
    targets = advantages.make("ppo_gae", lambda_critic=0.0).value_targets
    np.testing.assert_allclose(targets(example, False)[0, 0], [0.6, 0.8, 1], rtol=1e-6)
    np.testing.assert_allclose(targets(example, True)[0, 0], [1, 1, 1], rtol=1e-6)
    assert advantages.grpo().value_targets is None


def test_targets_of_two_channels_are_advantages_plus_values():
    example = from_lists([[1]], lengths=[[3]], extras=VALUES, tokens=jnp.full((1, 1, 3), 4))
    estimator = advantages.make("demystify_cot", max_len=8, margin=0, ngram=1, kl_coef=0.0)
    result, _ = estimator.update(example, ())
    np.testing.assert_allclose(estimator.value_targets(example, False), result + VALUES["values"], rtol=1e-6)
    assert len(set(np.asarray(estimator.value_targets(example, True))[0, 0].tolist())) == 3  # the repeats are blamed


def configured(**changes):
    config = config_lib.default_config()
    config.update_from_flattened_dict({"task": "arithmetic(level=digit)", "model.hidden_size": 32, "model.num_layers": 1,
                                       "method": "vc_ppo", **changes})
    return config


def critic_of(run):
    """The critic whose `init` the last recorder has."""
    return next(one for one in run.learner.recorders if one.name == "critic").init.__self__


def test_settings_of_a_critic():
    run, _ = setup.build(configured(**{"optimizer.learning_rate": 3e-4}))
    assert run.config.critic.learning_rate == 3e-4 and run.learner.pretrain_steps == 50 and critic_of(run).clip == 0.5
    assert run.needs - provision.everywhere() == {"values"}
    run, _ = setup.build(configured(**{"critic.pretrain_steps": 0, "critic.kind": "head", "critic.clip": 0.0}))
    assert run.learner.pretrain_steps == 0 and critic_of(run).kind == "head" and critic_of(run).clip is None
    assert not setup.build(configured(method="grpo"))[0].learner.recorders


@pytest.mark.parametrize("changes, words", (
    ({"critic.kind": "heda"}, "config.critic.kind 'heda'. Did you mean 'head'"),
    ({"critic.clip": -0.5}, "config.critic.clip is -0.5; it must be at least 0"),
    ({"critic.pretrain_steps": -2}, "config.critic.pretrain_steps is -2"),
    ({"steps": 50}, "config.critic.pretrain_steps=50 leave none of the 50 steps to the policy")))
def test_settings_that_cannot_work(changes, words):
    with pytest.raises(ValueError, match=words):
        setup.build(configured(**changes))
