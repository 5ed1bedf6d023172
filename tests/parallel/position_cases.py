"""Runs in a process of its own with four virtual devices: one-token rollouts on a mesh that cuts the vocabulary, as JSON."""
import json

import given_texts
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import advantages, objectives, parallel
from jaxrl_llm.learning import layouts
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.step import make_update
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.recorders.token_seeds import token_seeds

MODEL = Transformer(ModelConfig(vocab_size=40, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8,
                                mlp_size=48))
KEEP = optax.GradientTransformation(  # an optimiser whose state is the gradient
    lambda tree: jax.tree.map(jnp.zeros_like, tree), lambda grads, _, tree: (jax.tree.map(jnp.zeros_like, tree), grads))


def batch():
    rollouts = given_texts.rollouts([(one,) for one in (*given_texts.TEXTS, given_texts.SHORT)])
    rollouts = jax.tree.map(jnp.asarray, rollouts.replace(
        extras={**rollouts.extras, "current_version": np.full(4, 7, np.int32)}))
    return rollouts.replace(extras={**rollouts.extras, "token_seeds": token_seeds(3, rollouts)})


def learned(mesh, packed):
    """`(loss, gradient)` of an update, in chunks of which each device skips others."""
    objective, policy, rollouts = objectives.of("otr(samples=16)"), Policy(MODEL, chunk=5, mesh=mesh), batch()
    params = jax.tree.map(lambda x: x * 4, MODEL.init(jax.random.key(0)))
    state = state_lib.create(params, None, KEEP, advantages.make("reinforce"), objective, jax.random.key(1))
    if mesh is not None:
        state = parallel.put(state, parallel.tree_shardings(state, mesh))
        rollouts = parallel.put(rollouts, parallel.batch_sharding(mesh))
    update = (layouts.packed(policy, objective, KEEP, (16,), 2, clip_norm=None).update if packed else
              make_update(policy, objective, KEEP, clip_norm=None))
    state, metrics = update(state, rollouts, jnp.zeros(rollouts.mask.shape))
    return float(metrics["loss"]), jax.device_get(state.opt_state)


def main():
    loss, gradient = learned(None, False)
    result = {"loss": loss, "largest": max(float(np.abs(x).max()) for x in jax.tree.leaves(gradient))}
    for packed in (False, True):
        value, found = learned(parallel.make_mesh(data=1, fsdp=2, tensor=2), packed)
        apart = max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(found), strict=True))
        result["packed" if packed else "rectangular"] = {"loss": value, "apart": apart}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
