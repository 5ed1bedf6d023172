"""Runs in a process of its own with eight virtual devices: an update of a model with every feature, on a mesh and alone."""
import json

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.parallel.fsdp import over_rows

P, G, S, T = 4, 2, 6, 5
MODEL = Transformer(ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=48, pre_norms=False,
    post_norms=True, qk_norm=True, qk_norm_whole=True, qkv_bias=True, o_bias=True, mlp_bias=True, tie_embeddings=False,
    residual_scale=0.6, attention_softcap=1.5, logit_softcap=2.0, logit_divisor=1.5, rotary_factor=0.75, window=4,
    local_layers=(True, False), rotary_layers=(True, False)))


def forward(params, _, rows, whole):
    prompts, tokens = rows
    states, _ = MODEL.packed_states(params, prompts, jnp.ones(prompts.shape, bool), tokens, whole=whole)
    result, _ = token_logprobs(states.reshape(-1, 32), MODEL.unembedding(params), tokens.reshape(-1), chunk=8,
                               divisor=MODEL.config.logit_divisor, softcap=MODEL.config.logit_softcap)
    return result.reshape(tokens.shape)


def gradient(mesh, params, rows):
    weights = jnp.sin(jnp.arange(P * G * T, dtype=jnp.float32)).reshape(P, G, T)
    def loss(params):
        return (over_rows(forward, mesh, jnp.float32, params, None, rows) * weights).sum()
    return jax.jit(jax.grad(loss))(params)


def main():
    keys, random = iter(jax.random.split(jax.random.key(0), 40)), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.4, MODEL.abstract_params())
    rows = random.integers(0, 64, (P, S)), random.integers(0, 64, (P, G, T))
    mesh = parallel.make_mesh(data=2, fsdp=2, tensor=2)
    laid = parallel.put(params, parallel.tree_shardings(params, mesh))
    alone, spread = gradient(None, params, rows), gradient(mesh, laid, rows)
    apart = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(a).max()), alone, spread)
    print(json.dumps({jax.tree_util.keystr(path): value for path, value in jax.tree.leaves_with_path(apart)}))


if __name__ == "__main__":
    main()
