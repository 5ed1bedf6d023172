"""Runs in a process of its own with eight virtual devices: one training step on a 2 x 2 x 2 mesh and on one device."""
import json
import sys

import jax
import numpy as np

from jaxrl_llm.parallel import make_mesh, tree_shardings
from jaxrl_llm.tasks.loader import batches
from jaxrl_llm.training import loop, setup
from jaxrl_llm.training.config import default_config
from jaxrl_llm.training.metrics import PhaseTimer


def tiny(**mesh):
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 4, 4, 2, 4
    c.sampling.temperature, c.optimizer.learning_rate, c.optimizer.b2 = 0.8, 1e-3, 0.95
    c.objective = "kl_coef=0.1"
    c.mesh.update(mesh)
    return c


def steps(config, count, devices):
    """`count` steps as the loop takes them; returns samples, parameters and metrics on the host."""
    real = jax.devices
    jax.devices = lambda *a: real(*a)[:devices]
    try:
        run, params = setup.build(config)
    finally:
        jax.devices = real
    state = setup.initial_state(run, params)
    reference = jax.tree.map(lambda x: x + 0, state.params)
    data = batches(run.task.train, config.prompts.per_step, seed=0)
    tokens, found = [], {}
    for _ in range(count):
        sampled, _ = loop.collect(run, state, data, PhaseTimer())
        sampled.scores.total[:] = np.linspace(-1, 1, sampled.scores.total.size)  # so that there is something to learn
        tokens.append(sampled.completions.tokens)
        state, found = loop.improve(run, state, sampled, reference, PhaseTimer())
    loop.evaluate(run, state.params, state.lora, problems=4, key=jax.random.key(1))
    return run, state, tokens, found


def main():
    run, state, tokens, metrics = steps(tiny(data=2, fsdp=2, tensor=2), 3, 8)
    one_run, one_state, one_tokens, one_metrics = steps(tiny(data=1), 3, 1)
    layers = state.params["layers"]
    leaves = lambda s: jax.tree.leaves(jax.device_get((s.params, s.opt_state)))  # noqa: E731
    wanted = tree_shardings(state, run.mesh)
    print(json.dumps({
        "devices": [len(run.mesh.devices.flat), len(one_run.mesh.devices.flat)],
        "same_tokens": [bool((a == b).all()) for a, b in zip(tokens, one_tokens)],
        "difference": max(float(np.abs(a - b).max()) for a, b in zip(leaves(state), leaves(one_state), strict=True)),
        "loss": [metrics["loss"], one_metrics["loss"]], "grad_norm": [metrics["grad_norm"], one_metrics["grad_norm"]],
        "kl": [metrics["kl"], one_metrics["kl"]],
        "mismatch": metrics["max/mismatch"],
        "q": str(layers["q"]["kernel"].sharding.spec), "o": str(layers["o"]["kernel"].sharding.spec),
        "shard_of_q": layers["q"]["kernel"].addressable_shards[0].data.shape,
        "as_ruled": all(x.sharding.is_equivalent_to(s, x.ndim)
                        for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(wanted))),
        "mesh_minus_one": [dict(make_mesh(**sizes).shape) for sizes in
                           ({}, {"fsdp": 2}, {"data": 2, "tensor": -1}, {"data": 1, "fsdp": 8})],
    }))


if __name__ == "__main__":
    sys.exit(main())
