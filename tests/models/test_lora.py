"""Adapters: nothing at the start, the gradient is theirs alone, merging them changes nothing."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import lora

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what takes time
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 9)))
MASK = jnp.ones((2, 9), bool)


def trained(adapters):
    """Adapters as after some steps: b no longer zero."""
    return jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), adapters)


def test_fresh_adapters_change_nothing_and_have_the_papers_scale(pair):
    model, params = pair("llama").model, pair("llama").params
    adapters = lora.init(jax.random.key(0), params, rank=4, alpha=8.0)
    assert set(adapters) == {"q", "k", "v", "o", "gate", "up", "down"}
    assert adapters["down"]["a"].shape == (3, 48, 4) and adapters["down"]["b"].shape == (3, 4, 32)
    assert adapters["k"]["b"].shape == (3, 4, 16)
    wide = {"layers": {"q": {"kernel": jnp.zeros((8, 400, 4))}}}
    a = lora.init(jax.random.key(1), wide, rank=4, alpha=8.0, targets=("q",))["q"]["a"]
    np.testing.assert_allclose(a.std(), 8 / 4 / 400**0.5, rtol=0.03)  # alpha / rank over sqrt(in)
    assert not any(adapter["b"].any() for adapter in adapters.values())
    run = jit(lambda p, t: model.hidden_states(p, TOKENS, MASK, lora=t)[0])
    np.testing.assert_array_equal(run(params, adapters), jit(lambda p: model.hidden_states(p, TOKENS, MASK)[0])(params))


@pytest.mark.slow
def test_merged_parameters_equal_adapters_in_every_path(pair):
    model, params, targets = pair("gemma3").model, pair("gemma3").params, ("q", "v", "down")
    adapters = trained(lora.init(jax.random.key(0), params, rank=2, alpha=4.0, targets=targets))
    prompt, completions = TOKENS[:, :5], TOKENS[:, None, 5:]

    @jit
    def run(params, adapters):
        plain, _, _ = model.hidden_states(params, TOKENS, MASK, lora=adapters)
        packed, _ = model.packed_states(params, prompt, MASK[:, :5], completions, lora=adapters)
        cache, first = model.prefill(params, prompt, MASK[:, :5], lora=adapters)
        layers = model.unstack_layers(params, adapters)
        decoded, _ = model.decode_step(params, layers, completions[:, :, 0], jnp.int32(0), cache,
                                       model.empty_completions(cache, 1, 4))
        return plain, packed, first, decoded

    merged = lora.merge(params, adapters)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), params["layers"], merged["layers"])
    assert {name for name, module in changed.items() if any(module.values())} == set(targets)
    with_adapters, with_merged = run(params, adapters), run(merged, None)
    for a, b in zip(with_adapters, with_merged, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), rtol=0)
    plain, packed, first, decoded = with_adapters  # and the paths agree with each other
    np.testing.assert_allclose(packed[:, 0], plain[:, 4:8], atol=2e-5 * np.abs(plain).max(), rtol=0)
    np.testing.assert_allclose(first, plain[:, 4], atol=2e-5 * np.abs(plain).max(), rtol=0)
    np.testing.assert_allclose(decoded[:, 0], plain[:, 5], atol=2e-5 * np.abs(plain).max(), rtol=0)


def test_gradient_of_adapters_is_the_projected_gradient_of_the_matrices(pair):
    """dL/dA = dL/dW B^T and dL/dB = A^T dL/dW, with the parameters themselves left alone."""
    model, params = pair("llama").model, pair("llama").params
    adapters = trained(lora.init(jax.random.key(0), params, rank=2, alpha=2.0))

    def loss(params, adapters):
        states, _, _ = model.hidden_states(params, TOKENS, MASK, lora=adapters)
        return jnp.sum(jnp.sin(3.0 * states))

    of_params, of_adapters = jit(jax.grad(loss, argnums=(0, 1)))(params, adapters)
    for target in lora.TARGETS:
        of_kernel = np.asarray(of_params["layers"][target]["kernel"], np.float64)
        a, b = (np.asarray(adapters[target][leaf], np.float64) for leaf in "ab")
        for actual, expected in ((of_adapters[target]["a"], of_kernel @ b.swapaxes(1, 2)),
                                 (of_adapters[target]["b"], a.swapaxes(1, 2) @ of_kernel)):
            assert np.abs(expected).max() > 1e-3
            np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_wrong_adapters_are_refused(pair):
    with pytest.raises(ValueError, match="target 'gates'; allowed: q, k, v, o, gate, up, down; nearest: 'gate'"):
        lora.init(jax.random.key(0), pair("llama").params, rank=2, alpha=2.0, targets=("q", "gates"))
    with pytest.raises(ValueError, match="rank=0; it must be at least 1"):
        lora.init(jax.random.key(0), pair("llama").params, rank=0, alpha=2.0)
