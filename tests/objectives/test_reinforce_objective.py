"""The plain policy gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import from_lists


def test_value_and_gradient():
    rollouts = from_lists([[1, 0]], lengths=[[2, 1]])
    logprobs, advantages = jnp.array([[[-1.0, -2.0], [-4.0, jnp.nan]]]), jnp.array([[[0.5, 0.5], [-1.0, 7.0]]])
    for aggregation, divisor in (("token_mean", 3), ("seq_mean_token_sum", 2)):
        update = objectives.make("reinforce", aggregation=aggregation).update
        (loss, _), gradient = jax.value_and_grad(update, has_aux=True)(logprobs, rollouts, advantages, ())
        np.testing.assert_allclose(loss, (0.5 + 1 - 4) / divisor, rtol=1e-6)
        np.testing.assert_allclose(gradient, np.array([[[-0.5, -0.5], [1.0, 0.0]]]) / divisor, rtol=1e-6)
