"""Updates from packed rows equal those of plain rows, for any trees, micro-batches and objectives."""
import dataclasses
import functools

import forests
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.packing import of_groups, pack
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.kernels import flash
from jaxrl_llm.learning import accumulate
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.accumulate import make_logprobs, make_parts, placed, update, view_of
from jaxrl_llm.learning.optimizers import make_optimizer
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.step import loss_terms, make_update
from jaxrl_llm.maths import masked
from jaxrl_llm.models import Experts, ModelConfig, Transformer
from jaxrl_llm.models import lora as lora_lib
from jaxrl_llm.objectives import token_objective

TEMPERATURE, LENGTH = 0.7, 14
MODEL = Transformer(ModelConfig(vocab_size=40, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48, window=5, local_layers=(True, False)))
POLICY = Policy(MODEL, temperature=TEMPERATURE, chunk=24, slopes=True)
CLIPPED = objectives.of("ppo_clip(clip_high=0.28, aggregation=seq_mean_token_mean) + kl(0.1)")
KEEP = optax.GradientTransformation(  # an optimiser whose state is the gradient
    lambda tree: jax.tree.map(jnp.zeros_like, tree), lambda grads, _, tree: (jax.tree.map(jnp.zeros_like, tree), grads))


def whole_batch():
    """Here a token's weight depends on the log-probs of all rollouts."""
    def token_loss(logprobs, rollouts, advantages):
        sequence = masked.sum(logprobs, rollouts.token_mask, axis=2)
        share = jax.nn.softmax(jnp.where(rollouts.live, sequence, -jnp.inf).reshape(-1)).reshape(sequence.shape)
        return -advantages * logprobs * share[..., None], {"share": share}

    return token_objective(token_loss, whole_batch=True)


SEQUENCES = objectives.make("gspo", clip_low=0.3, clip_high=0.3)
BONUS = objectives.of("gspo(0.3, 0.3) + kl(0.1, estimator=unbiased) + entropy(0.5)")
OBJECTIVES = {"tokens": CLIPPED, "sequences": SEQUENCES, "whole batch": whole_batch(), "bonus": BONUS}
SEEDS = (6, 4, 13)  # of random trees with holes and shared tokens, in two rows


def fresh_params():
    return jax.tree.map(lambda x: x * 6 if x.ndim == 3 else x * 4, MODEL.init(jax.random.key(0)))


def fresh_state(objective, optimizer=KEEP, lora=None, params=None):
    return state_lib.create(fresh_params() if params is None else params, lora, optimizer, advantages.make("grpo"), objective,
                            jax.random.key(1))


@functools.cache
def batch(make, seed=6):
    """A case, its rollouts, off-policy by a bit, and advantages; all that is recorded of tokens that are not trained is NaN."""
    rng = np.random.default_rng(seed)
    case = make(rng)
    behind = LENGTH - case.mask.shape[2]  # one shape, so that cases share programs
    case = case._replace(mask=np.pad(case.mask, ((0, 0), (0, 0), (0, behind))))
    logprobs = np.asarray(jax.jit(functools.partial(forests.plain_logprobs, MODEL, temperature=TEMPERATURE))(
        fresh_params(), forests.plain_rows(case))[0])
    def noisy(scale):
        return np.where(case.mask, logprobs + rng.normal(0, scale, logprobs.shape), np.nan).astype(np.float32)
    rollouts = case.rollouts(old_logprobs=noisy(0.25), ref_logprobs=noisy(0.5))
    return case, rollouts, np.where(case.mask, rng.normal(size=case.leaves.shape)[..., None], np.nan).astype(np.float32)


def packed_of(case, length=LENGTH, multiple=1):
    return pack(case.forest, case.leaves, case.mask, [length], multiple)


def plain_update(objective, tree, place, case, rollouts, advantage):
    """`(gradient, metrics)` of the loss of plain rows."""
    rollouts = rollouts.replace(loss_weights=objective.weights(rollouts))

    def loss(tree):
        result = forests.plain_logprobs(MODEL, *place(tree)[:1], forests.plain_rows(case), TEMPERATURE, place(tree)[1])
        return loss_terms(objective, *result, rollouts, advantage, objective.init())

    (_, (metrics, _)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(tree)
    return gradient, metrics


def close(result, wanted, tolerance=2e-5):  # rounding of float32 differs by processor, by 1.05e-5 on one of them
    for (path, a), b in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()), rtol=0, err_msg=jax.tree_util.keystr(path))


def same_metrics(result, wanted):
    for name, value in wanted.items():
        assert result[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


@functools.cache
def parts_of(name):
    return make_parts(POLICY, OBJECTIVES[name], KEEP, clip_norm=None)


@pytest.mark.slow
@pytest.mark.parametrize("make, seed", ((forests.group, 6), (forests.conversations, 6), *((forests.search, n) for n in SEEDS)))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_updates_row_by_row_and_at_once_equal_those_of_plain_rows(name, make, seed):
    objective, (case, rollouts, advantage) = OBJECTIVES[name], batch(make, seed)
    gradient, metrics = plain_update(objective, fresh_params(), lambda p: (p, None), case, rollouts, advantage)
    assert optax.tree.norm(gradient) > 0.01
    packed = packed_of(case)
    assert packed.node.shape[0] > 1  # a micro-batch is a part of a group or of a tree
    for size in (1, packed.node.shape[0]):
        state, result = update(parts_of(name), size, fresh_state(objective), packed, rollouts, advantage)
        close(state.opt_state, gradient)
        same_metrics(result, metrics)
        assert result["grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-4)


@pytest.mark.slow
def test_adapters_alone_are_trained():
    case, rollouts, advantage = batch(forests.conversations)
    adapters = lora_lib.init(jax.random.key(2), fresh_params(), rank=2, alpha=4.0)
    keys = iter(jax.random.split(jax.random.key(3), 99))
    adapters = jax.tree.map(lambda x: x + 0.03 * jax.random.normal(next(keys), x.shape), adapters)
    gradient, _ = plain_update(CLIPPED, adapters, lambda lora: (fresh_params(), lora), case, rollouts, advantage)
    for size in (1, packed_of(case).node.shape[0]):
        state, _ = update(parts_of("tokens"), size, fresh_state(CLIPPED, lora=jax.tree.map(jnp.copy, adapters)),
                          packed_of(case), rollouts, advantage)
        close(state.opt_state, gradient)
        close(state.params, fresh_params(), 0)


@pytest.mark.slow
@pytest.mark.parametrize("experts", (None, Experts(4, 2, 24)))
def test_groups_in_packed_rows_learn_as_rectangular_ones(experts):
    """The same update as `make_update`, with clipping, AdamW, and the balancing loss of experts."""
    rng = np.random.default_rng(0)
    P, G, S, T = 3, 3, 4, 6
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G, 1))
    prompt_mask = np.arange(S) >= rng.integers(0, S, (P, 1))
    tokens = [rng.integers(0, 40, shape).astype(np.int32) for shape in ((P, S), (P, G, T))]
    rollouts = Rollouts(mask=mask, valid=rng.random((P, G)) < 0.8, tokens=tokens[1], prompt_tokens=tokens[0],
                        prompt_mask=prompt_mask, behavior_logprobs=rng.normal(-3, 1, (P, G, T)).astype(np.float32))
    advantage = np.broadcast_to(rng.normal(size=(P, G, 1)), (P, G, T)).astype(np.float32)
    objective = objectives.make("ppo_clip")
    policy = Policy(dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, experts=experts)), TEMPERATURE, 24)
    optimizer, _ = make_optimizer(3e-3, 100, weight_decay=0.1, eps=1e-3)
    def state():
        return fresh_state(objective, optimizer, params=policy.model.init(jax.random.key(3)))
    wanted, metrics = make_update(policy, objective, optimizer, clip_norm=0.05)(state(), rollouts, advantage)
    forest, leaves = of_groups(tokens[0], prompt_mask, tokens[1], np.asarray(rollouts.token_mask))
    packed = pack(forest, leaves, np.asarray(rollouts.token_mask), [12], multiple=2)
    parts = make_parts(policy, objective, optimizer, clip_norm=0.05)
    result, measured = update(parts, 2, state(), packed, rollouts, advantage)
    close(result.params, wanted.params, 2e-6)
    assert metrics["grad_norm"] > 0.05 and measured.keys() == metrics.keys()
    metrics.pop("moe/max_load", None)  # last tokens, and prompts once more, are computed here
    same_metrics(measured, metrics)


@pytest.mark.slow
def test_experts_are_balanced_over_all_micro_batches():
    case, rollouts, advantage = batch(forests.conversations)
    config = dataclasses.replace(MODEL.config, experts=Experts(4, 2, 24))
    policy = Policy(Transformer(config), TEMPERATURE, 24)
    def state():
        return fresh_state(CLIPPED, params=policy.model.init(jax.random.key(3)))
    balanced = objectives.composed(CLIPPED, (objectives.terms.make("balance", coef=0.5),))
    parts = make_parts(policy, balanced, KEEP, clip_norm=None)
    packed = packed_of(case)
    whole, metrics = update(parts, packed.node.shape[0], state(), packed, rollouts, advantage)
    one_by_one, result = update(parts, 1, state(), packed, rollouts, advantage)
    close(one_by_one.opt_state, whole.opt_state, 2e-6)
    same_metrics(result, metrics)
    assert metrics["moe/balance_loss"] > 1 and np.abs(whole.opt_state["layers"]["router"]["kernel"]).max() > 1e-4


@pytest.mark.slow
def test_programs_depend_on_the_length_of_rows_not_on_their_number():
    parts = make_parts(dataclasses.replace(POLICY, chunk=25), CLIPPED, KEEP, clip_norm=None)  # programs of this test alone
    case, rollouts, advantage = batch(forests.group)
    state, compiled = fresh_state(CLIPPED), []
    for length, multiple in ((LENGTH, 2), (LENGTH, 6), (LENGTH, 2), (16, 2), (16, 8)):
        packed = packed_of(case, length, multiple)
        state, _ = update(parts, 2, state, packed, rollouts, advantage)
        compiled.append([function._cache_size() for function in parts[1:]])
    logprobs, differentiate, backward, apply, whole = compiled[2]
    assert compiled[0] == compiled[2] == [1, 1, 1, 1, 0]
    assert compiled[-1] == [2, 1, 2, 1, 0]  # a second length: the two that run the model


@pytest.mark.slow
def test_a_non_finite_update_is_refused_and_counted():
    case, rollouts, advantage = batch(forests.group)
    packed, poisoned = packed_of(case), advantage.copy()
    poisoned[0, 0, 0] = np.nan
    before = jax.device_get(fresh_params())
    state, metrics = update(parts_of("tokens"), 1, fresh_state(CLIPPED), packed, rollouts, poisoned)
    assert (state.skipped, state.skipped_in_row) == (1, 1) and np.isnan(metrics["loss"])
    close(state.params, before, 0)
    state, _ = update(parts_of("tokens"), 1, state, packed, rollouts, advantage)
    assert (state.skipped, state.skipped_in_row) == (1, 0)


@pytest.mark.slow
def test_log_probs_are_those_of_plain_rows_and_nothing_else():
    case, rollouts, _ = batch(forests.conversations)
    micro_batches, index = placed(POLICY, 1, packed_of(case))
    logprobs, entropies, loads = view_of(make_logprobs(POLICY), POLICY, fresh_params(), None, micro_batches, index)
    wanted = forests.plain_logprobs(MODEL, fresh_params(), forests.plain_rows(case), TEMPERATURE)
    assert loads is None and not np.asarray(logprobs)[~case.mask].any()
    close((logprobs, entropies), wanted)


def test_micro_batches_without_a_cotangent_go_back_nowhere(monkeypatch):
    """Where nothing is learned from one of two groups, its rows cost no backward pass."""
    case, rollouts, advantage = batch(forests.group)
    backward = []

    class Watched(Policy):
        def packed_logprobs(self, params, lora, rows, index):
            @jax.custom_vjp
            def watched(x):
                return x

            def back(_, cotangent):
                jax.debug.callback(lambda: backward.append(1))
                return (cotangent,)

            watched.defvjp(lambda x: (x, None), back)
            logprobs, *others = super().packed_logprobs(params, lora, rows, index)
            return watched(logprobs), *others

    packed = packed_of(case)
    of_rows = [{bool(g) for g in (packed.node[r][packed.node[r] >= 0] > 3)} for r in range(len(packed.node))]
    objective = objectives.make("ppo_clip")
    parts = make_parts(Watched(MODEL, TEMPERATURE, 24), objective, KEEP, clip_norm=None)
    update(parts, 1, fresh_state(objective), packed, rollouts, advantage * np.array([0, 1], np.float32)[:, None, None])
    jax.effects_barrier()
    assert len(backward) == sum(True in groups for groups in of_rows) < len(of_rows)


def test_rows_that_do_not_divide_are_refused():
    case = forests.group(np.random.default_rng(6))
    with pytest.raises(ValueError, match="4 packed rows do not divide into micro-batches of 3; pack them with multiple=3"):
        placed(POLICY, 3, packed_of(case))


@pytest.mark.slow
def test_a_part_of_a_group_needs_less_memory_than_all_of_it(monkeypatch):
    """One prompt of 64 tokens with 8 completions of 192: by what the compiler says, rows of 512 against one of 1600."""
    monkeypatch.setattr(flash, "BLOCK", 64)  # or the scores of two blocks are most of it, for a model as small as this
    model = dataclasses.replace(MODEL, remat=True)
    policy, objective = Policy(model, chunk=64), objectives.make("ppo_clip")
    rng = np.random.default_rng(0)
    mask = np.ones((1, 8, 192), bool)
    forest, leaves = of_groups(rng.integers(0, 40, (1, 64)), np.ones((1, 64), bool), rng.integers(0, 40, mask.shape), mask)
    shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    params, view = shapes(fresh_params()), jax.ShapeDtypeStruct(mask.shape, jnp.float32)
    parts = accumulate.make_parts(policy, objective, KEEP)

    def temporary(length):
        packed = pack(forest, leaves, mask, [length])
        [(rows, start), *_], index = placed(policy, 1, packed)
        compiled = parts.accumulate.lower(params, params, None, shapes(rows), index, start, (view, view, None)).compile()
        return packed.node.shape[0], compiled.memory_analysis().temp_size_in_bytes

    (whole_rows, whole), (part_rows, part) = temporary(1600), temporary(512)
    assert (whole_rows, part_rows) == (1, 4) and part < 0.45 * whole
