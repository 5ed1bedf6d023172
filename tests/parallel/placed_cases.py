"""Runs in a process of its own with eight virtual devices: what compiled programs send, where weights and predictions lie."""
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.models.weights import layout
from jaxrl_llm.parallel import make_mesh, reshard, tree_shardings, with_shardings
from jaxrl_llm.planning import communication, plan
from jaxrl_llm.planning.ahead import lower_update
from jaxrl_llm.values import v0


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


def judged():
    """V0 on 2 x 4 devices, policies spread over one axis, prompts over the other: what is sent, the distance to one device."""
    model = v0.V0(v0.Head(features=12, width=16, layers=2, heads=2),
                  v0.QueryAdapter(queries=4, size=3, heads=1, hidden=8), states=5)
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
    print(json.dumps({"published": published(), "communicated": communicated(), "judged": judged()}))


if __name__ == "__main__":
    sys.exit(main())
