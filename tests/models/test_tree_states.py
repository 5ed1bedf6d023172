"""Rows of trees give the states and gradients of plain rows, for all families, in blocks of queries, within little memory."""
import dataclasses
import functools

import forests
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.packing import pack
from jaxrl_llm.kernels import attention, flash
from jaxrl_llm.learning.accumulate import placed
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import ModelConfig, RopeScaling, Transformer, lora

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
EVERYTHING = ModelConfig(  # soft caps, biases, norms over whole projections, windows and the rest
    vocab_size=40, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=48, pre_norms=False,
    post_norms=True, qk_norm=True, qk_norm_whole=True, qkv_bias=True, o_bias=True, mlp_bias=True, tie_embeddings=False,
    residual_scale=0.6, attention_softcap=1.5, logit_softcap=2.0, logit_divisor=1.5, rotary_factor=0.75, window=4,
    local_layers=(True, False), rotary_layers=(True, False))


def normal(tree):
    keys = iter(jax.random.split(jax.random.key(0), 99))
    return jax.tree.map(lambda leaf: 0.4 * jax.random.normal(next(keys), leaf.shape), tree)


@functools.cache
def both_of(model):
    """Log-probs, entropies and gradients, of adapters where there are some: from packed rows and from plain ones."""
    policy = Policy(model, temperature=0.7, chunk=16)

    @jit
    def both(params, adapters, pull, rows, index, plain):
        def place(tree):
            return (tree, None) if adapters is None else (params, tree)

        def packed_rows(tree):
            logprobs, entropies, _ = policy.packed_logprobs(*place(tree), rows, index)
            return (logprobs * pull).sum(), (logprobs, entropies)

        def plain_rows(tree):
            weights, lora = place(tree)
            logprobs, entropies = forests.plain_logprobs(model, weights, plain, 0.7, lora)
            return (logprobs * pull).sum(), (logprobs, entropies)

        tree = params if adapters is None else adapters
        return tuple(jax.value_and_grad(f, has_aux=True)(tree) for f in (packed_rows, plain_rows))

    return both


def agree(model, params, case, packed, adapters=None, length=None):
    pull = np.sin(1.0 + np.arange(case.mask.size, dtype=np.float32)).reshape(case.mask.shape)  # each token has another weight
    result, wanted = both_of(model)(params, adapters, pull, packed.rows, packed.index, forests.plain_rows(case, length))
    for (path, a), b in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(wanted), strict=True):
        assert np.abs(b).max() > 0, path
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), rtol=0, err_msg=jax.tree_util.keystr(path))


def packed_of(case, length=None):
    return pack(case.forest, case.leaves, case.mask, [length or case.longest() + 2])


@pytest.mark.slow
@pytest.mark.parametrize("make", (forests.group, forests.conversations))
@pytest.mark.parametrize("name", ("qwen2", "gemma3"))
def test_rows_of_groups_and_conversations_equal_plain_rows(pair, monkeypatch, name, make):
    monkeypatch.setattr(attention, "BLOCK", 5)  # of plain rows
    monkeypatch.setattr(flash, "BLOCK", 5)
    case = make(np.random.default_rng(1))
    packed = packed_of(case)
    assert packed.node.shape[0] > 1  # both straddle rows
    agree(pair(name).model, pair(name).params, case, packed)


@pytest.mark.slow
def test_rows_of_any_trees_equal_plain_rows(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 7)  # of plain rows
    monkeypatch.setattr(flash, "BLOCK", 7)
    model = Transformer(EVERYTHING)
    params, straddling, checked = normal(model.abstract_params()), 0, 0
    for seed in range(60):
        case = forests.search(np.random.default_rng([seed, 4]))
        if not case.mask.any() or case.longest() > 12 or case.mask.shape[2] > 12:
            continue
        case = case._replace(mask=np.pad(case.mask, ((0, 0), (0, 0), (0, 12 - case.mask.shape[2]))))
        packed = pack(case.forest, case.leaves, case.mask, [12], multiple=4)
        assert len(packed.node) == 4
        agree(model, params, case, packed, length=12)  # all of one shape: one program
        in_rows = [set(row[row >= 0]) for row in packed.node]
        checked, straddling = checked + 1, straddling + (sum(map(len, in_rows)) > len(set().union(*in_rows)))
    assert checked > 12 and straddling > 3


@pytest.mark.slow
def test_mixtures_of_experts_and_their_work(pair):
    model, params, case = pair("qwen2_moe").model, pair("qwen2_moe").params, forests.group(np.random.default_rng(2))
    packed = packed_of(case, 64)
    agree(model, params, case, packed)
    _, _, loads = jit(lambda p: Policy(model).packed_logprobs(p, None, packed.rows, packed.index))(params)
    assert loads.chosen.shape == (1, 3, 4)
    np.testing.assert_allclose(loads.chosen.sum(-1), 2 * len(case.forest.tokens))  # two of four experts, no padding
    np.testing.assert_allclose(loads.probs.sum(-1), len(case.forest.tokens), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remat", (False, True))
def test_gradients_of_adapters(pair, remat):
    model, params = dataclasses.replace(pair("qwen3").model, remat=remat), pair("qwen3").params
    adapters = normal(lora.init(jax.random.key(0), params, rank=2, alpha=1.0))  # A and B of 1 are large as they are
    case = forests.conversations(np.random.default_rng(3))
    agree(model, params, case, packed_of(case), adapters)


def test_padding_is_neither_seen_nor_dangerous(pair):
    model, params, case = pair("gemma3").model, pair("gemma3").params, forests.group(np.random.default_rng(0))
    packed = pack(case.forest, case.leaves, case.mask, [64], multiple=2)
    rows = packed.rows
    run = jit(jax.value_and_grad(lambda p, tokens: jnp.where(
        packed.node[..., None] >= 0, model.tree_states(p, tokens, rows.positions, rows.end), 0).sum()))
    value, gradient = run(params, rows.tokens)
    other, other_gradient = run(params, np.where(packed.node < 0, 7, rows.tokens))
    assert value == other and all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    jax.tree.map(np.testing.assert_array_equal, gradient, other_gradient)


@pytest.mark.slow
def test_a_rope_that_changes_with_length_limits_trajectories_not_rows():
    case = forests.group(np.random.default_rng(4))  # the longest trajectory has 11 tokens, all of them together 34
    packed = packed_of(case, 40)
    def model_of(context):
        scaling = RopeScaling("dynamic", factor=2.0, original_max_positions=context)
        return Transformer(ModelConfig(vocab_size=40, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
                                       mlp_size=24, rope_scaling=scaling))
    assert packed.node.shape == (1, 40) and case.longest() == 11
    model = model_of(11)
    placed(Policy(model), 1, packed)
    agree(model, normal(model.abstract_params()), case, packed)
    with pytest.raises(ValueError, match="a sequence of 11 tokens: .* changes beyond 10, which is not supported"):
        placed(Policy(model_of(10)), 1, packed)


@pytest.mark.slow
def test_scores_of_all_pairs_never_exist_at_once(monkeypatch):
    monkeypatch.setattr(flash, "BLOCK", 64)
    model = Transformer(ModelConfig(vocab_size=32, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
                                    mlp_size=24, window=8, local_layers=(True,)), remat=True)

    def temporary(length):
        row = jax.ShapeDtypeStruct((1, length), jnp.int32)
        def loss(p, *rows):
            return (model.tree_states(p, *rows) ** 2).sum()
        compiled = jax.jit(jax.grad(loss)).lower(model.abstract_params(), row, row, row).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 2.5 * temporary(1024)
    assert temporary(2048) < 2048 * 2048 * 4  # less than one head's scores, or than the mask of pairs
