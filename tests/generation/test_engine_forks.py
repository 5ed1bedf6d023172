"""Forked and paused rows: their caches stay on the device unless a row without a slot needs them."""
import jax
import pytest
from engines import S, T, agrees, drain, engine, plain, prompts, request, scanned

from jaxrl_llm.generation.engine import Engine


@pytest.fixture
def copies(monkeypatch):
    """The uids whose caches were copied to the host."""
    uids, copy = [], Engine._copy
    monkeypatch.setattr(Engine, "_copy", lambda one, row: uids.append(row.request.uid) or copy(one, row))
    return uids


def assert_forked(node, parent, stood, limit=T):
    """The node continues the first `stood` tokens of its parent as a model run over the whole sequence would."""
    assert node.start == S + stood and node.parent == parent.uid and len(node.tokens) == limit - stood
    assert node.tokens.tolist() == plain([*prompts()[2], *parent.tokens[:stood]], node.uid, stood, limit - stood)


def test_free_slots_take_forks_and_paused_rows_on_the_device(copies):
    one = engine(slots=16)
    one.submit(*(request(uid) for uid in (4, 5)), request(8, stop_tokens=()))
    one.step()
    one.fork(8, (100, 101))
    stood = one._rows[8].drawn
    one.pause(5)
    one.step()
    assert [row.cache for row in one._slots if row] == [None] * 5 and 5 not in one.running
    one.fork(5, (102,))  # of a paused row
    one.resume(5)
    found = drain(one)
    for uid in (4, 5):
        agrees(*found[uid], scanned()[uid])
    assert found[8][0].tokens.tolist() == scanned(stop_tokens=())[8][0] and 0 < stood < T
    for uid in (100, 101):
        assert_forked(found[uid][0], found[8][0], stood)
    assert found[102][0].start > len(prompts()[1])
    assert not copies and not [program for program in one.programs if program[0] == "take"]
    assert [program for program in one.programs if program[:2] == ("put", 8) and len(program) == 3]


def test_forks_wait_for_a_slot_while_their_parent_goes_on_and_share_one_copy_once_it_ends(copies):
    one = engine(slots=4)
    one.submit(request(8, limit=9, stop_tokens=()), *(request(uid, stop_tokens=()) for uid in (4, 5, 6)))
    one.step()
    stood = one._rows[8].drawn
    one.submit(*(request(uid, parent=8, tokens=(), stop_tokens=()) for uid in (100, 101)))
    one.fork(100, (102,))  # of a row that waits itself
    one.submit(request(103, parent=8, tokens=(), stop_tokens=()))
    one.release(103)
    one.step()
    assert one._rows[8].drawn > stood and not copies and one._rows[102].source is one._rows[8]
    found = drain(one)
    assert copies == [8] and found[8][0].finish == "limit" and 103 not in found
    for uid in (100, 101):
        assert_forked(found[uid][0], found[8][0], stood)
    assert found[102][0].tokens.tolist() == plain([*prompts()[2], *found[8][0].tokens[:stood]], 102, stood, T - stood)
    for uid in (4, 5, 6):
        assert found[uid][0].tokens.tolist() == scanned(stop_tokens=())[uid][0]


def test_a_paused_row_leaves_its_slot_when_another_needs_it(copies):
    one = engine(slots=4)
    one.submit(*(request(uid) for uid in (4, 5, 6, 8)))
    one.step()
    one.pause(5)
    one.fork(5, (100,))
    one.release(100)
    one.submit(request(9))
    one.step()
    assert copies == [5] and one._rows[5].slot is None and 9 in one.running
    one.resume(5)
    found = drain(one)
    for uid in (4, 5, 6, 8, 9):
        agrees(*found[uid], scanned()[uid])


def test_forks_of_a_row_whose_cache_is_lost_are_read_again():
    one = engine(slots=4)
    one.submit(*(request(uid, stop_tokens=()) for uid in (8, 4, 5, 6)))
    one.step()
    stood = one._rows[8].drawn
    one.fork(8, (100,))
    one.pause(4)
    for array in jax.tree.leaves(one._caches.slots):
        array.delete()
    with pytest.raises((RuntimeError, ValueError)):
        one.step()
    one.recover()
    assert one._rows[4].paused and one.running == ()
    one.resume(4)
    found = drain(one)
    assert_forked(found[100][0], found[8][0], stood)
    for uid in (8, 4, 5, 6):
        assert found[uid][0].tokens.tolist() == scanned(stop_tokens=())[uid][0]
