"""Runs in a process of its own with eight virtual devices: adapters of Tinker's clients on meshes and on one device."""
import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.contrib.tinker.examples import Datum
from jaxrl_llm.contrib.tinker.learner import Adam, AdapterLearner, LoraShape
from jaxrl_llm.contrib.tinker.service import Service
from jaxrl_llm.contrib.tinker.store import Store
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.serving.worker import Worker

MODEL = Transformer(ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
                                mlp_size=48, tie_embeddings=False))
MESHES = {"spread": dict(data=2, fsdp=2, tensor=2), "cut": dict(data=1, fsdp=2, tensor=2, seq=2)}


def weights():
    keys = iter(jax.random.split(jax.random.key(0), 40))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.4, MODEL.abstract_params())


def examples():
    rng = np.random.default_rng(0)
    return [Datum(*rng.integers(0, 64, (2, n)).astype(np.int32), {
        "logprobs": rng.normal(-4, 1, n).astype(np.float32), "advantages": rng.normal(size=n).astype(np.float32)})
        for n in (5, 31, 12, 1, 20, 40, 9)]


def learned(mesh):
    """`((log-probs, losses, gradients, adapter after two steps), whether it lies as the partition table says)`."""
    learner = AdapterLearner(MODEL, weights(), longest=64, budget=128, mesh=mesh)
    adapter = learner.create(LoraShape(3), 1)
    for _ in range(2):
        passed = learner.forward_backward(adapter, examples(), "ppo", {})
        grads = jax.device_get(adapter.grads)
        learner.step(adapter, Adam(0.01, eps=1e-3, weight_decay=0.1, clip_norm=1.0))
    ruled = mesh is None or all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(
        jax.tree.leaves(adapter.tree), jax.tree.leaves(parallel.tree_shardings(adapter.tree, mesh))))
    return (passed.logprobs, passed.losses, grads, jax.device_get(adapter.tree)), ruled


def sampled(mesh):
    """Tokens under a trained adapter from an engine on the mesh of the learner."""
    learner = AdapterLearner(MODEL, weights(), longest=64, budget=128, mesh=mesh)
    engine = SlotEngine(MODEL, learner.params, jax.random.key(0), slots=8, slot_tokens=64, lora=learner.padded(None, 4),
                        mesh=mesh)
    service = Service("tiny", learner, Worker(engine), Store(Path(tempfile.mkdtemp())), rank=4, models=2)
    session = service.begin()
    service.create(session, "m", "tiny", LoraShape(3), 1).result(300)
    for _ in range(3):
        service.run("m", examples(), "ppo", {}, True).result(300)
        service.step("m", Adam(0.05)).result(300)
    path = service.save("m", "state", False).result(300)
    service.load("again", path, True, session).result(300)
    service.save_to_sample("again", None, "s", False).result(300)
    nodes = service.sample(service.snapshot_of("s"), [Request(i, 8, [1, 2, 3], seed=i) for i in range(4)]).result(300)
    service.worker.close()
    return [node.tokens.tolist() for node in nodes]


def main():
    alone, _ = learned(None)
    result = {"largest": max(float(np.abs(x).max()) for x in jax.tree.leaves(alone[2]))}
    for name, sizes in MESHES.items():
        spread, ruled = learned(parallel.make_mesh(**sizes))
        pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True)
        result[name] = {"ruled": ruled, "apart": max(float(np.abs(a - b).max() / max(1, np.abs(a).max())) for a, b in pairs)}
    print(json.dumps(result | {"tokens": [sampled(None), sampled(parallel.make_mesh(data=4, tensor=2))]}))


if __name__ == "__main__":
    main()
