"""Runs in a process of its own with eight virtual devices: one training step on a 2 x 2 x 2 mesh and on one device."""
import json
import sys

import jax
import numpy as np
from few_devices import built

from jaxrl_llm.parallel import make_mesh, tree_shardings
from jaxrl_llm.sampling.heldout import evaluate
from jaxrl_llm.setup import setup, sources
from jaxrl_llm.setup.config import default_config


def tiny(**mesh):
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 4, 4, 2, 4
    c.sampling.temperature, c.optimizer.learning_rate, c.optimizer.b2 = 0.8, 1e-3, 0.95
    c.objective = "+ kl(0.1)"
    c.mesh.update(mesh)
    return c


def steps(config, count, devices, unpads=False):
    """`count` steps of the training loop, with short completions in the second, whose padding is left out if it `unpads`.

    Returns samples, parameters and metrics on the host.
    """
    sources.unpads = lambda model, slots: unpads
    run, params = built(config, devices)
    state = setup.initial_state(run, params)
    frozen, tokens, result = run.learner.frozen(state.params), [], {}
    for number in range(count):
        sampled = run.source.next(run.learner.publish(state)).rollouts
        if number == 1:
            short = np.arange(sampled.mask.shape[2]) < np.array([[4, 1], [2, 1], [1, 1], [3, 1]])[..., None]
            sampled = sampled.replace(mask=short & sampled.mask)
        rewards = np.linspace(-1, 1, sampled.rewards.size, dtype=np.float32).reshape(sampled.rewards.shape)
        tokens.append(sampled.tokens)
        state, result, *_ = run.learner.learn(state, sampled.replace(rewards=rewards), frozen)  # there is something to learn
    return run, state, tokens, result


def leaves(state):
    return jax.tree.leaves(jax.device_get((state.params, state.opt_state)))


def along_one_axis(axis, tokens, state, metrics):
    """Three steps on four devices along one axis, against those on one device."""
    _, result, sampled, measured = steps(tiny(**{"data": 1, axis: 4}), 3, 4)
    return {"same_tokens": all(bool((a == b).all()) for a, b in zip(sampled, tokens, strict=True)),
            "difference": max(float(np.abs(a - b).max()) for a, b in zip(leaves(result), leaves(state), strict=True)),
            "metrics": {name: [measured[name], metrics[name]] for name in ("loss", "grad_norm", "kl", "entropy")}}


def main():
    run, state, tokens, metrics = steps(tiny(data=2, fsdp=2, tensor=2), 3, 8, unpads=True)
    one_run, one_state, one_tokens, one_metrics = steps(tiny(data=1), 3, 1)
    solved = [evaluate(a_run.source, a_state.params, None, problems=4, key=jax.random.key(1)).solved.mean
              for a_run, a_state in ((run, state), (one_run, one_state))]
    layers = state.params["layers"]
    wanted = tree_shardings(state, run.learner.mesh)
    print(json.dumps({
        "alone": {axis: along_one_axis(axis, one_tokens, one_state, one_metrics) for axis in ("data", "fsdp", "tensor")},
        "devices": [len(run.learner.mesh.devices.flat), len(one_run.learner.mesh.devices.flat)],
        "same_tokens": [bool((a == b).all()) for a, b in zip(tokens, one_tokens)],
        "difference": max(float(np.abs(a - b).max()) for a, b in zip(leaves(state), leaves(one_state), strict=True)),
        "loss": [metrics["loss"], one_metrics["loss"]], "grad_norm": [metrics["grad_norm"], one_metrics["grad_norm"]],
        "kl": [metrics["kl"], one_metrics["kl"]],
        "solved": solved,
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
