"""Rows that take the lanes of others within a chunk: they are those of the scan sampler, and nobody loses anything."""
import functools

import jax
import numpy as np
import pytest
from engines import (
    DENSE,
    KEY,
    G,
    P,
    agrees,
    drain,
    drawn_token,
    engine,
    logits_before,
    params,
    plain,
    prompts,
    request,
    scanned,
)

from jaxrl_llm.engines import Sampling, reserve, row_keys, slots
from jaxrl_llm.engines.slots import Slots

LONG = np.random.default_rng(8).integers(0, 64, 37).tolist()


@pytest.fixture
def chunks(monkeypatch):
    """What each chunk with a reserve drew, who entered in it, and the places of its slots."""
    seen, decode = [], reserve.decode

    def watched(*given, **named):
        after = decode(*given, **named)
        seen.append((*jax.device_get(after[2:]), after[0].room))
        return after

    monkeypatch.setattr(reserve, "decode", watched)
    return seen


def entered(chunks):
    return sum(int(entries.end - entries.begin) for _, entries, _ in chunks)


@pytest.mark.parametrize("name", ("dense", "experts"))
def test_no_lane_idles_while_rows_wait(name, chunks):
    one = engine(name, slots=4, chunks=(20,))
    one.submit(*(request(uid) for uid in range(P * G)))
    found = drain(one)
    for uid, expected in scanned(name).items():
        agrees(*found[uid], expected)
    assert entered(chunks) >= 2 and any(0 < step < 20 for _, entries, _ in chunks for step in entries.step)
    assert max(int(drawn.mask.sum()) for drawn, *_ in chunks) == 4 * 20


def test_chunks_follow_each_other_while_rows_wait(chunks):
    """The next one is dispatched before it is known who entered in the last one; and other weights are used from it on."""
    one, ahead, found = engine(slots=4, chunks=(4,), slot_tokens=32), 0, {}
    one.submit(*(request(uid, tokens=LONG[uid % 3:][:9], limit=3 + 2 * uid % 7, stop_tokens=()) for uid in range(40)))
    while one.step():
        ahead += bool(one._flights) and bool(one._queue)
        found |= {node.uid: node.tokens.tolist() for node in one.finished()}
        one.publish(one.version + 1, params())
    assert ahead >= 4 and entered(chunks) > 20
    for uid in range(40):
        assert found[uid] == plain(LONG[uid % 3:][:9], uid, 0, 3 + 2 * uid % 7)


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_row_or_loses_one(seed):
    """Requests that are kept, forked, paused, extended and released while chunks follow each other."""
    random = np.random.default_rng(seed)
    one, tokens, texts = engine(slots=4, chunks=(4, 8), slot_tokens=64), {}, {}
    waiting, live = list(range(30)), []
    while waiting or one.step():
        for uid in waiting[:random.integers(0, 9)]:
            prompt = LONG[uid % 5:][:2 + uid % 9]
            one.submit(request(uid, tokens=prompt, limit=int(random.integers(2, 20)), stop_tokens=(), keep=uid % 4 == 0))
            tokens[uid], live = [*prompt], live + [uid]
            waiting.remove(uid)
        one.step()
        for node in one.finished():
            tokens[node.uid] += node.tokens.tolist()
            texts.setdefault(node.uid, []).extend(node.tokens.tolist())
        if (running := [row for row in one._decoding() if row.request.uid < 30]) and random.random() < 0.4:
            row = running[random.integers(len(running))]
            try:
                one.pause(row.request.uid)
                one.resume(row.request.uid)
            except (KeyError, ValueError):
                pass  # it ended in a chunk in flight
    assert sorted(texts) == list(range(30))
    for uid, text in texts.items():
        assert text == plain(LONG[uid % 5:][:2 + uid % 9], uid, 0, len(text))
    for uid in range(0, 30, 4):  # those that were kept go on with all that they have read
        one.extend(uid, [1, 2], limit=len(texts[uid]) + 3)
    found = drain(one)
    for uid in range(0, 30, 4):
        assert found[uid][0].tokens.tolist() == plain([*tokens[uid], 1, 2], uid, len(texts[uid]), 3)


def test_who_enters_draws_a_token_in_the_same_chunk(chunks):
    """Under the weights that read its prompt: nobody enters behind a chunk's last step, after which others may be published."""
    one, found = engine(slots=4, chunks=(4,), slot_tokens=32), {}
    one.submit(*(request(uid, tokens=LONG[uid % 3:][:9], limit=2 + uid % 7, stop_tokens=()) for uid in range(40)))
    while one.step():
        found |= {node.uid: node for node in one.finished()}
        one.publish(one.version + 1, params("dense", (one.version + 1) % 2))
    assert entered(chunks) > 20 and all(
        drawn.mask[step, lane] for drawn, entries, _ in chunks
        for lane, step in zip(entries.lane[:entries.end - entries.begin], entries.step[:entries.end - entries.begin]))
    alike = [node for node in found.values() if len(set(node.policy_version % 2)) == 1]
    assert len(alike) > 10
    for node in alike:  # all of it under the same weights, its prompt too
        uid = node.uid
        tokens, weights = LONG[uid % 3:][:9], params("dense", int(node.policy_version[0]) % 2)
        for t, token in enumerate(node.tokens):
            logits = logits_before([*tokens, 0], len(tokens), weights).astype(np.float32)
            assert token == int(drawn_token(row_keys(KEY, np.array([uid]))[0], t, logits, Sampling(0.8)))
            tokens.append(int(token))


def test_a_short_prompt_may_begin_late_in_a_chunk(chunks):
    """Its first position lies in front of the chunk's."""
    one = engine(slots=2, chunks=(20,), slot_tokens=32)
    one.submit(request(0, tokens=LONG[:2], limit=15, stop_tokens=()), request(1, tokens=LONG[:9], limit=20, stop_tokens=()),
               request(2, tokens=LONG[3:5], limit=12, stop_tokens=()))
    found = drain(one)
    assert entered(chunks) == 1 and chunks[0][1].step[0] == 15
    assert found[2][0].tokens.tolist() == plain(LONG[3:5], 2, 0, 12)


def test_rows_that_end_together_are_followed_by_the_next_chunk_with_short_caches(chunks):
    one = engine(slots=4, chunks=(16,), slot_tokens=64)
    one.submit(*(request(uid, tokens=LONG[:9], limit=40, stop_tokens=()) for uid in range(12)))
    drain(one)
    assert [room for *_, room in chunks] == [32, 64, 64] * 2 and not entered(chunks)


def test_rows_that_are_kept_and_parents_of_waiting_forks_keep_their_lanes(chunks):
    one = engine(slots=2, slot_tokens=40)
    one.submit(request(8, limit=18, stop_tokens=(), keep=True), request(4, limit=12, stop_tokens=()))
    one.step()
    one.submit(request(9, limit=9, stop_tokens=()))
    one.fork(4, [40])
    before = [*one._rows[4].tokens]
    assert one.running == (8, 4) and [row.request.uid for row in one._queue] == [9, 40]
    found = drain(one)
    assert found[4][0].tokens.tolist() == plain(prompts()[1], 4, 0, 12)
    assert found[9][0].tokens.tolist() == plain(prompts()[2], 9, 0, 9)
    assert found[40][0].tokens.tolist() == plain(before, 40, len(before) - 4, 16 - len(before))
    one.extend(8, [1, 2, 3], limit=24)
    start = prompts()[2] + found[8][0].tokens.tolist() + [1, 2, 3]
    assert drain(one)[8][0].tokens.tolist() == plain(start, 8, 18, 6)
    assert not entered(chunks)


def test_rows_that_enter_have_their_own_sampling_limits_keys_and_stop_strings(chunks):
    one = engine(slots=2, chunks=(16,), slot_tokens=48)
    text = scanned(stop_tokens=())[5][0]
    asked = {4: {}, 8: {"limit": 5}, 9: {"sampling": Sampling(0.8, top_k=3)}, 10: {"sampling": Sampling(0.0)},
             5: {"stop_sequences": [text[3:5]]}, 11: {"seed": 7, "stop_tokens": (7, 9, 11, 13, 15)}}
    alone = engine(slots=2, chunks=(16,), slot_tokens=48)
    expected = {}
    for uid, changes in asked.items():
        alone.submit(request(uid, **{"stop_tokens": ()} | changes))
        expected |= drain(alone)
    chunks.clear()
    one.submit(*(request(uid, **{"stop_tokens": ()} | changes) for uid, changes in asked.items()))
    found = drain(one)
    assert entered(chunks) > 2
    for uid, (node,) in expected.items():
        assert found[uid][0].tokens.tolist() == node.tokens.tolist() and found[uid][0].finish == node.finish
        np.testing.assert_allclose(found[uid][0].logprobs, node.logprobs, atol=1e-5)


def test_prompts_of_several_blocks_and_lengths_wait_together(chunks):
    own = {uid: LONG[uid % 7:][:2 + 5 * (uid % 6)] for uid in range(24)}
    one = engine(slots=4, chunks=(16,), slot_tokens=64)
    one.submit(*(request(uid, tokens=own[uid], limit=2 + uid % 7, stop_tokens=()) for uid in own))
    found = drain(one)
    assert entered(chunks) >= 8 and one.prefilled == sum(len(tokens) - 1 for tokens in {tuple(x) for x in own.values()})
    for uid, tokens in own.items():
        assert found[uid][0].tokens.tolist() == plain(tokens, uid, 0, 2 + uid % 7)
    assert len(one._caches.prefixes) <= 4


def test_slots_stay_where_they_are():
    """A chunk's program needs no second copy of them."""
    one = engine(slots=16, slot_tokens=64)
    one.submit(*(request(uid, tokens=prompts()[2]) for uid in range(20)))
    one._admit()
    chunk, empty = one._chunk(), slots.empty(DENSE, 16, 2048, None)
    program = reserve.decode.lower(DENSE, one._weights, empty, chunk.lanes, KEY, np.int32(16), chunk.following.reserve, 0,
                                   steps=4, transposed=one._transposed)
    assert program.compile().memory_analysis().temp_size_in_bytes < sum(x.nbytes for x in jax.tree.leaves(empty)) / 4


@pytest.mark.parametrize("width", (4, 16))
def test_what_does_not_fit_behind_a_row_is_dropped(width):
    random = np.random.default_rng(0)
    old = Slots(*jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), slots.empty(DENSE, 6, 32, None)))
    new = Slots(*jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), slots.empty(DENSE, 5, width, None)))
    slot, length = np.array([4, 0, 6, 5, 2], np.int32), np.array([0, 32, 3, 31, 32 - width // 2], np.int32)
    made = jax.jit(functools.partial(slots.appended, DENSE.config, near=None))(old, new, slot, length)
    expected = jax.tree.map(np.copy, old)
    for i, (row, begin) in enumerate(zip(slot, length)):
        for n in range(width):
            if row < 6 and begin + n < 32:
                for x, y in zip(expected.keys, new.keys):
                    x[row, :, :, begin + n] = y[i, :, :, n]
                for x, y in zip(expected.values, new.values):
                    x[row, :, begin + n] = y[i, :, n]
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_slot_may_be_filled_to_its_last_place():
    """By chunks, of which some end early within the last places, and by what others write."""
    one = engine(slots=2, chunks=(16,), slot_tokens=64)
    one.submit(request(0, tokens=LONG, limit=27, stop_tokens=(), keep=True),
               request(1, tokens=LONG[1:], limit=14, stop_tokens=(), keep=True),
               *(request(uid, tokens=LONG[:4], limit=3, stop_tokens=(), keep=True) for uid in range(2, 9)))
    found = drain(one)
    assert found[0][0].tokens.tolist() == plain(LONG, 0, 0, 27) and one._caches.slots.room == 64
    one.extend(1, LONG[:12], limit=16)
    written = [*LONG[1:], *found[1][0].tokens.tolist(), *LONG[:12]]
    assert len(written) == 62 and drain(one)[1][0].tokens.tolist() == plain(written, 1, 14, 2)
