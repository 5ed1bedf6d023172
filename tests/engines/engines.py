"""Engines of tiny real models, and what the scan sampler and a plain forward pass say that their rows are."""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.engines.sampling import draw
from jaxrl_llm.models import Experts, ModelConfig, Transformer

V, P, G, S, T = 64, 3, 4, 5, 20
STOPS = 7, 9
KEY = jax.random.key(7)
SHAPE = dict(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48,
             tie_embeddings=False)
MODELS = {"dense": Transformer(ModelConfig(**SHAPE)),
          "windows": Transformer(ModelConfig(**SHAPE, window=4, local_layers=(True, False), rope_local_theta=100.0)),
          "experts": Transformer(ModelConfig(**SHAPE, experts=Experts(count=4, per_token=2, size=24)))}
DENSE = MODELS["dense"]
OPTIONS = {}  # of every engine, see the fixture `caches`


@functools.cache
def params(name="dense", seed=0):
    fresh = MODELS[name].init(jax.random.key(seed))
    louder = jax.tree.map(lambda x: x * 8 if x.ndim >= 3 else x, fresh["layers"])  # so that the context matters
    return fresh | {"layers": louder, "embed": fresh["embed"] * 30, "unembed": fresh["unembed"] * 8}


def prompts():
    """P prompts of different lengths, of which one has a single token."""
    tokens = np.random.default_rng(5).integers(0, V, (P, S)).tolist()
    return [tokens[0][:1], tokens[1][:4], tokens[2]]


@functools.cache
def scanned(name="dense", seed=0, temperature=0.8, stop_tokens=STOPS, limit=T):
    """`uid -> (tokens, log-probs, entropies, stopped)` by the scan sampler, uids counted through P prompts x G."""
    rows, mask = np.zeros((P, S), np.int32), np.zeros((P, S), bool)
    for i, ids in enumerate(prompts()):
        rows[i, :len(ids)], mask[i, :len(ids)] = ids, True
    uids = np.arange(P * G).reshape(P, G)
    made = jax.device_get(generate(MODELS[name], params(name, seed), rows, mask, row_keys(KEY, uids),
                                   Sampling(np.float32(temperature)), max_tokens=limit, stop_ids=stop_tokens))
    return {p * G + g: (made.tokens[p, g][kept := made.mask[p, g]].tolist(), made.logprobs[p, g][kept],
                        made.entropies[p, g][kept], bool(made.stopped[p, g])) for p, g in np.ndindex(P, G)}


def engine(name="dense", slots=4, seed=0, slot_tokens=S + T, chunks=(4,), **options):
    return SlotEngine(MODELS[name], params(name, seed), KEY, slots=slots, slot_tokens=slot_tokens, chunks=chunks,
                  **OPTIONS | options)


def request(uid, **changes):
    fields = dict(uid=uid, limit=T, tokens=prompts()[uid // G % P], sampling=Sampling(0.8), stop_tokens=STOPS)
    return Request(**(fields | changes))


def drain(one):
    """All nodes to come, `uid -> nodes`."""
    found = {}
    while nodes := one.collect():
        for node in nodes:
            found.setdefault(node.uid, []).append(node)
    return found


def drain_through_losses(one, arrays):
    """All nodes, `uid -> node`, while `arrays(one)` are deleted behind the engine's back, three times where there are some."""
    found, failures = {}, 0
    while len(found) < P * G:
        found |= {node.uid: node for node in one.finished()}
        if failures < 3 and (lost := arrays(one)):
            for array in jax.tree.leaves(lost):
                array.delete()
            failures += 1
        try:
            one.step()
        except (RuntimeError, ValueError):
            one.recover()
    assert failures == 3
    return found


def compilations():
    """The seconds of each program that is compiled from now on; known ones are forgotten."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    params(), params("dense", 0)  # made before anything is counted
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    return compiled


def agrees(node, expected, start=0):
    """The node is what the scan sampler made from token `start` on."""
    tokens, logprobs, entropies, stopped = expected
    assert node.tokens.tolist() == tokens[start:]
    np.testing.assert_allclose(node.logprobs, logprobs[start:], atol=1e-5)
    np.testing.assert_allclose(node.entropies, entropies[start:], atol=1e-5)
    assert node.finish == ("stop" if stopped else "limit")


@functools.partial(jax.jit, static_argnames=("name",))
def all_logits(weights, row, length, name="dense"):
    normed, _, _ = MODELS[name].hidden_states(weights, row, jnp.arange(row.shape[1])[None] < length)
    return MODELS[name].logits(weights, normed)[0]


def logits_before(tokens, start, weights, name="dense"):
    """f64[n, V], the logits before each of `tokens[start:]` in a plain forward pass over the whole sequence."""
    row = np.zeros((1, 64), np.int32)
    row[0, :len(tokens)] = tokens
    return np.asarray(all_logits(weights, row, len(tokens), name)[start - 1:len(tokens) - 1], np.float64)


@jax.jit
def drawn_token(row_key, t, logits, sampling):
    return draw(jax.random.fold_in(row_key, t)[None], logits, sampling).token[0]


def plain(tokens, uid, drawn, count, sampling=Sampling(0.8), name="dense"):
    """The next `count` tokens of a trajectory that has drawn some, each by a plain forward pass over all before it."""
    tokens = list(tokens)
    row_key = row_keys(KEY, np.array([uid]))[0]
    for t in range(drawn, drawn + count):
        z = logits_before([*tokens, 0], len(tokens), params(name), name)
        tokens.append(int(drawn_token(row_key, t, z.astype(np.float32), sampling)))
    return tokens[-count:]


def busy():
    """An engine in the middle of its work."""
    one = engine()
    one.submit(*(request(uid) for uid in range(P * G)))
    one.step()
    return one
