"""Norms of the gradients of single completions: VCPO's baseline (arXiv 2602.17616), GVM's allocation (arXiv 2505.02391)."""
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxrl_llm import parallel
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.state import with_trained
from jaxrl_llm.maths import masked
from jaxrl_llm.tools.memo import remembered


@remembered(8)
def make(policy: Policy) -> Callable:
    """The jitted `(params, lora, rollouts) -> f32[P, G]`, `|d / d theta sum_t log p_t|^2` over each one's trained tokens.

    theta are all trained parameters, weights or adapters; GVM's code uses only the embeddings. Completions go through the model
    one after another, each in a separate forward and backward pass: this takes as many operations as an update, and no more
    memory. The norm is 0 without trained tokens. On a mesh each shard of prompts does this with its own: sharded weights are
    gathered, so every device must hold the weights and one gradient of them in whole.
    """
    alone = dataclasses.replace(policy, mesh=None)

    def square_norms(params, lora, rollouts: Rollouts):
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)  # of snapshots, in which gradients would be rounded
        P, G, T = rollouts.mask.shape
        trained = params if lora is None else lora

        def of_row(number):
            p, g = number // G, number % G
            row = Rollouts(mask=rollouts.token_mask[p, g][None, None], valid=jnp.ones((1, 1), bool),
                           tokens=rollouts.tokens[p, g][None, None], prompt_tokens=rollouts.prompt_tokens[p][None],
                           prompt_mask=rollouts.prompt_mask[p][None],
                           temperature=None if rollouts.temperature is None else rollouts.temperature[p][None])

            def log_likelihood(tree):
                return masked.sum(alone.logprobs(*with_trained(params, lora, tree), row)[0], row.token_mask)

            return optax.tree.norm(jax.grad(log_likelihood)(trained), squared=True)

        return jax.lax.map(of_row, jnp.arange(P * G)).reshape(P, G)

    mesh = policy.mesh
    if mesh is None or mesh.size == 1:
        return jax.jit(square_norms)
    same, rows = PartitionSpec(), parallel.batch_sharding(mesh).spec
    return jax.jit(jax.shard_map(square_norms, mesh=mesh, in_specs=(same, same, rows), out_specs=rows, check_vma=False))
