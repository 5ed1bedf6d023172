"""Runs in a process of its own with eight devices: the slot engine on meshes samples what it samples on one device."""
import dataclasses
import json

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.engines import Sampling
from jaxrl_llm.engines import slots as programs_of
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.models import Experts, ModelConfig, Transformer
from jaxrl_llm.models import lora as adapters
from jaxrl_llm.planning.communication import collectives

V, P, G, T = 64, 4, 4, 12
SHAPE = dict(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, mlp_size=48,
             tie_embeddings=False)
PLAIN = Transformer(ModelConfig(**SHAPE, qk_norm=True))
MODELS = {
    "plain": PLAIN, "paged": PLAIN,
    "windows": Transformer(ModelConfig(**SHAPE, window=4, local_layers=(True, False), rope_local_theta=100.0)),
    "int8": Transformer(ModelConfig(**SHAPE), int8_cache=True),
    "experts": Transformer(ModelConfig(**SHAPE, experts=Experts(count=4, per_token=2, size=24)))}  # with adapters
# Model, data x fsdp x tensor x seq, slots: as many as rows, or half.
CASES = (("plain", (4, 1, 1), 8), ("plain", (2, 1, 4), 16), ("plain", (1, 2, 2, 2), 16), ("paged", (2, 1, 2), 8),
         ("windows", (2, 1, 2), 8), ("int8", (2, 1, 1), 8), ("experts", (2, 1, 2), 16))


def weights(model):
    fresh = model.init(jax.random.key(0))
    louder = jax.tree.map(lambda x: x * 8 if x.ndim >= 3 else x, fresh["layers"])  # so that the context matters
    return fresh | {"layers": louder, "embed": fresh["embed"] * 30, "unembed": fresh["unembed"] * 8}


def request(uid, **changes):
    prompts = np.random.default_rng(5).integers(0, V, (P, 9)).tolist()
    prompts = [prompts[0][:1], prompts[3][:1], [*prompts[1], *prompts[2]], prompts[1][:5]]
    fields = dict(uid=uid, limit=T, tokens=prompts[uid // G % P], sampling=Sampling(0.8), stop_tokens=(7, 9))
    return Request(**(fields | changes))


def played(name, mesh, slots):
    """`uid -> [[tokens, log-probs] of each node]` of groups, turns, forks, beginnings and limits, and the engine."""
    model = MODELS[name]
    params = weights(model)
    fresh = adapters.init(jax.random.key(3), params, 2, 4.0, ("q", "v")) if name == "experts" else None
    lora = jax.tree.map(lambda x: x + 0.1, fresh)
    one = SlotEngine(model, params, jax.random.key(7), slots=slots, slot_tokens=64, chunks=(4,), mesh=mesh, lora=lora,
                     paged=name == "paged")
    found = {}

    def drain():
        while nodes := one.collect():
            for node in nodes:
                columns = node.tokens, node.logprobs, node.policy_version
                found.setdefault(node.uid, []).append([x.tolist() for x in columns])

    plain = [request(uid, keep=True, limit=T - uid % 3) for uid in range(P * G)]
    one.submit(*(dataclasses.replace(x, tokens=(*x.tokens, 3, 5), drawn=2) if x.uid % G == 1 else x for x in plain))
    drain()
    for uid in range(0, P * G, 2):
        one.extend(uid, [1, 2, uid], limit=2 * T)
    one.fork(4, (100, 101))
    drain()
    one.publish(1, jax.tree.map(lambda x: x * 1.1, params), lora)
    for uid in range(0, P * G, 4):
        one.extend(uid, [4], limit=3 * T)
    drain()
    for uid in [*range(P * G)]:
        one.release(uid)
    one.submit(*(request(uid, stop_tokens=(), limit=8) for uid in range(200, 200 + P * G)))
    before = one.decoded
    drain()
    return found, one, [now - then for then, now in zip(before, one.decoded)]


def compared(name, sizes, slots):
    """What differs between the mesh and one device, and the tokens of each replica in a batch of equal lengths."""
    mesh = parallel.make_mesh(*sizes, devices=jax.devices()[:int(np.prod(sizes))])
    alone, _, _ = played(name, None, slots)
    found, one, drawn = played(name, mesh, slots)
    equal = {uid: [node[::2] for node in nodes] for uid, nodes in found.items()} == {
        uid: [node[::2] for node in nodes] for uid, nodes in alone.items()}
    apart = [np.abs(np.subtract(a[1], b[1])).max(initial=0) for uid in alone for a, b in zip(alone[uid], found[uid]) if equal]
    return {"equal": equal, "apart": float(max(apart, default=np.inf)), "drawn": drawn, "left": len(one._rows)}


def sent(sizes):
    """Collectives of a chunk of one step, by kind: their number and the largest number of bytes, and their groups."""
    mesh = parallel.make_mesh(*sizes, devices=jax.devices()[:int(np.prod(sizes))])
    one = SlotEngine(PLAIN, weights(PLAIN), jax.random.key(7), slots=16, slot_tokens=64, chunks=(1,), mesh=mesh)
    one.submit(*(request(uid) for uid in range(P * G)))
    one._admit()
    chunk = one._chunk()
    one._caches.make_room(32)
    lowered = programs_of.decode.lower(
        PLAIN, one._weights, one._caches.slots, chunk.lanes, one._key, np.int32(4), np.zeros(0, np.int32), steps=1, common=0,
        near=None, transposed=False, pieces=sizes[2], mesh=mesh)
    found = collectives(lowered.compile().as_text(), 1)
    return [[c.kind, c.group, c.size] for c in found]


if __name__ == "__main__":
    result = {" ".join(map(str, case)): compared(*case) for case in CASES}
    print(json.dumps(result | {"sent": sent((2, 1, 4))}))
