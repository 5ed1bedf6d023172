"""Runs in a process of its own with eight virtual devices: one training step on a 2 x 2 x 2 mesh and on one device."""
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import rollout_cases
from few_devices import built
from jax.sharding import PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.models.weights import layout
from jaxrl_llm.parallel import communication, make_mesh, plan, reshard, tree_shardings, with_shardings
from jaxrl_llm.training import setup
from jaxrl_llm.training.ahead import lower_update
from jaxrl_llm.training.config import default_config
from jaxrl_llm.training.heldout import evaluate
from jaxrl_llm.values import v0


def tiny(**mesh):
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 4, 4, 2, 4
    c.sampling.temperature, c.optimizer.learning_rate, c.optimizer.b2 = 0.8, 1e-3, 0.95
    c.objective = "kl_coef=0.1"
    c.mesh.update(mesh)
    return c


def steps(config, count, devices, unpads=False):
    """`count` steps of the training loop, with short completions in the second, whose padding is left out if it `unpads`.

    Returns samples, parameters and metrics on the host.
    """
    setup.unpads = lambda model, slots: unpads
    run, params = built(config, devices)
    state = setup.initial_state(run, params)
    frozen, tokens, result = run.learner.frozen(state.params), [], {}
    for number in range(count):
        sampled = run.source.next(state).rollouts
        if number == 1:
            short = np.arange(sampled.mask.shape[2]) < np.array([[4, 1], [2, 1], [1, 1], [3, 1]])[..., None]
            sampled = sampled.replace(mask=short & sampled.mask)
        rewards = np.linspace(-1, 1, sampled.rewards.size, dtype=np.float32).reshape(sampled.rewards.shape)
        tokens.append(sampled.tokens)
        state, result, *_ = run.learner.learn(state, sampled.replace(rewards=rewards), frozen)  # there is something to learn
    return run, state, tokens, result


def on_first_device() -> int:
    """Bytes of all arrays on the first device."""
    pieces = [shard.data for x in jax.live_arrays() for shard in x.addressable_shards if shard.device == jax.devices()[0]]
    return sum({piece.unsafe_buffer_pointer(): piece.nbytes for piece in pieces}.values())


def published():
    """Weights of a file, read for a 2 x 2 x 2 mesh, with the first device's memory at each read of a tensor."""
    c = ModelConfig(vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8, mlp_size=48,
                    tie_embeddings=False, qkv_bias=True)
    stored = {place.hf: np.random.default_rng(i).standard_normal(place.shape).astype(np.float32)
              for i, place in enumerate(layout.places(c))}
    mesh, before, held, asked = make_mesh(fsdp=2, tensor=2), on_first_device(), [], {}

    def read(place, index):
        held.append(on_first_device() - before)
        asked.setdefault(place.path, set()).add(stored[place.hf][index].size / stored[place.hf].size)
        return stored[place.hf][index]

    params = layout.assemble(c, read, np.float32, lambda shapes: tree_shardings(shapes, mesh))
    held.append(on_first_device() - before)
    own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    wanted = layout.assemble(c, lambda place, index: stored[place.hf][index], np.float32)
    as_ruled = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, tree_shardings(params, mesh))
    return {"equal": all(bool((np.asarray(a) == np.asarray(b)).all()) for a, b in zip(*map(jax.tree.leaves, (params, wanted)))),
            "as_ruled": all(jax.tree.leaves(as_ruled)), "peak": max(held), "own": own,
            "whole": sum(x.nbytes for x in stored.values()),
            "asked": [sorted(asked[path]) for path in (("layers", "q", "kernel"), ("layers", "o", "kernel"), ("embed",))]}


def known_by_hand():
    """A program whose collectives are written down: `f32[16, 8]` on each of 2 x 2 x 2 devices, loops of 5 and of 3 trips."""
    def inner(x, _):
        return jnp.sin(jax.lax.psum(x, ("data", "tensor"))), None

    def outer(x, _):
        x, _ = jax.lax.scan(inner, x, None, length=3)
        x = jnp.sin(jax.lax.all_gather(x, ("data", "fsdp", "tensor"), tiled=True))  # [128, 8]
        x = jnp.sin(jax.lax.psum_scatter(x, ("data", "fsdp"), tiled=True))[:16]  # of [32, 8]
        x = jnp.sin(jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True))
        return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), None

    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    spread = PartitionSpec(("data", "fsdp", "tensor"))
    run = jax.shard_map(lambda x: jax.lax.scan(outer, x, None, length=5)[0], mesh=mesh, in_specs=spread, out_specs=spread,
                        check_vma=False)
    return jax.jit(run).lower(jax.ShapeDtypeStruct((128, 8), jnp.float32)).compile().as_text()


def communicated():
    """Bytes sent: by the program known by hand, by an update with `data` alone, by the gathering of weights for sampling."""
    def sent(text):
        return communication.by_kind(communication.collectives(text))
    c = ModelConfig(vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48,
                    tie_embeddings=False)
    work, mesh = plan.Work(8, 2, 4, 4), make_mesh(data=8)
    update = lower_update(c, work, mesh).compile().as_text()
    pieces = make_mesh(data=2, fsdp=4)
    in_pieces = lower_update(c, work, pieces).compile().as_text()
    mixed = make_mesh(data=2, fsdp=2, tensor=2)
    params = Transformer(c).abstract_params()
    params = with_shardings(params, tree_shardings(params, mixed))
    gathered = jax.jit(lambda params: reshard(params, mixed, jnp.float32)).lower(params).compile().as_text()
    return {"by_hand": sent(known_by_hand()), "update": sent(update), "reshard": sent(gathered),
            "least": communication.minimum(c, work, mesh.shape)["update"],
            "in_pieces": sent(in_pieces),
            "least_in_pieces": communication.minimum(c, work, pieces.shape)["update"],
            "least_reshard": communication.minimum(c, work, mixed.shape)["rollout"]["weights gathered"]}


def leaves(state):
    return jax.tree.leaves(jax.device_get((state.params, state.opt_state)))


def with_experts():
    """Three steps of a mixture of experts, its load balanced, along `tensor` and on a mesh of all axes, and on one device."""
    def run(devices, **mesh):
        c = tiny(**mesh)
        c.model.experts, c.learner.balance, c.model.expert_size = 4, 0.05, 24
        return steps(c, 3, devices, unpads=devices == 8)

    _, one, tokens, measured = run(1, data=1)
    result = {}
    for name, devices, sizes in (("tensor", 4, {"data": 1, "tensor": 4}), ("all", 8, {"data": 2, "fsdp": 2, "tensor": 2})):
        _, state, sampled, metrics = run(devices, **sizes)
        gate = state.params["layers"]["experts_gate"]["kernel"]
        result[name] = {"same_tokens": all(bool((a == b).all()) for a, b in zip(sampled, tokens, strict=True)),
                        "difference": max(float(np.abs(a - b).max()) for a, b in zip(leaves(state), leaves(one), strict=True)),
                        "metrics": {key: [metrics[key], measured[key]]
                                    for key in ("loss", "grad_norm", "kl", "moe/balance_loss", "moe/max_load")},
                        "shard_of_gate": gate.addressable_shards[0].data.shape}
    return result


def along_one_axis(axis, tokens, state, metrics):
    """Three steps on four devices along one axis, against those on one device."""
    _, result, sampled, measured = steps(tiny(**{"data": 1, axis: 4}), 3, 4)
    return {"same_tokens": all(bool((a == b).all()) for a, b in zip(sampled, tokens, strict=True)),
            "difference": max(float(np.abs(a - b).max()) for a, b in zip(leaves(result), leaves(state), strict=True)),
            "metrics": {name: [measured[name], metrics[name]] for name in ("loss", "grad_norm", "kl", "entropy")}}


def in_bfloat16(**mesh) -> float:
    """Norm of the first gradient, computed in bfloat16."""
    c = tiny(**mesh)
    c.model.dtype = "bfloat16"
    return float(steps(c, 1, int(np.prod(list(mesh.values()))))[3]["grad_norm"])


def judged():
    """V0 on 2 x 4 devices, policies spread over one axis, prompts over the other: what is sent, the distance to one device."""
    model = v0.V0(v0.Head(features=12, width=16, layers=2, heads=2), v0.Adapter(queries=4, size=3, heads=1, hidden=8), states=5)
    params, rng = jax.jit(model.init)(jax.random.key(0)), np.random.default_rng(0)
    contexts, outcomes, mask = rng.normal(size=(4, 6, 12)), rng.uniform(size=(4, 6)), rng.uniform(size=(4, 6)) > 0.3
    states, real = rng.normal(size=(8, 7, 5)), np.arange(7) < rng.integers(1, 8, (8, 1))
    policies, prompts = PartitionSpec("data"), PartitionSpec("fsdp")

    def predict(params, contexts, outcomes, mask, states, real):
        return model.predict(params, contexts, outcomes, mask, model.encode(params, states, real))

    spread = jax.jit(jax.shard_map(predict, mesh=make_mesh(data=2, fsdp=4), out_specs=PartitionSpec("data", "fsdp"),
                                   in_specs=(PartitionSpec(), policies, policies, policies, prompts, prompts)))
    given = params, contexts, outcomes, mask, states, real
    compiled = spread.lower(*given).compile()
    result, alone = spread(*given), jax.jit(predict)(*given)
    return {"sent": communication.by_kind(communication.collectives(compiled.as_text())),
            "distance": float(np.abs(np.asarray(result) - np.asarray(alone)).max()), "shape": result.shape,
            "on_each": result.addressable_shards[0].data.shape}


def main():
    loaded = published()
    run, state, tokens, metrics = steps(tiny(data=2, fsdp=2, tensor=2), 3, 8, unpads=True)
    one_run, one_state, one_tokens, one_metrics = steps(tiny(data=1), 3, 1)
    solved = [evaluate(a_run.source, a_state.params, None, problems=4, key=jax.random.key(1)).solved.mean
              for a_run, a_state in ((run, state), (one_run, one_state))]
    layers = state.params["layers"]
    wanted = tree_shardings(state, run.learner.mesh)
    print(json.dumps({
        "published": loaded,
        "rollouts": rollout_cases.cases(),
        "communicated": communicated(),
        "judged": judged(),
        "bfloat16": [in_bfloat16(data=2, fsdp=2), in_bfloat16(data=1)],
        "experts": with_experts(),
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
