"""Forked and paused rows: their caches stay on the device unless a row without a slot needs them."""
import jax
import pytest
from engines import G, T, agrees, drain, engine, plain, prompts, request, scanned

from jaxrl_llm.engines.caches import RowCaches


@pytest.fixture
def copies(monkeypatch):
    """The uids whose caches were copied to the host."""
    uids, copy = [], RowCaches.copy
    monkeypatch.setattr(RowCaches, "copy", lambda one, row: uids.append(row.request.uid) or copy(one, row))
    return uids


def endless(uid, **changes):
    """A request that only its limit ends, so that the test knows who runs."""
    return request(uid, stop_tokens=(), **changes)


def assert_whole(found, *uids):
    for uid in uids:
        agrees(*found[uid], scanned(stop_tokens=())[uid])


def assert_forked(found, uid, root, drawn):
    """The row continues what its `root` had `drawn` as a model run over the whole sequence would."""
    [node], before = found[uid], [*prompts()[root // G], *scanned(stop_tokens=())[root][0][:drawn]]
    assert node.start == len(before) and len(node.tokens) == T - drawn > 0
    assert node.tokens.tolist() == plain(before, uid, drawn, T - drawn)


def test_free_slots_take_forks_and_paused_rows_on_the_device(copies):
    one = engine(slots=8)
    one.submit(endless(4), endless(5), endless(8))
    one.step()
    one.fork(8, (100, 101))
    forked = one._rows[8].drawn
    one.pause(5)
    paused = one._rows[5].drawn
    one.step()
    assert one.running == (4, 8, 100, 101) and [row.cache for row in one._slots if row] == [None] * 5
    one.fork(5, (102,))  # of a paused row
    one.resume(5)
    found = drain(one)
    assert_whole(found, 4, 5, 8)
    assert found[100][0].parent == 8 and 0 < paused
    for uid, root, drawn in ((100, 8, forked), (101, 8, forked), (102, 5, paused)):
        assert_forked(found, uid, root, drawn)
    assert not copies and not [program for program in one.programs if program[0] == "take"]
    assert [program for program in one.programs if program[:2] == ("put", 8) and len(program) == 3]


def test_forks_wait_for_a_slot_while_their_parent_goes_on_and_share_one_copy_once_it_ends(copies):
    one = engine(slots=4)
    one.submit(endless(8, limit=14), endless(4), endless(5), endless(6))
    one.step()
    one.submit(endless(100, parent=8, tokens=()), endless(101, parent=8, tokens=()))
    forked = one._rows[8].drawn
    one.fork(100, (102,))  # of a row that waits itself
    one.submit(endless(103, parent=8, tokens=()))
    one.release(103)
    one.step()
    assert 14 > one._rows[8].drawn > forked and not copies and one._rows[102].source is one._rows[8]
    found = drain(one)
    assert copies == [8] and found[8][0].finish == "limit" and 103 not in found and found[102][0].parent == 100
    for uid in (100, 101, 102):
        assert_forked(found, uid, 8, forked)
    assert_whole(found, 4, 5, 6)


def test_forks_have_the_limit_of_the_last_extension():
    one = engine(slots=4)
    one.submit(endless(8, limit=4, keep=True))
    [root] = one.collect()
    one.extend(8, [5, 6], limit=12)
    one.fork(8, (100,))
    found = drain(one)
    before = [*prompts()[2], *root.tokens, 5, 6]
    for uid in (8, 100):
        assert found[uid][0].tokens.tolist() == plain(before, uid, 4, 8) and found[uid][0].finish == "limit"
    one.extend(8, [7], limit=15)
    one.fork(8, (101,))
    assert len(drain(one)[101][0].tokens) == 3


def test_a_paused_row_leaves_its_slot_when_another_needs_it(copies):
    one = engine(slots=4)
    one.submit(*(endless(uid) for uid in (4, 5, 6, 8)))
    one.step()
    one.pause(5)
    one.fork(5, (100,))
    one.release(100)
    one.submit(endless(9))
    one.step()
    assert copies == [5] and one._rows[5].slot is None and one.running == (4, 9, 6, 8)
    one.resume(5)
    assert_whole(drain(one), 4, 5, 6, 8, 9)


def test_forks_of_a_row_whose_cache_is_lost_are_read_again():
    one = engine(slots=4)
    one.submit(*(endless(uid) for uid in (8, 4, 5, 6)))
    one.step()
    one.fork(8, (100,))
    forked = one._rows[8].drawn
    one.pause(4)
    for array in jax.tree.leaves(one._caches.slots):
        array.delete()
    with pytest.raises((RuntimeError, ValueError)):
        one.step()
    one.recover()
    assert one._rows[4].paused and one.running == ()
    one.resume(4)
    found = drain(one)
    assert_forked(found, 100, 8, forked)
    assert_whole(found, 4, 5, 6, 8)
