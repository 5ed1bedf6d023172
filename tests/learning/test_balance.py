"""The balancing loss: by hand, against transformers', over micro-batches, and that it balances."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.optimizers import make_optimizer
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.step import make_update
from jaxrl_llm.models import Experts, ModelConfig, Transformer
from jaxrl_llm.models.moe import Loads, max_load
from jaxrl_llm.objectives import composed, terms
from jaxrl_llm.objectives.terms.balance import uneven
from jaxrl_llm.setup import setup, start
from jaxrl_llm.setup.config import default_config

P, G, S, T, V, E, K = 4, 2, 3, 4, 24, 4, 2
MODEL = Transformer(ModelConfig(vocab_size=V, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
                                mlp_size=12, experts=Experts(E, K, 12)))
OPTIMIZER, _ = make_optimizer(3e-2, 100, eps=1e-3)  # as large as to be smooth in the gradient
CLIPPED = objectives.make("ppo_clip")
ADVANTAGES = np.broadcast_to(np.array([[1.0, -1.0], [0.5, 2.0], [0.0, 0.0], [-2.0, 1.5]], np.float32)[..., None], (P, G, T))


def test_by_hand():
    loads = Loads(jnp.zeros((1, 2, 2)), jnp.array([[[2.4, 1.6], [1.0, 3.0]]]))  # of four tokens in two layers
    chosen = jnp.array([[3.0, 1.0], [1.0, 3.0]])
    # 2 (3/4 * 0.6 + 1/4 * 0.4) = 1.1 and 2 (1/4 * 1/4 + 3/4 * 3/4) = 1.25
    assert uneven(loads, chosen, 1) == pytest.approx((1.1 + 1.25) / 2)
    assert max_load(chosen) == pytest.approx(1.5)
    even = Loads(jnp.zeros((1, 1, 2)), jnp.array([[[2.0, 2.0]]]))
    assert uneven(even, jnp.array([[4.0, 4.0]]), 2) == pytest.approx(2)  # each of four tokens chooses both
    nobody = Loads(jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 2)))
    assert uneven(nobody, jnp.zeros((1, 2)), 2) == 0 and max_load(jnp.zeros((1, 2))) == 0


def test_of_one_layer_equals_transformers():
    random = np.random.default_rng(0)
    logits, mask = random.normal(size=(3 * 7, E)).astype(np.float32), random.random((3, 7)) < 0.7
    wanted = load_balancing_loss_func((torch.tensor(logits),), E, K, torch.tensor(mask).long())
    probs = np.asarray(jax.nn.softmax(logits))
    chosen = np.asarray(jax.nn.one_hot(jax.lax.top_k(logits, K)[1], E).sum(1))
    def of_rows(x):
        return (x.reshape(3, 7, E) * mask[..., None]).sum(1)[:, None]
    loads = Loads(of_rows(chosen), of_rows(probs))
    assert uneven(loads, loads.chosen.sum(0), K) == pytest.approx(float(wanted), rel=1e-5)


def fresh_state():
    params = MODEL.init(jax.random.key(0))
    params["layers"] = jax.tree.map(lambda x: x * 6 if x.ndim > 2 else x, params["layers"])
    return state_lib.create(params | {"embed": params["embed"] * 10}, None, OPTIMIZER, advantages.make("grpo"), CLIPPED,
                            jax.random.key(1))


@functools.cache
def batch():
    """Prompts with padding, completions of every length, one rollout and one whole group that are only padding."""
    random = np.random.default_rng(3)
    prompt_mask, valid = np.ones((P, S), bool), np.ones((P, G), bool)
    prompt_mask[0, 0], prompt_mask[1, 2], valid[0, 1], valid[2] = False, False, False, False
    lengths = np.array([[4, 2], [1, 3], [4, 4], [2, 4]])
    return Rollouts(
        mask=np.arange(T) < lengths[..., None], valid=valid, tokens=random.integers(0, V, (P, G, T)).astype(np.int32),
        prompt_tokens=random.integers(0, V, (P, S)).astype(np.int32), prompt_mask=prompt_mask)


@functools.cache
def update_of(micro_batches, weight):
    objective = composed(CLIPPED, (terms.make("balance", coef=weight),))
    return make_update(Policy(MODEL, chunk=24), objective, OPTIMIZER, clip_norm=None, micro_batches=micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("weight", (0.0, 0.5))
def test_micro_batches_change_nothing(weight):
    whole, metrics = update_of(1, weight)(fresh_state(), batch(), ADVANTAGES)
    parts, part_metrics = update_of(4, weight)(fresh_state(), batch(), ADVANTAGES)
    for (path, a), b in zip(jax.tree.leaves_with_path(parts.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6, rtol=0, err_msg=jax.tree_util.keystr(path))
    assert metrics.keys() == part_metrics.keys() and ("moe/balance_loss" in metrics) == bool(weight)
    for name in metrics:
        assert part_metrics[name] == pytest.approx(float(metrics[name]), rel=1e-4, abs=1e-6), name
    assert 1 < metrics["moe/max_load"] <= E / K


@pytest.mark.slow
def test_it_balances_and_pads_do_not_count():
    skewed, nothing, result = fresh_state(), np.zeros_like(ADVANTAGES), []
    skewed.params["embed"] = skewed.params["embed"].at[:, 0].add(1.0)  # what all tokens have, the first expert likes
    router = skewed.params["layers"]["router"]
    router["kernel"] = router["kernel"].at[:, 0, 0].add(2.0)
    state = jax.tree.map(jnp.copy, skewed)
    for _ in range(30):
        state, metrics = update_of(1, 0.5)(state, batch(), nothing)
        result.append({name: float(metrics[name]) for name in ("moe/balance_loss", "moe/max_load")})
    assert result[0]["moe/balance_loss"] > K + 0.3 > K + 0.1 > result[-1]["moe/balance_loss"]
    assert result[0]["moe/max_load"] == E / K and result[-1]["moe/max_load"] < 1.6
    other = batch()
    tokens, prompts = other.tokens.copy(), other.prompt_tokens.copy()
    tokens[0, 1], tokens[2], tokens[1, 0, 1:], prompts[2], prompts[0, 0] = 7, 7, 7, 7, 7  # all of it padding
    _, metrics = update_of(1, 0.5)(skewed, other.replace(tokens=tokens, prompt_tokens=prompts), nothing)
    assert metrics["moe/balance_loss"] == pytest.approx(result[0]["moe/balance_loss"], rel=1e-6)


def test_a_dense_model_has_nothing_to_balance():
    c = default_config()
    c.task, c.objective = "arithmetic(level=digit)", "+ balance(0.01)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 16, 1, 2, 16
    with pytest.raises(ValueError, match="'balance' is for experts, and this model has none; leave it out"):
        setup.build(c)
    c.objective = "+ balance(-0.1)"
    with pytest.raises(ValueError, match="term 'balance': coef=-0.1; give 0 or more"):
        setup.build(c)


def test_sizes_from_scratch():
    c = default_config()
    c.model.experts, c.model.mlp_size = 8, 384
    made = start.model_config(c.model, 259)
    assert made.experts == Experts(8, 2, 192) and made.mlp_size == 192 and made.family == "mixtral"
    c.model.expert_size, c.model.experts_per_token = 40, 3
    assert start.model_config(c.model, 259).experts == Experts(8, 3, 40)
