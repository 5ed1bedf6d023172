"""Which programs the engine compiles, and what a caller reads of rows."""
import numpy as np
import pytest
from engines import G, P, S, T, V, agrees, compilations, drain, engine, params, prompts, request, scanned

from jaxrl_llm.engines import slots
from jaxrl_llm.engines.caches import rooms, together
from jaxrl_llm.engines.lanes import lane_counts


@pytest.mark.slow
def test_programs_are_counted_and_few():
    compiled = compilations()
    one = engine(slots=16, slot_tokens=60, chunks=(2, 4))
    one.submit(*(request(uid, keep=uid == 8) for uid in range(P * G)))
    one.step()
    one.fork(9, (90, 91))
    one.publish(1, params())
    drain(one)
    one.extend(8, [1, 2, 3], limit=T + 9)
    drain(one)
    one.release(8)
    for known in (False, True):  # what was met before compiles nothing
        before = len(compiled)
        one.submit(*(request(uid) for uid in range(P * G)))
        drain(one)
        assert len(compiled) == len(one.programs), one.programs
        assert not known or len(compiled) == before


@pytest.mark.slow
def test_caches_grow_by_few_sizes_and_lanes_shrink():
    assert rooms(93) == (32, 64, 96) and rooms(10) == (32,) and rooms(2000) == (512, 1024, 1504, 2016)
    assert lane_counts(64) == (64, 32, 16) and lane_counts(16) == (16, 8) and lane_counts(4) == (4,)
    for most in range(1, 3000, 7):
        sizes = rooms(most)
        assert len(sizes) <= 4 and sizes[-1] >= most and list(sizes) == sorted(set(sizes)) and all(n % 32 == 0 for n in sizes)
    one = engine(slots=16, slot_tokens=90, chunks=(8,))
    one.submit(*(request(uid, limit=80 if uid == 8 else 4, stop_tokens=()) for uid in range(P * G)))
    found = drain(one)
    decoded = [(program[1], program[3]) for program in one.programs if program[0] == "decode"]
    assert {lanes for lanes, _ in decoded} == {16, 8} and {room for _, room in decoded} == {32, 64, 96}
    assert found[8][0].tokens.tolist()[:T] == scanned(stop_tokens=())[8][0]


def test_draws_follow_a_seed_in_the_place_of_the_uid():
    one = engine(slots=16)
    one.submit(*(request(100 + uid, tokens=prompts()[uid // G], seed=uid) for uid in range(P * G)),
               request(200, tokens=prompts()[1], seed=5), request(300, tokens=prompts()[1], seed=5, keep=True))
    found = drain(one)
    for uid, expected in scanned().items():
        agrees(*found[100 + uid], expected)
    agrees(*found[200], scanned()[5])  # two rows may have one seed
    one.fork(300, [301])
    assert one._rows[301].request.stream == 301
    with pytest.raises(ValueError, match="from 0 to 2\\^63 - 1"):
        one.submit(request(400, seed=2**63))


def test_what_a_row_wrote_can_be_read_while_it_goes_on():
    one, seen = engine(slots=4, chunks=(4,)), []
    one.submit(request(5, stop_tokens=()))
    assert one.written(5).tokens.tolist() == [] and one.running == () and one.finished() == []
    while not (done := one.finished()):
        part = one.written(5, len(seen)) if one.running else None
        seen += [] if part is None else part.tokens.tolist()
        assert part is None or part.finish == "running" and part.start == len(prompts()[1]) + len(seen) - len(part.tokens)
        one.step()
    assert 0 < len(seen) < T and done[0].tokens.tolist()[:len(seen)] == seen and one.running == ()
    with pytest.raises(KeyError, match="uid 5 is not held"):
        one.written(5)


@pytest.mark.slow
def test_prompts_of_rows_that_wait_are_computed_with_those_that_begin(monkeypatch):
    calls, prefill = [], slots.prefill
    monkeypatch.setattr(slots, "prefill", lambda *given, **named: calls.append(given[2].shape) or prefill(*given, **named))
    one, tokens = engine(slots=8), np.random.default_rng(1).integers(0, V, (13, S)).tolist()
    one.submit(*(request(uid, tokens=tokens[uid], limit=4 + uid % 3, stop_tokens=()) for uid in range(13)))
    found = drain(one)
    assert len(calls) == 2 and len(found) == 13 and one.prefilled == 13 * (S - 1)
    alone = engine(slots=1)
    alone.submit(request(12, tokens=tokens[12], limit=4, stop_tokens=()))
    assert drain(alone)[12][0].tokens.tolist() == found[12][0].tokens.tolist()


@pytest.mark.slow
def test_chunks_end_early_where_rows_wait_and_others_idle(monkeypatch):
    seen, decode = [], slots.decode

    def watched(*given, **named):
        after = decode(*given, **named)
        seen.append((int(given[3].alive.sum()), int(given[5]), np.asarray(after[2].mask), bool(after[1].alive.any())))
        return after

    monkeypatch.setattr(slots, "decode", watched)
    one = engine("windows", slots=4, chunks=(20,))  # its rows do not begin within a chunk
    one.submit(*(request(uid) for uid in range(P * G)))
    found = drain(one)
    for uid, expected in scanned("windows").items():
        agrees(*found[uid], expected)
    for began, patience, mask, goes_on in seen:
        steps = int(mask.any(1).sum())
        idle = sum(began - int(living) for living in mask[:steps - 1].sum(1))  # before the last step, which was still begun
        assert idle <= patience and not mask[steps:].any() and (steps == 20 or patience == 4 or not goes_on)
    assert any(goes_on and mask[-1].sum() == 0 for _, _, mask, goes_on in seen)
    assert {patience for _, patience, _, _ in seen} == {4, 2**31 - 1}


@pytest.mark.parametrize(("lengths", "rows", "wanted"), (
    ([18] * 32, 32, (32, 32, 32)),  # all at once
    ([18] * 20, 32, (8, 8, 32)),  # too few for that
    ([5] * 24 + [60] * 8, 32, (8, 8, 16)),  # most are short
    ([18] * 8 + [60] * 24, 32, (32, 32, 64)),
    ([60] * 64, 64, (8, 8, 64)),  # too many tokens
    ([18] * 8, 8, (8, 8, 32)), ([300, 9], 8, (2, 4, 64)), ([9], 32, (1, 1, 16))))
def test_texts_that_go_into_slots_together(lengths, rows, wanted):
    assert together(lengths, rows) == wanted
