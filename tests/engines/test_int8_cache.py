"""Caches in eight bits: their vectors, attention over them, and both samplers of tiny models with them."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import DENSE, KEY, MODELS, G, P, S, T, V, drain, params, request

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.engines.engine import SlotEngine
from jaxrl_llm.kernels.int8 import Int8, int8
from jaxrl_llm.models.attention import grouped_attention
from jaxrl_llm.planning.plan import Work, sampler_memory
from jaxrl_llm.planning.presets import MODELS as PUBLISHED

SOME = "dense", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "dense")
SMALL = {name: dataclasses.replace(model, int8_cache=True) for name, model in MODELS.items()}


def dense(x):
    return x.numbers * x.scale


@pytest.mark.parametrize("axis", (-1, -2))
def test_each_vector_has_its_own_scale_and_an_error_of_half_a_step(axis):
    x = jax.random.normal(jax.random.key(0), (3, 4, 5)) * jnp.array([1e-3, 1, 1e3])[:, None, None]
    x = x.at[1].set(0.0)
    small = int8(x, axis)
    assert small.numbers.dtype == jnp.int8 and small.shape == x.shape and small.scale.shape[axis] == 1
    most = np.abs(x).max(axis, keepdims=True)
    np.testing.assert_allclose(small.scale, most / 127, rtol=1e-6)
    assert (np.abs(dense(small) - x) <= most / 254 * 1.001).all()
    assert (np.abs(small.numbers).max(axis)[most.squeeze(axis) > 0] == 127).all() and not np.any(dense(small)[1])


@pytest.mark.parametrize("softcap", (None, 2.0))
def test_attention_reads_the_numbers_with_their_scales(softcap):
    """Keys of rows, of groups and of several groups, as for the same vectors in float32."""
    keys = iter(jax.random.split(jax.random.key(1), 9))
    def normal(*shape):
        return jax.random.normal(next(keys), shape)
    queries, (own_k, own_v) = normal(4, 3, 2, 4, 8), (int8(normal(4, 2, 3, 6, 8), -1) for _ in range(2))
    shared = [int8(normal(n, 2, 5, 8), -1) for n in (4, 4, 2, 2)]
    mask, seen = jax.random.bernoulli(next(keys), 0.7, (4, 3, 2, 6)), jax.random.bernoulli(next(keys), 0.7, (4, 3, 2, 5))

    def attend(of):
        others = [(of(shared[i]), of(shared[i + 1]), seen) for i in (0, 2)]
        return grouped_attention(queries, of(own_k), of(own_v), mask, *others, scale=0.3, softcap=softcap)
    np.testing.assert_allclose(attend(lambda x: x), attend(dense), atol=1e-5)


@pytest.mark.parametrize("name", SOME)
def test_decoding_is_near_to_that_of_whole_caches(name):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (P, G, T)))
    prompts, real = np.random.default_rng(1).integers(0, V, (P, S)), np.arange(S) >= np.array([0, 1, 4])[:, None]

    def states(model):
        prompt, _ = model.prefill(params(name), prompts, real)
        layers = model.unstack_layers(params(name))

        def step(cache, t):
            state, cache = model.decode_step(params(name), layers, tokens[:, :, t], t, prompt, cache)
            return cache, state
        cache, found = jax.lax.scan(step, model.empty_completions(prompt, G, T), jnp.arange(T))
        assert all(isinstance(x, Int8) for x in (*cache.keys, *prompt.values)) or not model.int8_cache
        return np.asarray(found)

    whole, small = states(MODELS[name]), states(SMALL[name])
    assert 0 < np.linalg.norm(small - whole) < 0.02 * np.linalg.norm(whole)


@pytest.mark.slow
def test_long_completions_are_compacted_and_lengthened():
    """32 rows x 70 tokens: caches of two lengths, then half of the rows; log-probs are near those of a plain forward pass."""
    prompts, real, limit = np.random.default_rng(2).integers(0, V, (8, S)), np.ones((8, S), bool), 70
    limits = np.where(np.arange(8) < 6, 20, limit)
    made = generate(SMALL["dense"], params(), prompts, real, row_keys(KEY, np.arange(32).reshape(8, 4)), Sampling(0.8),
                    max_tokens=limit, stop_ids=(), limits=limits)
    assert np.array_equal(made.mask.sum(-1), np.repeat(limits[:, None], 4, 1))
    rows = np.concatenate([np.repeat(prompts, 4, 0), np.asarray(made.tokens).reshape(32, -1)], axis=1)
    normed, _, _ = DENSE.hidden_states(params(), rows, np.ones(rows.shape, bool))
    plain = jax.nn.log_softmax(DENSE.logits(params(), normed[:, S - 1:-1]) / 0.8)
    plain = jnp.take_along_axis(plain, rows[:, S:, None], axis=-1)[..., 0]
    gap = np.where(np.asarray(made.mask).reshape(32, -1), np.asarray(made.logprobs).reshape(32, -1) - plain, 0)
    assert 0 < np.abs(gap).max() < 1 and np.abs(gap).mean() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_keeps_them_whatever_its_slots(name):
    """Rows whose prompts are read at once depend on no schedule, pauses included; all slots hold eight bits."""
    found = []
    for slots in (2, 12):
        one = SlotEngine(SMALL[name], params(name), KEY, slots=slots, slot_tokens=S + T, chunks=(4,))
        one.submit(*(request(uid, stop_tokens=()) for uid in range(P * G)))
        one.step()
        assert all(x.numbers.dtype == jnp.int8 for x in (*one._caches.slots.keys, *one._caches.slots.values))
        paused = one.pause(one.running[0])
        for _ in range(8):  # others take its slot, and its cache waits on the host
            one.step()
        one.resume(paused.uid)
        found.append({uid: node.tokens.tolist() for uid, [node] in drain(one).items()})
        assert found[-1][paused.uid][:len(paused.tokens)] == paused.tokens.tolist()
    assert found[0] == found[1] and len(found[0]) == P * G


def test_the_plan_counts_their_bytes():
    c, mesh = PUBLISHED["qwen3_8b"], {"data": 1, "fsdp": 1, "tensor": 1}
    whole, small = (sampler_memory(c, Work(8, 8, 512, 1024, dtype="bfloat16", int8_cache=flag), mesh)["caches"]
                    for flag in (False, True))
    assert small == whole * (128 + 4) / 256
