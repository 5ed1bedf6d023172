"""The linear layer."""
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxrl_llm.kernels.products import matmul, row_matmul


class Dense(nn.Module):
    """Matrix product with `kernel [in, out]`, optional bias, and a low-rank update if the `lora` collection has one.

    With `transposed` all its matrices come as `[out, in]`, see `row_matmul`.
    """

    features: int
    dtype: Any
    bias: bool = False
    transposed: bool = False

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(0.02), shape[::-1] if self.transposed else shape, jnp.float32)
        multiply = row_matmul if self.transposed else matmul
        y = multiply(x, kernel.astype(self.dtype))
        if self.bias:
            y += self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32).astype(self.dtype)
        if self.has_variable("lora", "a"):
            a, b = self.get_variable("lora", "a"), self.get_variable("lora", "b")
            y += multiply(multiply(x, a.astype(self.dtype)), b.astype(self.dtype))
        return y
