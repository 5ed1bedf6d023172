"""The linear layer, read both ways round."""
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.linear import Dense


def test_a_transposed_layer_reads_kernels_and_adapters_the_other_way_round():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4)), jnp.float32)
    variables = Dense(3, jnp.float32, bias=True).init(jax.random.key(0), x)
    adapters = {"a": jnp.ones((4, 2)) * 0.1, "b": jnp.ones((2, 3)) * 0.2}
    plain = Dense(3, jnp.float32, bias=True).apply(variables | {"lora": adapters}, x)
    turned = {"kernel": variables["params"]["kernel"].T, "bias": variables["params"]["bias"]}
    result = Dense(3, jnp.float32, bias=True, transposed=True).apply(
        {"params": turned, "lora": jax.tree.map(jnp.transpose, adapters)}, x)
    np.testing.assert_allclose(result, plain, rtol=1e-5, atol=1e-6)
    assert np.abs(result - (x @ variables["params"]["kernel"])).max() > 1e-3  # the adapters count
