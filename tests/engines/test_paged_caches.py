"""Caches in pages of a pool: who shares them, what happens when there are no more, and the memory orders of the kernels.

`test_engine.py` runs all of its tests with them.
"""
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    KEY,
    MODELS,
    STOPS,
    G,
    P,
    S,
    T,
    V,
    agrees,
    compilations,
    drain,
    drain_through_losses,
    engine,
    params,
    plain,
    prompts,
    request,
    scanned,
)

from jaxrl_llm.engines import paged_caches, pages
from jaxrl_llm.engines.engine import SlotEngine
from jaxrl_llm.engines.pages import PAGE
from jaxrl_llm.kernels import paged
from jaxrl_llm.models import ModelConfig, Transformer

LONG = np.random.default_rng(8).integers(0, V, 37).tolist()  # more than two pages
pooled = functools.partial(engine, paged=True)


def asked(uid, **changes):
    return request(uid, **{"tokens": LONG, "stop_tokens": (), "limit": 6} | changes)


def assert_counted(one):
    """Every page of a shard is counted as often as it is used, page 0 by nobody, and those of nobody are free."""
    caches = one._caches
    for shard, (users, free) in enumerate(zip(caches._users, caches._free, strict=True)):
        lists = [row.pages for row in one._rows.values() if row.shard == shard] + [
            pages for (there, _), pages in caches.prefixes.items() if there == shard]
        counts = np.bincount([page for own in lists for page in own], minlength=len(users))
        assert (users == counts).all() and counts[0] == 0
        assert sorted([*free, *np.flatnonzero(counts)]) == list(range(1, caches._size))


def test_rows_of_a_prompt_share_its_pages_and_write_into_their_own():
    one = pooled(slots=4, slot_tokens=64)
    one.submit(*(asked(uid) for uid in range(4)))
    one.step()
    [whole, *others] = [row.pages for row in one._slots]
    assert one.prefilled == 36 and all(own[:2] == whole[:2] for own in others)
    assert len({own[2] for own in (whole, *others, *one._caches.prefixes.values())}) == 5
    assert_counted(one)
    one.submit(asked(9, tokens=[*LONG[:PAGE], *LONG[:20]]))  # a prompt that begins alike
    found = drain(one)
    assert one.prefilled == 36 + 19
    for uid in (0, 3):
        assert found[uid][0].tokens.tolist() == plain(LONG, uid, 0, 6)
    assert found[9][0].tokens.tolist() == plain([*LONG[:PAGE], *LONG[:20]], 9, 0, 6)
    assert_counted(one)
    one.publish(1, params())
    assert not one._caches._users.any()
    assert_counted(one)


@pytest.mark.parametrize("slots", (4, 1))
def test_prompts_that_begin_alike_are_read_in_turn_when_they_come_together(slots):
    """One begins as another does, a third as both do, and with one slot they are read while they wait."""
    asks = {0: LONG, 1: [*LONG[:2 * PAGE], 1, 2, 3], 2: [*LONG[:2 * PAGE], 1, 2, 3, *LONG[:10]], 3: LONG[:PAGE + 1], 4: [5, 6]}
    one = pooled(slots=slots, slot_tokens=64)
    one.submit(*(asked(uid, tokens=tokens, limit=2) for uid, tokens in asks.items()))
    found = drain(one)
    for uid, tokens in asks.items():
        assert found[uid][0].tokens.tolist() == plain(tokens, uid, 0, 2)
    if slots == 4:
        assert one.prefilled == 36 + 2 + 12 + 1
    assert_counted(one)


def test_prompts_in_use_stay_where_others_can_go():
    """Conversations that wait fill the pool; then rows of one prompt come, more than there are slots."""
    one = pooled(slots=2, slot_tokens=64)
    one.submit(*(asked(uid, tokens=[uid, *LONG], keep=True) for uid in range(6)))
    drain(one)
    before = one.prefilled
    one.submit(*(asked(uid) for uid in range(10, 20)))
    found = drain(one)
    assert one.prefilled == before + 36
    assert all(found[uid][0].tokens.tolist() == plain(LONG, uid, 0, 6) for uid in (10, 19))
    assert_counted(one)


def test_forks_and_paused_rows_move_nothing():
    one = pooled(slots=2, slot_tokens=64)
    one.submit(asked(0, limit=10, keep=True))
    one.step()
    one.fork(0, (10, 11, 12))
    stood, row = one._rows[0].drawn, one._rows[0]
    assert 0 < stood < 10 and {tuple(one._rows[uid].pages) for uid in (10, 11, 12)} == {tuple(row.pages[:3])}
    one.pause(0)
    one.step()
    one.resume(0)
    found = drain(one)
    before = [*LONG, *plain(LONG, 0, 0, stood)]
    for uid in (10, 11, 12):
        assert found[uid][0].tokens.tolist() == plain(before, uid, stood, 10 - stood)
    assert found[0][0].tokens.tolist() == plain(LONG, 0, 0, 10)
    assert not {name for name, *_ in one.programs} & {"take", "put"}
    assert_counted(one)


def test_what_finds_no_page_waits_on_the_host():
    """Nine conversations in two slots, whose pool holds two of the longest."""
    one, places = pooled(slots=2, slot_tokens=64), {}
    for turn in range(3):
        for uid in range(9):
            if turn:
                one.extend(uid, [uid, turn], limit=6 * (turn + 1))
            else:
                one.submit(asked(uid, tokens=[uid, *LONG[:20]], keep=True))
        for uid, [node] in drain(one).items():
            places.setdefault(uid, []).append(node)
        assert_counted(one)
    for uid, nodes in places.items():
        whole = [uid, *LONG[:20]]
        for turn, node in enumerate(nodes):
            whole += [uid, turn] if turn else []
            assert node.tokens.tolist() == plain(whole, uid, 6 * turn, 6)
            whole += node.tokens.tolist()
    assert {name for name, *_ in one.programs} >= {"take", "put"}
    assert one._caches.prefilled == 9 * 20 and one._caches.read == 9 * (20 + 2 * 2)  # nothing was read twice
    for uid in range(9):
        one.release(uid)
    one.publish(1, params())
    assert not one._caches._users.any()
    assert_counted(one)


@pytest.mark.parametrize("seed", (0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)))
def test_no_schedule_loses_a_page(seed):
    """Rows that are submitted, forked, paused, resumed, extended and released at random."""
    random, one, seen = np.random.default_rng(seed), pooled(slots=3, slot_tokens=60), {}
    free = iter(range(1000))
    for _ in range(60):
        held = list(one._rows)
        one.submit(*(asked(next(free), tokens=LONG[:random.integers(1, 30)], keep=True) for _ in range(random.integers(0, 2))))
        for action in (one.pause, one.resume, one.release, lambda uid: one.fork(uid, [next(free)]),
                       lambda uid: one.extend(uid, [3] * int(random.integers(1, 6)), limit=one._rows[uid].drawn + 2)):
            if held and random.random() < 0.3:
                try:
                    action(held[random.integers(len(held))])
                except (ValueError, KeyError):
                    pass  # not in that state
        one.step()
        for node in one.finished():
            seen[node.uid] = node
        assert_counted(one)
        for row in one._rows.values():
            assert row.cache is not None or len(row.pages) >= paged_caches.pages_of(row.cached)
    assert len(seen) > 9


def test_a_lost_pool_is_read_again():
    one = pooled(slots=4)
    one.submit(*(request(uid) for uid in range(P * G)))
    found = drain_through_losses(one, lambda one: one._caches.pool)
    for uid, expected in scanned().items():
        agrees(found[uid], expected)


def test_models_whose_caches_are_not_paged_are_refused():
    tiny = dict(vocab_size=V, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=8)
    with pytest.raises(ValueError, match="sliding-window layers, whose caches keep the window alone; leave paged caches out"):
        pooled("windows")
    for options, message in (({"int8_cache": True}, "paged or in eight bits"), ({"kernels": "tpu"}, "heads of 16; on TPUs")):
        with pytest.raises(ValueError, match=message):
            paged_caches.check_model(Transformer(ModelConfig(**tiny), **options))


@pytest.mark.slow
def test_programs_are_counted():
    compiled = compilations()
    one = pooled(slots=4, slot_tokens=60)
    one.submit(*(request(uid, keep=True) for uid in range(P * G)))
    one.step()
    one.fork(1, (90, 91))
    drain(one)
    for uid in range(P * G):
        one.extend(uid, [1, 2, 3], limit=T + 9)
    drain(one)
    assert {"copy", "take", "put", "lengthen", "extend", "decode"} <= {name for name, *_ in one.programs}
    assert len(compiled) == len(one.programs), one.programs


@pytest.mark.parametrize("kernels", ("plain", "cuda", "tpu"))
def test_every_order_of_memory_holds_the_same(kernels):
    """Tokens that are written, pages that are copied, taken, put back and read, against arrays of one row each."""
    rng, K, d = np.random.default_rng(0), 2, 8
    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)
    keys, values = random(5, PAGE, K, d), random(5, PAGE, K, d)
    pool = (paged.laid(kernels, keys, values),)
    new, page, place = [random(3, K, d) for _ in range(2)], jnp.array([4, 1, 1]), jnp.array([0, 3, 15])
    pool = (paged.written(kernels, pool[0], *new, page, place),)
    keys, values = (x.at[page, place].set(y) for x, y in zip((keys, values), new))
    pool = pages.copy(kernels, pool, np.array([1, 0], np.int32), np.array([2, 0], np.int32))
    keys, values = (x.at[2].set(x[1]) for x in (keys, values))
    pool = pages.lengthen(kernels, pool, pages=7)
    pool = pages.put(kernels, pool, pages.take(kernels, pool, np.array([4], np.int32)), np.array([6], np.int32))
    table = np.array([[6, 2], [3, 1]], np.int32)
    wanted = [np.concatenate([x, np.zeros_like(x[:1]), x[4:]])[table].reshape(2, 2 * PAGE, K, d).swapaxes(1, 2)
              for x in (keys, values)]
    for ours, theirs in zip(paged.read(kernels, pool[0], table), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_rows_by_the_program_of_gpus(monkeypatch):
    """In the order of memory of GPUs and by their kernel, which the interpreter runs: the tokens of the scan sampler."""
    kernel = paged.paged_attention
    monkeypatch.setattr(paged, "paged_attention", functools.partial(kernel, interpret=True))
    model = Transformer(MODELS["dense"].config, kernels="cuda")
    one = SlotEngine(model, params(), KEY, slots=2, slot_tokens=S + T, chunks=(4,), paged=True)
    one.submit(request(5), request(8, stop_tokens=STOPS))
    found = drain(one)
    for uid in (5, 8):
        agrees(*found[uid], scanned()[uid])
    assert one.prefilled == sum(len(prompts()[i]) - 1 for i in (1, 2))
