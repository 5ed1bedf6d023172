"""One update against plain unpacked forward passes and optax; micro-batches; refusal of non-finite steps; adapters."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.optimizers import make_optimizer
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.step import make_update
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.descent import keep_finite
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.models import lora as lora_lib
from jaxrl_llm.objectives import token_objective

P, G, S, T, V, TEMPERATURE = 4, 2, 3, 4, 40, 0.7
MODEL = Transformer(ModelConfig(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48))
POLICY = Policy(MODEL, temperature=TEMPERATURE, chunk=24)
# A large epsilon keeps Adam's first step smooth in the gradient; with 1e-8 it is its sign, and rounding shows.
OPTIMIZER, SCHEDULE = make_optimizer(3e-3, 100, warmup_updates=4, weight_decay=0.1, eps=1e-3)
CLIPPED = objectives.make("ppo_clip", clip_high=0.28, aggregation="seq_mean_token_mean")
ESTIMATOR = advantages.make("grpo")


def fresh_params():
    params = MODEL.init(jax.random.key(0))
    return params | {"layers": jax.tree.map(lambda x: x * 6 if x.ndim == 3 else x, params["layers"]),
                     "embed": params["embed"] * 10}


def fresh_state(objective=CLIPPED, lora=None, optimizer=OPTIMIZER):
    return state_lib.create(fresh_params(), lora, optimizer, ESTIMATOR, objective, jax.random.key(1))


@functools.cache
def batch():
    """Prompts padded on both sides, completions of every length, one rollout that is only padding; off-policy by a bit."""
    random = np.random.default_rng(3)
    prompt_mask = np.ones((P, S), bool)
    prompt_mask[0, 0], prompt_mask[1, 2] = False, False
    lengths = np.array([[4, 2], [1, 3], [4, 4], [2, 4]])
    valid = np.ones((P, G), bool)
    valid[2, 1] = False
    rollouts = Rollouts(
        mask=np.arange(T) < lengths[..., None], valid=valid, tokens=random.integers(0, V, (P, G, T)).astype(np.int32),
        prompt_tokens=random.integers(0, V, (P, S)).astype(np.int32), prompt_mask=prompt_mask)
    logprobs = np.asarray(jax.jit(plain_logprobs)(fresh_params(), rollouts))
    return rollouts.replace(old_logprobs=(logprobs + random.normal(0, 0.25, logprobs.shape)).astype(np.float32))


ADVANTAGES = np.broadcast_to(np.array([[1.0, -1.0], [0.5, 2.0], [-0.7, 0.0], [-2.0, 1.5]], np.float32)[..., None], (P, G, T))


def plain_logprobs(params, rollouts):
    """`[P, G, T]` from P * G separate rows `[prompt, completion]` and a plain log_softmax."""
    def rows(x):
        return jnp.repeat(x, G, axis=0)
    tokens = jnp.concatenate([rows(rollouts.prompt_tokens), rollouts.tokens.reshape(P * G, T)], axis=1)
    mask = jnp.concatenate([rows(rollouts.prompt_mask), rollouts.mask.reshape(P * G, T)], axis=1)
    logp = jax.nn.log_softmax(MODEL.logits(params, MODEL.hidden_states(params, tokens, mask)[0]) / TEMPERATURE)
    last = S - 1 - jnp.argmax(rows(rollouts.prompt_mask)[:, ::-1], axis=1)
    before = jnp.concatenate([last[:, None], jnp.broadcast_to(jnp.arange(S, S + T - 1), (P * G, T - 1))], axis=1)
    predicted = jnp.take_along_axis(logp, before[..., None], axis=1)
    return jnp.take_along_axis(predicted, tokens[:, S:, None], axis=2)[..., 0].reshape(P, G, T)


def plain_loss(params, rollouts):
    ratio = jnp.exp(plain_logprobs(params, rollouts) - rollouts.old_logprobs)
    loss = jnp.maximum(-ADVANTAGES * ratio, -ADVANTAGES * jnp.clip(ratio, 0.8, 1.28))
    real = rollouts.mask & rollouts.valid[..., None]
    lengths = jnp.maximum(real.sum(-1), 1)
    return (jnp.where(real, loss, 0).sum(-1) / lengths).sum() / (real.any(-1)).sum()


@functools.cache
def update_of(micro_batches, clip_norm=0.5):
    return make_update(POLICY, CLIPPED, OPTIMIZER, clip_norm=clip_norm, micro_batches=micro_batches)


def close(result, wanted, tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0, err_msg=jax.tree_util.keystr(path))


def test_two_updates_equal_plain_ones_with_optax():
    params = fresh_params()
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(
        lambda count: 3e-3 * (count + 1) / 4, b1=0.9, b2=0.999, eps=1e-3, weight_decay=0.1))
    opt_state, differentiate = optimizer.init(params), jax.jit(jax.value_and_grad(plain_loss))
    state = fresh_state()
    for _ in range(2):
        loss, gradient = differentiate(params, batch())
        state, metrics = update_of(1)(state, batch(), ADVANTAGES)
        assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-4)
        assert metrics["grad_norm"] > 0.5  # the clip acts
        changes, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, changes)
    close(state.params, params, 2e-6)
    assert metrics["clip_fraction"] > 0 and metrics["skipped_updates"] == 0


@pytest.mark.slow
def test_a_norm_below_the_limit_is_not_scaled():
    gradient = jax.jit(jax.grad(plain_loss))(fresh_params(), batch())
    state, _ = update_of(1, clip_norm=None)(fresh_state(), batch(), ADVANTAGES)
    changes, _ = OPTIMIZER.update(gradient, OPTIMIZER.init(fresh_params()), fresh_params())
    close(state.params, optax.apply_updates(fresh_params(), changes), 2e-6)
    again, _ = update_of(1, clip_norm=1e6)(fresh_state(), batch(), ADVANTAGES)
    close(again.params, state.params, 0)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", (2, 4))
def test_micro_batches_change_nothing(micro_batches):
    whole, metrics = update_of(1)(fresh_state(), batch(), ADVANTAGES)
    parts, part_metrics = update_of(micro_batches)(fresh_state(), batch(), ADVANTAGES)
    close(parts.params, whole.params, 2e-6)
    assert metrics.keys() == part_metrics.keys()
    for name in metrics:
        assert part_metrics[name] == pytest.approx(float(metrics[name]), rel=1e-4, abs=1e-6), name


class Watched(Policy):
    """A policy that counts how often a gradient goes back through it."""

    def logprobs(self, params, lora, rollouts):
        @jax.custom_vjp
        def watched(x):
            return x

        def backward(_, cotangent):
            jax.debug.callback(lambda: BACKWARD.append(1))
            return (cotangent,)

        watched.defvjp(lambda x: (x, None), backward)
        logprobs, entropies = super().logprobs(params, lora, rollouts)
        return watched(logprobs), entropies


BACKWARD: list[int] = []
KL = objectives.of("ppo_clip + kl(0.1)")


@pytest.mark.slow
@pytest.mark.parametrize("name, objective, passes", (
    ("no advantage", CLIPPED, 2), ("whole batch", CLIPPED._replace(whole_batch=True), 2), ("another term", KL, 4)))
def test_prompts_without_advantage_cost_no_backward_pass(name, objective, passes):
    """Two of four prompts, first and third, have no advantage: the whole gradient comes from half of the parts."""
    alive = ADVANTAGES * np.array([0, 1, 0, 1], np.float32)[:, None, None]
    rollouts = batch().replace(ref_logprobs=batch().old_logprobs)
    whole, metrics = make_update(POLICY, objective, OPTIMIZER)(fresh_state(objective), rollouts, alive)
    watched = make_update(Watched(MODEL, TEMPERATURE, chunk=24), objective, OPTIMIZER, micro_batches=4)
    BACKWARD.clear()
    parts, part_metrics = watched(fresh_state(objective), rollouts, alive)
    jax.effects_barrier()
    assert len(BACKWARD) == passes
    close(parts.params, whole.params, 2e-6)
    assert metrics.keys() == part_metrics.keys()
    for key in metrics:
        assert part_metrics[key] == pytest.approx(float(metrics[key]), rel=1e-4, abs=1e-6), key


@pytest.mark.slow
def test_micro_batches_of_an_objective_that_needs_the_whole_batch():
    """A token's weight depends on the log-probs of all rollouts here, so parts alone would give another gradient."""
    def token_loss(logprobs, rollouts, advantages):
        sequence = masked.sum(logprobs, rollouts.token_mask, axis=2)
        share = jax.nn.softmax(jnp.where(rollouts.live, sequence, -jnp.inf).reshape(-1)).reshape(sequence.shape)
        return -advantages * logprobs * share[..., None], {"share": share}

    states = []
    for whole_batch, micro_batches in ((True, 1), (True, 2), (True, 4), (False, 2)):
        objective = token_objective(token_loss, whole_batch=whole_batch)
        update = make_update(POLICY, objective, OPTIMIZER, micro_batches=micro_batches)
        states.append(update(fresh_state(objective), batch(), ADVANTAGES))
    (one, metrics), (two, metrics_two), (four, _), (wrong, _) = states
    close(two.params, one.params, 2e-6)
    close(four.params, one.params, 2e-6)
    assert metrics.keys() == metrics_two.keys()
    for name in metrics:
        assert metrics_two[name] == pytest.approx(float(metrics[name]), rel=1e-4, abs=1e-6), name
    difference = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(wrong.params)))
    assert difference > 1e-5  # the test would notice


@pytest.mark.slow
def test_a_bonus_for_entropy_is_the_same_in_micro_batches():
    """Without advantages it alone moves the weights; a policy whose entropies carry no gradient is refused."""
    bonus, states = objectives.of("ppo_clip + entropy(0.5)"), []
    policy = dataclasses.replace(POLICY, slopes=True)
    for objective, micro_batches in ((bonus, 1), (bonus, 4), (bonus._replace(whole_batch=True), 4)):
        update = make_update(policy, objective, OPTIMIZER, micro_batches=micro_batches)
        states.append(update(fresh_state(objective), batch(), 0 * ADVANTAGES))
    (one, metrics), *others = states
    assert metrics["loss"] == pytest.approx(-0.5 * float(metrics["entropy"]), rel=1e-5) and metrics["grad_norm"] > 1e-3
    for state, part_metrics in others:
        close(state.params, one.params, 2e-6)
        assert part_metrics["grad_norm"] == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)
    with pytest.raises(ValueError, match=r"carry no gradient; make it with Policy\(..., slopes=True\)"):
        make_update(POLICY, bonus, OPTIMIZER)(fresh_state(bonus), batch(), ADVANTAGES)


def test_rollouts_that_do_not_exist_have_no_influence():
    garbage = batch()
    tokens, old = garbage.tokens.copy(), garbage.old_logprobs.copy()
    tokens[2, 1], old[2, 1] = 5, np.nan
    loud = ADVANTAGES.copy()
    loud[2, 1] = 1e6
    result, _ = update_of(1)(fresh_state(), garbage.replace(tokens=tokens, old_logprobs=old), loud)
    wanted, _ = update_of(1)(fresh_state(), batch(), ADVANTAGES)
    close(result.params, wanted.params, 1e-7)


def test_non_finite_updates_are_skipped_and_counted():
    state, _ = update_of(1)(fresh_state(), batch(), ADVANTAGES)
    before = jax.device_get(jax.tree.leaves((state.params, state.opt_state)))
    poisoned = ADVANTAGES.copy()
    poisoned[0, 0, 0] = np.nan
    for count in (1, 2):
        state, metrics = update_of(1)(state, batch(), poisoned)
        assert (state.skipped, state.skipped_in_row) == (count, count) and metrics["skipped_updates"] == count
        assert np.isnan(metrics["loss"])
    for a, b in zip(jax.tree.leaves((state.params, state.opt_state)), before, strict=True):
        np.testing.assert_array_equal(a, b)
    state, _ = update_of(1)(state, batch(), ADVANTAGES)
    assert (state.skipped, state.skipped_in_row) == (2, 0)
    assert any((np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(state.params), before))


@pytest.mark.parametrize("wrong", (np.nan, np.inf))
def test_states_of_estimators_survive_a_batch_that_is_refused(wrong):
    old = {"count": jnp.int32(1), "best": jnp.array([-jnp.inf, 2.0])}
    new = {"count": jnp.int32(2), "best": jnp.array([1.0, 3.0])}
    assert jax.device_get(keep_finite(new, old))["best"].tolist() == [1, 3]
    broken = keep_finite(new | {"best": jnp.array([1.0, wrong])}, old)
    assert int(broken["count"]) == 1 and broken["best"].tolist() == [-np.inf, 2]
    assert keep_finite((), ()) == ()


def test_an_update_without_a_gradient_changes_nothing_and_is_not_counted():
    state, _ = update_of(1)(fresh_state(), batch(), ADVANTAGES)  # from here on there is momentum
    before = jax.device_get(jax.tree.leaves((state.params, state.opt_state)))
    state, metrics = update_of(1)(state, batch(), np.zeros_like(ADVANTAGES))
    for a, b in zip(jax.tree.leaves((state.params, state.opt_state)), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics["grad_norm"] == 0 and metrics["skipped_updates"] == 0 and state.skipped_in_row == 0


@pytest.mark.slow
def test_learning_rate_zero_gives_ratio_one_and_a_small_mismatch_at_another_temperature():
    params, prompts = fresh_params(), batch()
    keys = row_keys(jax.random.key(5), jnp.arange(P * G).reshape(P, G))
    result = generate(MODEL, params, prompts.prompt_tokens, prompts.prompt_mask, keys, Sampling(np.float32(TEMPERATURE)),
                      max_tokens=T, stop_ids=(3,))
    rollouts = Rollouts(mask=result.mask, valid=np.ones((P, G), bool), tokens=result.tokens, behavior_logprobs=result.logprobs,
                        prompt_tokens=prompts.prompt_tokens, prompt_mask=prompts.prompt_mask)
    optimizer, _ = make_optimizer(0.0, 10, weight_decay=0.1)
    update = make_update(POLICY, CLIPPED, optimizer)
    state, metrics = update(fresh_state(optimizer=optimizer), rollouts, ADVANTAGES)
    assert metrics["max/ratio"] == 1.0 and metrics["approx_kl"] == 0.0 and metrics["clip_fraction"] == 0.0
    assert metrics["max/mismatch"] < 1e-4 and abs(metrics["mismatch/kl"]) < 1e-5
    close(state.params, params, 0)
    wrong = make_update(Policy(MODEL, temperature=1.0), CLIPPED, optimizer)
    _, metrics = wrong(fresh_state(optimizer=optimizer), rollouts, ADVANTAGES)
    assert metrics["max/mismatch"] > 0.05  # the metric would notice a temperature that only one side knows


@pytest.mark.slow
def test_with_adapters_only_they_are_trained():
    adapters = lora_lib.init(jax.random.key(2), fresh_params(), rank=2, alpha=4.0)
    state = fresh_state(lora=adapters)
    assert {x.shape for x in jax.tree.leaves(state.opt_state)} <= {x.shape for x in jax.tree.leaves(adapters)} | {()}
    before = jax.device_get(adapters)
    state, _ = update_of(1)(state, batch(), ADVANTAGES)
    close(state.params, fresh_params(), 0)
    assert all((np.asarray(state.lora[name]["b"]) != before[name]["b"]).any() for name in before)


def test_the_old_state_is_donated():
    state = fresh_state()
    update_of(1)(state, batch(), ADVANTAGES)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))


def test_prompts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"4 prompts .* learner.micro_batches=3; choose one of \[1, 2, 4\]"):
        make_update(POLICY, CLIPPED, OPTIMIZER, micro_batches=3)(fresh_state(), batch(), ADVANTAGES)


def test_schedules():
    def rates(**options):
        return [float(make_optimizer(1.0, 10, **options)[1](n)) for n in range(10)]
    assert rates(warmup_updates=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]  # the first update is not wasted
    assert rates() == [1.0] * 10
    np.testing.assert_allclose(rates(warmup_updates=2, schedule="linear"), [0.5, 1.0] + [1 - n / 8 for n in range(8)],
                               atol=1e-6)
    np.testing.assert_allclose(rates(schedule="cosine"), [(1 + np.cos(np.pi * n / 10)) / 2 for n in range(10)], atol=1e-6)
    with pytest.raises(ValueError, match="optimizer.schedule='cosin'; allowed: constant, cosine, linear"):
        make_optimizer(1.0, 10, schedule="cosin")
