"""Rows that end, wait for the tokens of others and continue, some in their slots and some after others took these."""
import collections

import numpy as np
import pytest
from engines import G, P, S, engine, plain, prompts, request

TURN, ANSWERS = 4, ([5], [6, 2, 3], list(range(11, 30)))


def conversations(slots, seed, chunks=(4,)):
    """`uid -> (ids, places of the policy's tokens)` after four turns, answered in a random order, late or at once."""
    random = np.random.default_rng(seed)
    one = engine(slots=slots, slot_tokens=S + 4 * TURN + 3 * 19 + 2, chunks=chunks)
    ids = {uid: list(prompts()[uid // G]) for uid in range(P * G)}
    places, turns, late = collections.defaultdict(list), collections.Counter(), []
    one.submit(*(request(uid, limit=TURN, stop_tokens=(), keep=True) for uid in ids))
    while True:
        nodes = one.collect()
        for node in nodes:
            assert node.start == len(ids[node.uid])
            places[node.uid] += range(node.start, node.start + len(node.tokens))
            ids[node.uid] += node.tokens.tolist()
            turns[node.uid] += 1
            late.append(node.uid)
        if not nodes and not late:
            return one, ids, places
        random.shuffle(late)
        count = random.integers(0, len(late) + 1) if nodes else len(late)
        for uid in late[:count]:
            if turns[uid] == 4:
                one.release(uid)
            else:
                said = ANSWERS[(uid + turns[uid]) % 3]
                ids[uid] += said
                one.extend(uid, said, limit=TURN * (turns[uid] + 1))
        late = late[count:]


@pytest.mark.parametrize("slots, seed", [(4, 0), (4, 1), pytest.param(16, 2, marks=pytest.mark.slow)])
def test_rows_continue_where_they_ended_whoever_ran_in_between(slots, seed):
    _, ids, places = conversations(slots, seed)
    for uid, whole in ids.items():
        drawn = 0
        for place in places[uid]:
            assert whole[place] == plain(whole[:place], uid, drawn, 1)[0], (uid, place)
            drawn += 1
        assert drawn == 4 * TURN


@pytest.mark.slow
def test_rows_that_continue_in_their_slots_are_not_copied_and_read_their_tokens_together(monkeypatch):
    def refused(*_):
        raise AssertionError("a cache was fetched")
    one = engine(slots=16, slot_tokens=64)
    monkeypatch.setattr(type(one._caches), "copy", refused)
    one.submit(*(request(uid, limit=TURN, stop_tokens=(), keep=True) for uid in range(P * G)))
    while len(nodes := one.finished()) < P * G:
        one._done = nodes
        one.step()
    for uid in range(P * G):
        one.extend(uid, [1, 2, 3], limit=2 * TURN)
    assert one.running == tuple(range(P * G))
    assert len(one.collect()) == P * G
    extends = {program for program in one.programs if program[0] == "extend"}
    assert {lanes for _, lanes, *_ in extends} == {16} and not [p for p in one.programs if p[0] == "take"]


def test_a_row_that_ended_is_read_again_after_an_error():
    one = engine(slots=4, slot_tokens=64)
    one.submit(request(8, limit=TURN, stop_tokens=(), keep=True))
    [node] = one.collect()
    one.recover()
    assert one.running == () and not one.step()
    one.extend(8, [5, 6], limit=2 * TURN)
    [last] = one.collect()
    assert last.tokens.tolist() == plain([*prompts()[2], *node.tokens, 5, 6], 8, TURN, TURN)
