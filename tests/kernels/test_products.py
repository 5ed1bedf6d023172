"""Matrix products with their own gradients and layouts, against the plain ones."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels.products import batch_matmul, matmul, plain_matmul, plain_summed, row_matmul, summed, transpose


@pytest.mark.parametrize("shape", ((5,), (3, 5), (2, 3, 4, 5)))
def test_values_and_gradients_equal_the_plain_product(shape):
    random = np.random.default_rng(0)
    x, kernel = random.normal(size=shape).astype(np.float32), random.normal(size=(5, 7)).astype(np.float32)
    weights = random.normal(size=(*shape[:-1], 7)).astype(np.float32)
    def loss(product):
        return lambda x, kernel: (product(x, kernel) ** 2 * weights).sum()
    wanted = jax.value_and_grad(loss(plain_matmul), argnums=(0, 1))(x, kernel)
    for product in (matmul, lambda x, kernel: row_matmul(x, transpose(kernel))):
        np.testing.assert_allclose(product(jnp.asarray(x), jnp.asarray(kernel)), x @ kernel, rtol=1e-4, atol=1e-5)
        result = jax.jit(jax.value_and_grad(loss(product), argnums=(0, 1)))(x, kernel)
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("batch", ((), (3,), (2, 3)))
@pytest.mark.parametrize(("m", "n"), ((4, 7), (5, 5), (7, 4)), ids=("wider_last", "square", "wider_first"))
def test_sums_over_rows_in_either_order(batch, m, n):
    random = np.random.default_rng(2)
    x, y = (random.normal(size=(*batch, 6, width)).astype(np.float32) for width in (m, n))
    np.testing.assert_allclose(jax.jit(summed)(x, y), plain_summed(x, y), rtol=1e-5, atol=1e-5)
    def weighed(f):
        return lambda x, y: jnp.sin(f(x, y)).sum()
    for a, b in zip(*(jax.grad(weighed(f), argnums=(0, 1))(x, y) for f in (summed, plain_summed))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    half = jax.jit(summed, static_argnums=2)(jnp.asarray(x, jnp.bfloat16), jnp.asarray(y, jnp.bfloat16), jnp.float32)
    assert half.dtype == jnp.float32 and half.shape == (*batch, m, n)


@pytest.mark.parametrize(("m", "k", "by_parts"), ((1, 64, True), (3, 64, True), (17, 64, False), (3, 62, False)))
@pytest.mark.parametrize("axis", (0, 1))
def test_products_with_many_matrices(m, k, by_parts, axis):
    random = np.random.default_rng(3)
    left, right = (random.normal(size=(16, 2, *shape)).astype(np.float32) for shape in ((m, k), (k, 160)))
    wanted = left.astype(np.float64) @ right
    right = jnp.asarray(np.swapaxes(right, -1, -2) if axis else right)
    product = jax.jit(lambda left, right: batch_matmul(left, right, axis))
    np.testing.assert_allclose(product(left, right), wanted, rtol=1e-4, atol=1e-4)
    traced = product.trace(left, right)
    for platform, parts in (("cpu", by_parts), ("tpu", False), ("cuda", False)):
        assert ("stablehlo.reduce" in traced.lower(lowering_platforms=(platform,)).as_text()) == parts, platform
