"""Sliding-window layers keep their window alone: the tokens of a plain forward pass without caches, and what caches hold."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import KEY, SHAPE, V, drain

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.engines.caches import RowCaches, near_places
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.engines.sampling import draw
from jaxrl_llm.engines.shards import shards
from jaxrl_llm.models import ModelConfig, Transformer

WINDOW, NEAR = 8, 96  # 8 + 64 places, in multiples of 32
MODELS = {"some": Transformer(ModelConfig(**SHAPE, window=WINDOW, local_layers=(True, False), rope_local_theta=100.0)),
          "all": Transformer(ModelConfig(**SHAPE, window=WINDOW, local_layers=(True, True))),
          "wide": Transformer(ModelConfig(**SHAPE, window=40, local_layers=(True, False), rope_local_theta=100.0))}
ENGINES = "some", "all"
LONG = np.random.default_rng(8).integers(0, V, 100).tolist()


@functools.cache
def params(name):
    fresh = MODELS[name].init(jax.random.key(4))
    louder = jax.tree.map(lambda x: x * 8 if x.ndim >= 3 else x, fresh["layers"])  # so that the context matters
    return fresh | {"layers": louder, "embed": fresh["embed"] * 30, "unembed": fresh["unembed"] * 8}


@functools.partial(jax.jit, static_argnames=("name",))
def drawn_after(name, weights, row, length, row_key, first, temperature):
    """The draw behind each token of `row i32[1, N]`: the one behind its first token is number `first` of the trajectory."""
    normed, _, _ = MODELS[name].hidden_states(weights, row, jnp.arange(row.shape[1])[None] < length)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(row_key, first + jnp.arange(row.shape[1]))
    return draw(keys, MODELS[name].logits(weights, normed)[0], Sampling(temperature))


def agrees(name, before, tokens, logprobs, uid, drawn=0, temperature=0.8):
    """Each of the `tokens` behind `before` is what is drawn from a plain forward pass over all before it."""
    row, whole = np.zeros((1, 240), np.int32), [*before, *tokens]
    row[0, :len(whole)] = whole
    expected = jax.device_get(drawn_after(name, params(name), row, len(whole), row_keys(KEY, np.array([uid]))[0],
                                          drawn - len(before) + 1, np.float32(temperature)))
    where = slice(len(before) - 1, len(whole) - 1)
    assert list(tokens) == expected.token[where].tolist()
    np.testing.assert_allclose(logprobs, expected.logprob[where], atol=2e-5)


def of_node(name, before, node, drawn=0, temperature=0.8):
    agrees(name, before, node.tokens.tolist(), node.logprobs, node.uid, drawn, temperature)


def engine(name):
    return SlotEngine(MODELS[name], params(name), KEY, slots=2, slot_tokens=200, chunks=(4,))


def request(uid, tokens=LONG, limit=60, **changes):
    return Request(uid, limit, tokens, **({"sampling": Sampling(0.8)} | changes))


@pytest.mark.slow
@pytest.mark.parametrize("name, temperature", (("wide", 0.8), ("wide", 0.0), ("all", 0.8)))
def test_the_scan_samples_what_a_forward_pass_without_caches_says(name, temperature):
    """Prompts padded on either side; the caches of a window of 40 have 32 places, then 40, which are then overwritten."""
    lengths, S, G, T = (60, 3, 20), 60, 2, 65
    tokens, mask = np.zeros((3, S), np.int32), np.zeros((3, S), bool)
    for i, (n, place) in enumerate(zip(lengths, (slice(60), slice(3), slice(40, 60)))):
        tokens[i, place], mask[i, place] = LONG[i:i + n], True
    uids = np.arange(3 * G).reshape(3, G)
    made = jax.device_get(generate(MODELS[name], params(name), tokens, mask, row_keys(KEY, uids),
                                   Sampling(np.float32(temperature)), max_tokens=T, stop_ids=()))
    assert made.mask.all()
    for p, g in np.ndindex(3, G):
        agrees(name, LONG[p:p + lengths[p]], made.tokens[p, g].tolist(), made.logprobs[p, g], uids[p, g],
               temperature=temperature)


def places(arrays, axis):
    return [x.shape[axis] for x in arrays]


def test_window_layers_have_the_places_of_their_window():
    model, rows = MODELS["some"], jnp.zeros((2, 40), jnp.int32)
    prompt, _ = jax.eval_shape(model.prefill, model.abstract_params(), rows, rows >= 0)
    own = jax.eval_shape(lambda prompt: model.empty_completions(prompt, 4, 64), prompt)
    assert places(prompt.keys, 3) == places(prompt.values, 2) == [WINDOW, 40]
    assert places(own.keys, 4) == places(own.values, 3) == [WINDOW, 64]
    assert own.keys[0].shape == (2, 2, 4, 8, 8) and own.keys[1].shape == (2, 2, 4, 8, 64)
    assert near_places(WINDOW, 16) == near_places(32, 16) == near_places(WINDOW, 40) == NEAR < near_places(33, 16)
    caches = {name: RowCaches(MODELS[name], shards(jax.devices()[0], None, 4), 1000, 16, transposed=False, programs=set())
              for name in ENGINES}
    for length, some, whole in ((30, [96, 256], 32), (90, [96, 256], 96), (300, [96, 512], 96), (1000, [96, 1024], 96)):
        for one in caches.values():
            one.make_room(length)
        assert places(caches["some"].slots.keys, 3) == places(caches["some"].slots.values, 2) == some
        assert places(caches["all"].slots.values, 2) == [whole] * 2
    assert sum(x.nbytes for x in jax.tree.leaves(caches["all"].slots)) == 4 * 2 * 2 * 2 * 8 * 96 * 4  # rows, k and v, ...


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_forks_that_wait_while_their_parent_overwrites_its_window(name):
    """They wait for a row that ends when its and the parent's 96 places hold nothing more of what the forks see."""
    one = engine(name)
    one.submit(request(0, LONG[:70], 120), request(1, LONG[:70], 100))
    one.step()
    one.fork(0, (10, 11))
    begun = one.written(0).tokens.tolist()
    assert 4 <= len(begun) <= 8
    nodes = drain(one)
    of_node(name, LONG[:70], *nodes[0])
    of_node(name, LONG[:70], *nodes[1])
    for uid in (10, 11):
        of_node(name, [*LONG[:70], *begun], *nodes[uid], drawn=len(begun))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_rows_that_stopped_at_a_text_or_paused_go_on_from_there(name):
    """The device decodes beyond a stop sequence until the host sees it; what it overwrites no later token needs."""
    free = engine(name)
    free.submit(request(3))
    whole = free.collect()[0].tokens.tolist()
    at = next(i for i in range(41, 55, 4) if tuple(whole[i:i + 2]) not in set(zip(whole[:i], whole[1:i + 1])))
    one = engine(name)
    one.submit(request(3, stop_sequences=(tuple(whole[at:at + 2]),), keep=True), request(4))
    one.step()
    one.step()
    first = one.pause(4)
    nodes = drain(one)
    assert nodes[3][0].finish == "stop_string" and nodes[3][0].tokens.tolist() == whole[:at + 2]
    one.extend(3, LONG[:3], limit=at + 30)
    one.resume(4)
    nodes = drain(one)
    of_node(name, [*LONG, *whole[:at + 2], *LONG[:3]], *nodes[3], drawn=at + 2)
    assert nodes[4][0].tokens.tolist()[:len(first.tokens)] == first.tokens.tolist()
    of_node(name, LONG, *nodes[4])


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_rows_longer_than_their_caches_are_those_of_a_forward_pass(name):
    """Prompts of two widths and of one token, more rows than slots, kept ones moved to the host before they continue."""
    one = engine(name)
    prompts = {0: LONG, 1: LONG[:1], 2: LONG[5:80], 3: LONG}
    limits = {0: 60, 1: 110, 2: 60, 3: 60}
    one.submit(*(request(uid, tokens, limits[uid], keep=uid < 2, sampling=Sampling(0.0 if uid == 3 else 0.8))
                 for uid, tokens in prompts.items()))
    found = drain(one)
    for uid, tokens in prompts.items():
        of_node(name, tokens, *found[uid], temperature=0.0 if uid == 3 else 0.8)
    for uid in (0, 1):
        before = [*prompts[uid], *found[uid][0].tokens.tolist(), *LONG[:25]]
        one.extend(uid, LONG[:25], limit=limits[uid] + 12)
        [node] = drain(one)[uid]
        of_node(name, before, node, drawn=limits[uid])


@pytest.mark.slow
def test_a_recovered_engine_reads_its_windows_again():
    one = engine("some")
    one.submit(request(0), request(1, LONG[:9]))
    for _ in range(4):
        one.step()
    one.recover()
    found = drain(one)
    of_node("some", LONG, *found[0])
    of_node("some", LONG[:9], *found[1])
