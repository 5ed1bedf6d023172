"""Runs in a process of its own with eight devices: weights moved to the layout of rollouts, shards that decode alone."""
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import parallel
from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.parallel import replicas, rules
from jaxrl_llm.planning.communication import collectives

V, P, G, S, T = 64, 4, 2, 5, 24
MODEL = Transformer(ModelConfig(vocab_size=V, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48, tie_embeddings=False, qkv_bias=True))


def mesh_of(*sizes):
    return parallel.make_mesh(*sizes, devices=jax.devices()[:int(np.prod(sizes))])


def traffic(text: str, unknown_trips=None) -> dict:
    result = collectives(text, unknown_trips)
    return {"kinds": sorted({c.kind for c in result}), "groups": sorted({c.group for c in result}),
            "bytes": sum(c.size for c in result), "sizes": sorted(c.size for c in result)}


def weights():
    """Random weights under which the context matters, with logits of spread 1."""
    random, spread = np.random.default_rng(1), {"embed": 0.6, "kernel": 0.2, "unembed": 0.2, "bias": 0.1, "scale": 0.0}

    def one(path, leaf):
        name = rules.path_name(path).split("/")[-1]
        return jnp.asarray((name == "scale") + spread[name] * random.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, MODEL.abstract_params())


def moved(params, *sizes) -> dict:
    """The result of a reshard of `params`, in bfloat16 and in float32, and the communication of the latter's program."""
    mesh, named = mesh_of(*sizes), lambda tree: {rules.path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}
    ruled, lain = parallel.rollout_shardings(params, mesh), parallel.put(params, parallel.tree_shardings(params, mesh))
    result, apart = parallel.reshard(lain, mesh, jnp.bfloat16), parallel.apart(lain, mesh, jnp.bfloat16)
    def program(dtype):
        return jax.jit(functools.partial(parallel.reshard, mesh=mesh, dtype=dtype)).lower(lain)
    def equal(tree):
        same = jax.tree.map(lambda x, y: bool((np.asarray(x.astype(y.dtype)) == np.asarray(y)).all()), params, tree)
        return jax.tree.all(same)
    def as_ruled(tree):
        return jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), tree, ruled))
    return {"untouched": result is lain, "equal": equal(result), "as_ruled": as_ruled(result),
            "kept": not any(x.is_deleted() for x in jax.tree.leaves(lain)),
            "apart": equal(apart) and as_ruled(apart) and parallel.reshard(apart, mesh, jnp.bfloat16) is apart,
            "halved": sorted(name for name, x in named(apart).items() if x.dtype == jnp.bfloat16),
            "dtypes": {name: str(x.dtype) for name, x in named(result).items()},
            "shards": {name: x.addressable_shards[0].data.shape for name, x in named(result).items()},
            "laid": re.findall(r"sdy.sharding_constraint .*x(\w+)>\n", program(jnp.bfloat16).as_text()),
            "sent": traffic(program(np.float32).compile().as_text())}


def to_replicas(tensor: int, *sizes) -> dict:
    """Weights of four layers on replicas of `tensor` devices, and the most memory that a matrix of a layer took beside it."""
    model = Transformer(ModelConfig(vocab_size=8, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=8,
                                    mlp_size=48, tie_embeddings=False))
    mesh, params = mesh_of(*sizes), model.init(jax.random.key(1))
    lain, to = parallel.put(params, parallel.tree_shardings(params, mesh)), parallel.sampler_mesh(mesh, tensor)
    result, own, taken = parallel.reshard(lain, mesh, jnp.float32, to), replicas._moved, []

    def measured(leaf, *static):
        compiled = own.lower(leaf, *static).compile()
        layer = leaf.nbytes / (len(leaf) if static[-1] else 1)
        taken.append((compiled.memory_analysis().temp_size_in_bytes / layer, {c.kind for c in collectives(compiled.as_text())}))
        return leaf

    replicas._moved = measured
    replicas._reshard(lain, mesh, tensor, jnp.float32)
    replicas._moved = own
    lies = jax.tree.map(lambda x, y, s: bool((x == y).all()) and y.sharding == s, jax.device_get(params), result,
                        parallel.rollout_shardings(params, to))
    return {"equal": jax.tree.all(lies), "again": parallel.reshard(result, mesh, jnp.float32, to) is result,
            "apart": jax.tree.leaves(parallel.apart(lain, mesh, jnp.float32, to))[0].sharding.mesh == to,
            "taken": max(beside for beside, _ in taken), "kinds": sorted(set().union(*(kinds for _, kinds in taken)))}


def moved_from_the_wrong_order() -> dict:
    """A matrix with `fsdp` as the major axis: its pieces must change places before they can be gathered."""
    mesh = mesh_of(2, 2, 2)
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, ("fsdp", "tensor"))))
    to = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    return traffic(jax.jit(lambda x: x + 0, out_shardings=to).lower(x).compile().as_text())


def inputs(mesh, prompts, group):
    tokens = np.random.default_rng(0).integers(0, V, (prompts, S)).astype(np.int32)
    keys = row_keys(jax.random.key(11), np.arange(prompts * group).reshape(prompts, group))
    return parallel.put((tokens, np.ones((prompts, S), bool), keys), parallel.batch_sharding(mesh))


def sampled(params, *sizes, work=(P, G, T)):
    """Completions of `work`, prompts x group x tokens, and what the program sends that made them."""
    prompts, group, length = work
    mesh = mesh_of(*sizes)
    lain = parallel.reshard(parallel.put(params, parallel.tree_shardings(params, mesh)), mesh, MODEL.dtype)
    arguments = (lain, *inputs(mesh, prompts, group), Sampling(np.float32(0.8)))
    sample = functools.partial(generate, MODEL, max_tokens=length, stop_ids=(7, 9, 20, 33), chunk=1, mesh=mesh)
    program = jax.jit(sample).lower(*arguments).compile()
    return parallel.fetch(program(*arguments)), traffic(program.as_text(), unknown_trips=1)


def same(one, other) -> bool:
    """Whether two samplings drew the same tokens and ended at the same places."""
    return all(bool((getattr(one, field) == getattr(other, field)).all()) for field in ("tokens", "mask", "stopped"))


def halved(params) -> dict:
    """Shards of 16 and 64 rows that continue with half of them, and the communication of their programs."""
    (one, _), (other, sent) = (sampled(params, *sizes, work=(8, 8, 66)) for sizes in ((1, 1, 1), (2, 2, 2)))
    return {"same": same(one, other), "sent": sent, "steps": other.decode_steps.tolist(), "lengths": one.mask.sum(-1).tolist()}


def cases() -> dict:
    params = weights()
    one, _ = sampled(params, 1, 1, 1)
    result = {"moved": {"mixed": moved(params, 2, 2, 2), "fsdp": moved(params, 1, 8, 1), "without": moved(params, 4, 1, 2)},
              "replicas": [to_replicas(2, 1, 8, 1), to_replicas(4, 2, 2, 2), to_replicas(1, 2, 1, 4)],
              "wrong_order": moved_from_the_wrong_order(), "lengths": one.mask.sum(-1).tolist(), "halved": halved(params),
              "sampled": {}}
    for name, sizes in {"pieces": (2, 2, 2), "whole": (2, 2, 1), "undivided": (1, 1, 4)}.items():
        other, sent = sampled(params, *sizes)
        result["sampled"][name] = {"same": same(one, other), "steps": other.decode_steps.tolist(), "sent": sent,
                                   "difference": float(np.abs(one.logprobs - other.logprobs).max())}
    return result


if __name__ == "__main__":
    sys.exit(print(json.dumps(cases())))
