"""Runs in a process of its own with eight virtual devices: updates from packed rows on meshes and on one device."""
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from few_devices import built

from jaxrl_llm import advantages, objectives, parallel
from jaxrl_llm.data.packing import of_groups, pack
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.kernels import flash
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.accumulate import make_parts, update
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import Experts, ModelConfig, Transformer
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tools.guard import Guarded

P, G, S, T = 4, 5, 6, 9
MODEL = Transformer(ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
                                mlp_size=48, tie_embeddings=False, window=6, local_layers=(True, False)))
MIXTURE = Transformer(dataclasses.replace(MODEL.config, experts=Experts(4, 2, 24)))
OBJECTIVE = objectives.make("gspo", clip_low=0.3, clip_high=0.3)
KEEP = optax.GradientTransformation(  # an optimiser whose state is the gradient
    lambda tree: jax.tree.map(jnp.zeros_like, tree), lambda grads, _, tree: (jax.tree.map(jnp.zeros_like, tree), grads))


def batch(rng):
    """Groups with holes in their completions, their advantages, and packed rows that they straddle."""
    prompts, tokens = rng.integers(0, 64, (P, S)).astype(np.int32), rng.integers(0, 64, (P, G, T)).astype(np.int32)
    prompt_mask, mask = np.arange(S) >= rng.integers(0, S, (P, 1)), rng.random((P, G, T)) < 0.6
    rollouts = Rollouts(mask=mask, valid=np.ones((P, G), bool), old_logprobs=rng.normal(-4, 1, mask.shape).astype(np.float32))
    forest, leaves = of_groups(prompts, prompt_mask, tokens, mask)
    return rollouts, np.broadcast_to(rng.normal(size=(P, G, 1)), mask.shape).astype(np.float32), \
        pack(forest, leaves, mask, [24], multiple=8)


def weights(model):
    keys = iter(jax.random.split(jax.random.key(0), 40))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.4, model.abstract_params())


def gradient(mesh, rollouts, advantage, packed, model=MODEL, balance=0.0):
    """Two updates, the second of which must compile nothing: `(gradient, metrics, as the partition table says)`."""
    policy = Policy(model, chunk=16, mesh=mesh)
    state = state_lib.create(weights(model), None, KEEP, advantages.make("grpo"), OBJECTIVE, jax.random.key(0))
    if mesh is not None:
        state = parallel.put(state, parallel.tree_shardings(state, mesh))
        rollouts, advantage = parallel.put((rollouts, advantage), parallel.batch_sharding(mesh))
    parts = make_parts(policy, objectives.composed(OBJECTIVE, (objectives.terms.make("balance", coef=balance),)), KEEP,
                       clip_norm=None)
    parts = parts._replace(**{name: Guarded(name, getattr(parts, name)) for name in parts._fields[1:]})
    for _ in range(2):
        state, metrics = update(parts, 8, state, packed, rollouts, advantage)
    ruled = mesh is None or all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(
        jax.tree.leaves(state), jax.tree.leaves(parallel.tree_shardings(state, mesh))))
    return jax.device_get(state.opt_state), jax.device_get(metrics), ruled


ADAPTERS = {"lora.rank": 2, "learner.epochs": 2, "objective": "+ kl(0.1)"}  # two passes over each batch, with a reference
METHODS = {"poise": {"method": "poise", "lora.rank": 2, "probe.layer": "0.5", "estimator": "bootstrap=1, first_fit=1"},
           "ppo": {"method": "ppo", "learner.minibatches": 1}}


@functools.cache
def learned(devices, packed_rows, method="", **sizes):
    """`(what is trained, advantages, metrics)` after two steps of a run on this many devices."""
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.prompts.max_tokens, c.sampling.group, c.sampling.max_tokens = 2, P, S, G, T
    c.optimizer.name, c.optimizer.learning_rate, c.optimizer.warmup_updates = "sgd", 0.5, 0
    c.learner.packed_rows = packed_rows
    c.update_from_flattened_dict(METHODS.get(method, ADAPTERS))
    c.mesh.update(sizes)
    run, _ = built(c, devices)
    state, rng = setup.initial_state(run, weights(run.learner.policy.model)), np.random.default_rng(1)
    for _ in range(2):
        rollouts = Rollouts(
            mask=np.arange(T) < rng.integers(1, T + 1, (P, G, 1)), valid=rng.random((P, G)) < 0.9,
            rewards=rng.random((P, G)).astype(np.float32), tokens=rng.integers(0, 250, (P, G, T)).astype(np.int32),
            prompt_tokens=rng.integers(0, 250, (P, S)).astype(np.int32),
            prompt_mask=np.arange(S) < rng.integers(1, S + 1, (P, 1)),
            behavior_logprobs=rng.normal(-5, 0.3, (P, G, T)).astype(np.float32))
        state, metrics, batch, advantage = run.learner.learn(state, rollouts)
        advantage = np.where(batch.token_mask, advantage, 0)
    return jax.device_get((state.trainable, state.beside)), advantage, metrics


def runs(method="", **sizes):
    """How far packed rows on eight devices are from rectangular ones on one device."""
    (*spread, measured), (*alone, wanted) = learned(8, 4, method, **sizes), learned(1, 0, method, data=1)
    pairs = [*zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True)]
    return {"apart": max(float(np.abs(a - b).max()) for a, b in pairs),
            "largest": max(float(np.abs(b).max()) for _, b in pairs),
            "metrics": {key: [float(measured[key]), float(value)] for key, value in wanted.items()}}


def main():
    given = batch(np.random.default_rng(0))
    dense, sparse = gradient(None, *given), gradient(None, *given, MIXTURE, 0.1)
    result = {"rows": given[2].node.shape, "norm": float(optax.tree.norm(dense[0]))}
    for name, sizes in (("all", dict(data=2, fsdp=2, tensor=2)), ("fsdp", dict(data=1, fsdp=4, tensor=2)),
                        ("seq", dict(data=1, tensor=2, seq=4)),
                        ("cut", dict(data=1, fsdp=2, tensor=2, seq=2)), ("experts", dict(data=2, fsdp=1, tensor=2, seq=2))):
        flash.BLOCK = 5 if name == "cut" else 512  # twelve slots of a shard in three blocks
        kind, (alone, measured, _) = ((MIXTURE, 0.1), sparse) if name == "experts" else ((MODEL,), dense)
        spread, metrics, ruled = gradient(parallel.make_mesh(**sizes), *given, *kind)
        apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(a).max()), alone, spread)
        result[name] = {"apart": max(jax.tree.leaves(apart)), "ruled": ruled,
                        "metrics": {key: [float(metrics[key]), float(value)] for key, value in measured.items()}}
    flash.BLOCK = 512
    print(json.dumps(result | {"runs": {
        "spread": runs(data=2, fsdp=2, tensor=2),
        **{name or "cut": runs(name, data=1, fsdp=2, tensor=2, seq=2) for name in ("", *METHODS)}}}))


if __name__ == "__main__":
    main()
