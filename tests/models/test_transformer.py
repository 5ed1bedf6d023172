"""Packed rows, plain rows and decoding are one model; causality and windows by gradients; bf16; recomputation."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.models.transformer import last_index, positions_of

P, G, S, T = 2, 3, 6, 7
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what takes time


def batch(seed=0):
    """Two prompts (left padding; right padding) and three completions each, of different lengths, one of them full."""
    random = np.random.default_rng(seed)
    prompt_mask = np.ones((P, S), bool)
    prompt_mask[0, :2], prompt_mask[1, 3:] = False, False
    mask = np.arange(T) < np.array([[7, 3, 1], [5, 7, 2]])[..., None]
    return jnp.asarray(random.integers(0, 64, (P, S))), jnp.asarray(prompt_mask), \
        jnp.asarray(random.integers(0, 64, (P, G, T))), jnp.asarray(mask)


def plain_states(model, params, prompt_tokens, prompt_mask, tokens, mask, pool=None):
    """What `packed_states` promises, from P * G plain rows `[prompt, completion]` written out one by one."""
    def copies(x):
        return jnp.repeat(x, G, axis=0)
    rows = jnp.concatenate([copies(prompt_tokens), tokens.reshape(P * G, T)], axis=1)
    rows_mask = jnp.concatenate([copies(prompt_mask), mask.reshape(P * G, T)], axis=1)
    states, _, pooled = model.hidden_states(params, rows, rows_mask, pool=pool)
    first = jnp.take_along_axis(states[:, :S], last_index(copies(prompt_mask))[:, None, None], axis=1)
    return jnp.concatenate([first, states[:, S:-1]], axis=1).reshape(P, G, T, -1), pooled


def decoded_states(model, params, prompt_tokens, prompt_mask, tokens):
    prompt, first = model.prefill(params, prompt_tokens, prompt_mask)
    layers = model.unstack_layers(params)

    def step(cache, t):
        state, cache = model.decode_step(params, layers, tokens[:, :, t], t, prompt, cache)
        return cache, state

    _, states = jax.lax.scan(step, model.empty_completions(prompt, G, T), jnp.arange(T - 1))
    first = jnp.broadcast_to(first[:, None, None], (P, G, 1, first.shape[-1]))
    return jnp.concatenate([first, jnp.moveaxis(states, 0, 2)], axis=2)


def loss_of(model, states, params, tokens, mask):
    logprobs = jax.nn.log_softmax(model.logits(params, states))
    chosen = jnp.take_along_axis(logprobs, tokens[..., None], -1)[..., 0]
    weights = jnp.sin(1.0 + jnp.arange(P * G * T, dtype=jnp.float32)).reshape(P, G, T)  # every token has another weight
    return jnp.sum(chosen * weights * mask)


def close(actual, expected, tolerance):
    scale = np.abs(np.asarray(expected, np.float32)).max()
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=tolerance * scale,
                               rtol=0)


@pytest.mark.parametrize("name", ("qwen2", "gemma3"))
def test_three_paths_agree_in_values_and_gradients(pair, name):
    model, params = pair(name).model, pair(name).params
    prompt_tokens, prompt_mask, tokens, mask = batch()

    def packed(params):
        states, _ = model.packed_states(params, prompt_tokens, prompt_mask, tokens)
        return loss_of(model, states, params, tokens, mask), states

    def plain(params):
        states, _ = plain_states(model, params, prompt_tokens, prompt_mask, tokens, mask)
        return loss_of(model, states, params, tokens, mask), states

    @jit
    def everything(params):
        def of(f):
            return jax.value_and_grad(f, has_aux=True)(params)
        return of(packed), of(plain), decoded_states(model, params, prompt_tokens, prompt_mask, tokens)

    ((loss, states), gradients), ((plain_loss, expected), plain_gradients), decoded = everything(params)
    real = np.asarray(mask)
    close(np.asarray(states)[real], np.asarray(expected)[real], 1e-5)
    close(np.asarray(decoded)[real], np.asarray(expected)[real], 1e-5)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    for path, expected in jax.tree_util.tree_leaves_with_path(plain_gradients):
        assert np.abs(expected).max() > 0, path
    jax.tree.map(lambda a, b: close(a, b, 1e-5), gradients, plain_gradients)


def test_last_tokens_are_not_computed(pair):
    model, params = pair("qwen2").model, pair("qwen2").params
    prompt_tokens, prompt_mask, tokens, _ = batch()
    def program(pool):
        return str(jax.make_jaxpr(
            lambda p: model.packed_states(p, prompt_tokens, prompt_mask, tokens, pool=pool))(params))
    def rows(n):
        return f"f32[{P},{n},{model.config.hidden_size}]"
    all_rows, needed = rows(S + G * T), rows(S + G * (T - 1))
    assert needed in program(None) and all_rows not in program(None)
    pooled = program(lambda prompt, completions: completions.mean(2))  # features read every state
    assert all_rows in pooled and needed not in pooled


@pytest.mark.slow
def test_completions_of_one_token(pair):
    model, params = pair("qwen2").model, pair("qwen2").params
    prompt_tokens, prompt_mask, tokens, _ = batch()
    states, _ = model.packed_states(params, prompt_tokens, prompt_mask, tokens[:, :, :1])
    whole, _ = model.packed_states(params, prompt_tokens, prompt_mask, tokens)
    assert states.shape[:3] == (P, G, 1)
    close(states, whole[:, :, :1], 1e-6)


@pytest.mark.slow
def test_recomputation_leaves_the_gradient(pair):
    params = pair("qwen3").params
    prompt_tokens, prompt_mask, tokens, mask = batch()

    def gradient(remat):
        model = dataclasses.replace(pair("qwen3").model, remat=remat)

        def loss(params):
            states, _ = model.packed_states(params, prompt_tokens, prompt_mask, tokens)
            return loss_of(model, states, params, tokens, mask)

        return jax.grad(loss)

    stored, recomputed = jit(lambda p: (gradient(False)(p), gradient(True)(p)))(params)
    jax.tree.map(lambda a, b: close(a, b, 1e-6), recomputed, stored)
    stored, recomputed = (jit(gradient(remat)).lower(params).compile().memory_analysis() for remat in (False, True))
    assert recomputed.temp_size_in_bytes < stored.temp_size_in_bytes


def test_softmax_of_the_forward_pass_is_not_taken_again(pair):
    params = pair("qwen3").params

    def maxima(remat):
        model = dataclasses.replace(pair("qwen3").model, remat=remat)
        def loss(params):
            return model.packed_states(params, *batch()[:3])[0].sum()
        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("reduce_max")

    assert maxima(remat=True) == 2 * maxima(remat=False)


def test_packed_pool_sees_prompt_and_completions(pair):
    model, params = pair("gemma3").model, pair("gemma3").params
    prompt_tokens, prompt_mask, tokens, mask = batch()
    def average(x, m):
        return (x * m[..., None]).sum(-2) / m.sum(-1)[..., None]
    def pool(prompt, completions):
        return (average(prompt, prompt_mask), average(completions, mask))
    packed = jit(lambda p: model.packed_states(p, prompt_tokens, prompt_mask, tokens, pool=pool)[1])
    plain = jit(lambda p: plain_states(model, p, prompt_tokens, prompt_mask, tokens, mask, pool=lambda x: x)[1])
    (of_prompts, of_completions), rows = packed(params), plain(params)
    rows = np.asarray(rows).reshape(3, P, G, S + T, -1)
    assert of_prompts.shape == (3, P, 32) and of_completions.shape == (3, P, G, 32)
    close(of_prompts, average(rows[:, :, 0, :S], np.asarray(prompt_mask)), 1e-5)
    close(of_completions, average(rows[..., S:, :], np.asarray(mask)), 1e-5)


def dependence(states_of_embed, embed, tokens):
    """`bool[states, tokens]`: which state has a gradient to which token's embedding (every token id occurs once)."""
    gradient = jit(jax.jacrev(states_of_embed))(embed)  # [states, V, D]
    return np.abs(np.asarray(gradient)).max(-1)[:, np.asarray(tokens).ravel()] > 0


def single_layer(local: bool) -> tuple[Transformer, dict]:
    config = ModelConfig(vocab_size=32, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
                         mlp_size=24, window=3 if local else None, local_layers=(local,))
    model = Transformer(config)
    return model, jax.tree.map(lambda w: w + 0.3 * jnp.sin(jnp.arange(w.size, dtype=jnp.float32)).reshape(w.shape),
                               jit(model.init)(jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize("local", (False, True))
def test_plain_rows_see_the_past_and_no_more(local):
    model, params = single_layer(local)
    tokens = jnp.asarray([[9, 4, 17, 30, 2, 11, 25, 8]])
    mask = jnp.asarray([[False] + [True] * 7])
    def states(embed):
        return model.hidden_states(params | {"embed": embed}, tokens, mask)[0][0].sum(-1)
    seen = dependence(states, params["embed"], tokens)[1:, 1:]
    i, j = np.arange(7)[:, None], np.arange(7)
    np.testing.assert_array_equal(seen, (j <= i) & ((i - j < 3) | (not local)))


@pytest.mark.slow
@pytest.mark.parametrize("local", (False, True))
def test_completions_see_the_prompt_and_themselves_and_not_each_other(local):
    model, params = single_layer(local)
    prompt, completions = jnp.asarray([[31, 5, 9, 1]]), jnp.arange(10, 22).reshape(1, 3, 4)
    prompt_mask = jnp.asarray([[False, True, True, True]])

    def states(embed):
        out, _ = model.packed_states(params | {"embed": embed}, prompt, prompt_mask, completions)
        return out[0].reshape(12, -1).sum(-1)

    seen = dependence(states, params["embed"], jnp.concatenate([prompt.ravel(), completions.ravel()]))
    expected = np.zeros((3, 4, 16), bool)
    for g in range(3):
        for t in range(4):  # the state before token t is at position 2 + t of the row: 3 prompt tokens, then its own
            row = [1, 2, 3, *(4 + 4 * g + np.arange(4))]
            for position, column in enumerate(row):
                expected[g, t, column] = position <= 2 + t and (not local or 2 + t - position < 3)
    np.testing.assert_array_equal(seen.reshape(3, 4, 16), expected)


def test_more_padding_changes_nothing(pair):
    model, params = pair("gemma3").model, pair("gemma3").params
    prompt_tokens, prompt_mask, tokens, mask = batch()
    run = jit(lambda *batch: model.packed_states(params, *batch)[0])
    states = run(prompt_tokens, prompt_mask, tokens)
    def pad(x, n, value):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [n], constant_values=value)
    wider = run(pad(prompt_tokens, (3, 1), 7), pad(prompt_mask, (3, 1), False), pad(tokens, (0, 2), 5))
    close(np.asarray(wider)[:, :, :T][np.asarray(mask)], np.asarray(states)[np.asarray(mask)], 1e-6)


@pytest.mark.slow
def test_bfloat16_runs_close_to_float32(pair):
    model, params = pair("qwen3").model, pair("qwen3").params
    half = dataclasses.replace(model, dtype=jnp.bfloat16)
    prompt_tokens, prompt_mask, tokens, mask = batch()

    @jit
    def run(params):
        def packed(m):
            return m.packed_states(params, prompt_tokens, prompt_mask, tokens)[0]
        return packed(model), packed(half), decoded_states(half, params, prompt_tokens, prompt_mask, tokens)

    expected, states, decoded = run(params)
    assert states.dtype == decoded.dtype == jnp.bfloat16 and half.logits(params, states).dtype == jnp.float32
    expected = np.asarray(expected)[np.asarray(mask)]
    for half_states in (states, decoded):
        error = np.asarray(half_states, np.float32)[np.asarray(mask)] - expected
        assert 1e-4 < np.sqrt((error**2).mean() / (expected**2).mean()) < 0.05


def test_initial_parameters():
    config = ModelConfig(vocab_size=500, hidden_size=64, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=16,
                         mlp_size=128, tie_embeddings=False, norm_offset=1.0, qkv_bias=True)
    model = Transformer(config)
    params = jit(model.init)(jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), model.abstract_params()) == \
        jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    layers = params["layers"]
    np.testing.assert_allclose(params["embed"].std(), 0.02, rtol=0.05)
    np.testing.assert_allclose(layers["q"]["kernel"].std(), 0.02, rtol=0.05)
    np.testing.assert_allclose(layers["o"]["kernel"].std(), 0.02 / 4, rtol=0.05)  # sqrt(2 * 8 layers) = 4
    np.testing.assert_allclose(layers["down"]["kernel"].std(), 0.02 / 4, rtol=0.05)
    assert not layers["q"]["bias"].any() and not layers["mlp_norm"]["scale"].any()  # zero plus the offset is one
    assert np.abs(layers["q"]["kernel"][0] - layers["q"]["kernel"][1]).max() > 0.01  # every layer has its own draw


def test_positions_count_real_tokens():
    mask = jnp.asarray([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]], bool)
    np.testing.assert_array_equal(positions_of(mask), [[0, 0, 0, 1, 2], [0, 1, 1, 1, 1], [0, 0, 1, 2, 2]])
    np.testing.assert_array_equal(last_index(mask), [4, 1, 3])


@pytest.mark.parametrize("change, message", [
    (dict(num_kv_heads=3), "num_heads=4 is not a multiple of num_kv_heads=3"),
    (dict(head_dim=7), "head_dim=7 is odd"),
    (dict(activation="relu"), "activation='relu'; allowed"),
    (dict(local_layers=(True,)), "local_layers names 1 layers, num_layers is 2"),
    (dict(local_layers=(True, False)), "window is None"),
])
def test_impossible_configs_are_refused(change, message):
    fine = dict(vocab_size=8, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=24)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fine | change)
