"""The same numbers as transformers: logits, hidden states and greedy continuations of every family."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

FAMILIES = ("llama", "llama_untied", "llama_llama3_rope", "llama_linear_rope", "qwen2", "qwen2_sliding", "qwen3",
            "gemma3")
N, NEW = 20, 64
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what takes time


def padded_rows():
    """Rows without padding, with left, right and both paddings."""
    mask = np.ones((4, N), bool)
    mask[1, :7], mask[2, 9:], mask[3, :3], mask[3, 15:] = False, False, False, False
    return np.random.default_rng(0).integers(0, 64, (4, N)), mask


def reference(model, tokens, mask):
    """Logits and hidden states of transformers, positions counted over real tokens."""
    mask = torch.tensor(mask)
    with torch.no_grad():
        out = model(torch.tensor(tokens), attention_mask=mask.long(), position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                    output_hidden_states=True)
    return out.logits.numpy(), np.stack([h.numpy() for h in out.hidden_states])


def greedy(model, params, prompt_tokens, prompt_mask, new):
    """`new` greedy tokens of every prompt, by prefill and decode steps alone: `[P, new]`."""

    @jit
    def run(params, prompt_tokens, prompt_mask):
        prompt, state = model.prefill(params, prompt_tokens, prompt_mask)
        layers = model.unstack_layers(params)

        def step(carry, t):
            cache, state = carry
            tokens = jnp.argmax(model.logits(params, state), -1)
            state, cache = model.decode_step(params, layers, tokens, t, prompt, cache)
            return (cache, state), tokens[:, 0]

        start = (model.empty_completions(prompt, 1, new), state[:, None])
        return jax.lax.scan(step, start, jnp.arange(new))[1].T

    return np.asarray(run(params, jnp.asarray(prompt_tokens), jnp.asarray(prompt_mask)))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_layer_means_equal_transformers(pair, name):
    p = pair(name)
    tokens, mask = padded_rows()
    expected, hidden = reference(p.torch, tokens, mask)

    @jit
    def run(params, tokens, mask):
        def mean(x):
            return (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        states, _, pooled = p.model.hidden_states(params, tokens, mask, pool=mean)
        return p.model.logits(params, states), states, pooled

    logits, states, pooled = run(p.params, jnp.asarray(tokens), jnp.asarray(mask))
    scale = np.abs(expected[mask]).max()
    assert scale > 1.0
    np.testing.assert_allclose(np.asarray(logits)[mask], expected[mask], atol=1e-4 * scale, rtol=0)
    # transformers reports the last layer after the final norm
    np.testing.assert_allclose(np.asarray(states)[mask], hidden[-1][mask], atol=1e-4 * np.abs(hidden[-1]).max(), rtol=0)
    means = (hidden * mask[..., None]).sum(2) / mask.sum(1)[:, None]
    assert pooled.shape == (3, 4, 32)
    np.testing.assert_allclose(pooled[:-1], means[1:-1], atol=1e-4 * np.abs(means[1:-1]).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("llama_llama3_rope", "qwen2_sliding", "qwen3", "gemma3"))
def test_greedy_continuations_equal_transformers(pair, name):
    p = pair(name)
    tokens = np.random.default_rng(1).integers(0, 64, (3, 9))
    lengths = np.array([9, 6, 2])
    left = np.arange(9) >= 9 - lengths[:, None]
    padded_right = np.stack([np.roll(row, n) for row, n in zip(tokens, lengths, strict=True)])
    both_sides = np.concatenate([tokens, padded_right]), np.concatenate([left, np.arange(9) < lengths[:, None]])
    chosen = greedy(p.model, p.params, *both_sides, NEW)
    np.testing.assert_array_equal(chosen[:3], chosen[3:])
    rows, mask = np.concatenate([tokens, chosen[:3]], axis=1), np.pad(left, ((0, 0), (0, NEW)), constant_values=True)
    # every token is transformers' greedy choice after those before it, and so the whole continuation is its own
    np.testing.assert_array_equal(chosen[:3], reference(p.torch, rows, mask)[0].argmax(-1)[:, 8:-1])
    assert len(np.unique(chosen)) > 5  # a continuation that distinguishes models
