"""Matrix products with their own gradients and layouts, against `x @ kernel`."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.linear import Dense, matmul, row_matmul, summed


@pytest.mark.parametrize("shape", ((5,), (3, 5), (2, 3, 4, 5)))
def test_values_and_gradients_equal_the_plain_product(shape):
    random = np.random.default_rng(0)
    x, kernel = random.normal(size=shape).astype(np.float32), random.normal(size=(5, 7)).astype(np.float32)
    weights = random.normal(size=(*shape[:-1], 7)).astype(np.float32)
    def loss(product):
        return lambda x, kernel: (product(x, kernel) ** 2 * weights).sum()
    np.testing.assert_allclose(matmul(x, kernel), x @ kernel, rtol=1e-6)
    np.testing.assert_allclose(row_matmul(jnp.asarray(x), jnp.asarray(kernel.T)), x @ kernel, rtol=1e-4, atol=1e-5)
    found = jax.grad(loss(matmul), argnums=(0, 1))(x, kernel)
    wanted = jax.grad(loss(jnp.matmul), argnums=(0, 1))(x, kernel)
    for a, b in zip(found, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", ((), (3,), (2, 3)))
@pytest.mark.parametrize(("m", "n"), ((4, 7), (5, 5), (7, 4)), ids=("wider_last", "square", "wider_first"))
def test_sums_over_rows_in_either_order(batch, m, n):
    random = np.random.default_rng(2)
    x, y = (random.normal(size=(*batch, 6, width)).astype(np.float32) for width in (m, n))
    np.testing.assert_allclose(jax.jit(summed)(x, y), np.swapaxes(x, -1, -2) @ y, rtol=1e-5, atol=1e-5)
    half = jax.jit(summed, static_argnums=2)(jnp.asarray(x, jnp.bfloat16), jnp.asarray(y, jnp.bfloat16), jnp.float32)
    assert half.dtype == jnp.float32 and half.shape == (*batch, m, n)


def test_a_transposed_layer_reads_kernels_and_adapters_the_other_way_round():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4)), jnp.float32)
    variables = Dense(3, jnp.float32, bias=True).init(jax.random.key(0), x)
    adapters = {"a": jnp.ones((4, 2)) * 0.1, "b": jnp.ones((2, 3)) * 0.2}
    plain = Dense(3, jnp.float32, bias=True).apply(variables | {"lora": adapters}, x)
    turned = {"kernel": variables["params"]["kernel"].T, "bias": variables["params"]["bias"]}
    found = Dense(3, jnp.float32, bias=True, transposed=True).apply(
        {"params": turned, "lora": jax.tree.map(jnp.transpose, adapters)}, x)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)
    assert np.abs(found - (x @ variables["params"]["kernel"])).max() > 1e-3  # the adapters count
