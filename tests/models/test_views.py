"""Layers that share the memory of their stack: what is shared, when it is not, and that updates stay right and in place."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.models import ModelConfig, Transformer, views

MODEL = Transformer(ModelConfig(vocab_size=32, hidden_size=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8,
                                mlp_size=32))


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(views, "LEAST_BYTES", 0)


def stack():
    """Two leaves of three layers, which are multiples of 64 bytes, as shared memory must be aligned."""
    numbers = jnp.arange(3 * 64 * 16, dtype=jnp.float32).reshape(3, 64, 16)
    return jax.block_until_ready({"a": numbers, "b": 2 * numbers[:, 0]})


def pointer(x) -> int:
    return x.unsafe_buffer_pointer()


def test_layers_are_parts_of_the_memory_of_the_stack():
    stacked = stack()
    layers = views.of_layers(stacked, jnp.float32)
    assert len(layers) == 3
    for i, layer in enumerate(layers):
        for name, own in layer.items():
            np.testing.assert_array_equal(own, stacked[name][i])
            assert pointer(own) == pointer(stacked[name]) + i * own.nbytes


def test_layers_hold_values_that_are_still_being_computed():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.cos(y @ y.mT @ y), x))
    begin = jnp.ones((2, 256, 256)) / 256
    stacked = slow(begin)
    layers = views.of_layers({"a": stacked}, jnp.float32)
    np.testing.assert_array_equal(layers[1]["a"], slow(begin)[1])


def test_a_donated_stack_is_updated_in_place_once_the_layers_are_gone_and_layers_that_are_left_keep_their_values():
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    total = jax.jit(lambda layers: sum(layer["a"].sum() for layer in layers))
    stacked = stack()["a"]
    where, expected = pointer(stacked), float(stacked.sum())
    assert float(total(views.of_layers({"a": stacked}, jnp.float32))) == expected
    updated = jax.block_until_ready(update(stacked))
    assert pointer(updated) == where
    layers = views.of_layers({"a": updated}, jnp.float32)
    kept = np.array(layers[1]["a"])
    again = jax.block_until_ready(update(updated))
    np.testing.assert_array_equal(layers[1]["a"], kept)
    np.testing.assert_array_equal(again[1], kept + 1)


@pytest.mark.parametrize("why", ("other dtype", "computed in another dtype", "numpy", "small", "jit"))
def test_no_layers_where_they_would_be_copies(why, monkeypatch):
    stacked, dtype = stack(), jnp.float32
    if why == "other dtype":
        stacked = jax.tree.map(lambda x: x.astype(jnp.bfloat16), stacked)
    if why == "computed in another dtype":
        dtype = jnp.bfloat16
    if why == "numpy":
        stacked = jax.tree.map(np.asarray, stacked)
    if why == "small":
        monkeypatch.setattr(views, "LEAST_BYTES", 2**25)
    if why == "jit":
        assert jax.jit(lambda x: views.of_layers(x, jnp.float32))(stacked) is None
    else:
        assert views.of_layers(stacked, dtype) is None


def test_the_sampler_draws_the_same_with_and_without(monkeypatch):
    params = MODEL.init(jax.random.key(0))
    prompts, keys = jnp.arange(8).reshape(2, 4), row_keys(jax.random.key(1), np.arange(6).reshape(2, 3))
    sample = functools.partial(generate, MODEL, params, prompts, prompts >= 0, keys, Sampling(), max_tokens=8, stop_ids=(3,))
    assert views.of_layers(params["layers"], jnp.float32) is not None
    shared = sample()
    monkeypatch.setattr(views, "LEAST_BYTES", 2**25)
    jax.tree.map(np.testing.assert_array_equal, shared, sample())
