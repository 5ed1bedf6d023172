"""Rows whose caches begin alike read that part once: the same tokens, and only where caches really are alike."""
import functools
import types

import jax
import numpy as np
import pytest
from engines import KEY, MODELS, STOPS, T, V, agrees, drain, engine, params

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.engines.engine import Request
from jaxrl_llm.engines.lanes import Common, common_places

SYSTEM = np.random.default_rng(3).integers(0, V, 100).tolist()  # of all prompts
QUESTIONS = [SYSTEM + np.random.default_rng(seed).integers(0, V, n).tolist() for seed, n in ((4, 36), (5, 30), (6, 56))]
LONGEST = max(map(len, QUESTIONS))


def row(slot, tokens, begun=None, version=0, cached=None):
    begun = len(tokens) if begun is None else begun
    return types.SimpleNamespace(slot=slot, tokens=list(tokens), begun=(version, begun), cached=cached or begun)


def test_places_are_those_of_the_runs_that_spare_most():
    a, b, c = ([n] * 700 for n in (1, 2, 3))
    begin, short = [9] * 70, [n[:20] for n in (a, b, c)]
    assert common_places([row(0, a), row(1, a), row(2, b), row(3, b)]) == Common(512, (0, 2))
    assert common_places([row(4, a[:700]), row(1, a), row(2, a), row(3, a)]) == Common(512, (4,))
    assert common_places([row(i, begin + short[x]) for i, x in enumerate((0, 1, 0, 2))]) == Common(64, (0,))
    assert common_places([row(i, begin + x) for i, x in enumerate((a, a, b, b))]) == Common(768, (0, 2))
    assert common_places([row(0, a), row(1, b), row(2, a), row(3, b)]) == Common(0, ())
    assert common_places([row(0, a)]) == common_places([row(0, a[:63]), row(1, a[:63])]) == Common(0, ())


def test_idle_lanes_go_with_any_run_and_rows_alone_bound_it():
    a, b = ([n] * 700 for n in (1, 2))
    assert common_places([None, row(1, a), row(2, b), row(3, b)]) == Common(512, (1, 2))
    assert common_places([None, row(5, a, begun=130), None, None]) == Common(128, (5,))
    assert common_places([None, row(1, a, begun=100), row(2, b[:190]), None, None, None]) == Common(96, (1, 2, 0))


def test_what_is_short_beside_the_rest_is_not_read_apart():
    a = [1] * 700
    assert common_places([row(0, a), row(1, a, cached=2049)]) == Common(0, ())
    assert common_places([row(0, a), row(1, a, cached=2048)]) == Common(512, (0,))


def test_caches_of_other_weights_or_behind_what_was_read_at_once_are_not_alike():
    a = [1] * 700
    assert common_places([row(0, a), row(1, a, version=1)]) == Common(0, ())
    assert common_places([row(0, a, begun=200), row(1, a[:300])]) == Common(192, (0,))


@functools.cache
def whole(name):
    """The rows by the scan sampler, three of each question."""
    tokens = np.zeros((3, LONGEST), np.int32)
    for line, ids in zip(tokens, QUESTIONS):
        line[:len(ids)] = ids
    mask = np.arange(LONGEST) < np.array([len(ids) for ids in QUESTIONS])[:, None]
    made = jax.device_get(generate(MODELS[name], params(name), tokens, mask, row_keys(KEY, np.arange(9).reshape(3, 3)),
                                   Sampling(np.float32(0.8)), max_tokens=T, stop_ids=STOPS))
    return {3 * p + g: (made.tokens[p, g][kept := made.mask[p, g]].tolist(), made.logprobs[p, g][kept],
                        made.entropies[p, g][kept], bool(made.stopped[p, g])) for p, g in np.ndindex(3, 3)}


def asked(uid, **changes):
    fields = dict(uid=uid, limit=T, tokens=QUESTIONS[uid // 3 % 3], sampling=Sampling(0.8), stop_tokens=STOPS)
    return Request(**(fields | changes))


def shared(one):
    """What the chunks of an engine shared: (places, runs)."""
    return {program[-2:] for program in one.programs if program[0] == "decode"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_share_places_are_those_of_the_scan_sampler(name):
    """Groups beside each other share their prompts, mixed ones the system prompt; windows count from the true positions."""
    groups = engine(name, slots=9, slot_tokens=LONGEST + T)
    groups.submit(*(asked(uid) for uid in range(9)))
    mixed = engine(name, slots=9, slot_tokens=LONGEST + T)
    mixed.submit(*(asked(uid) for uid in (0, 3, 6, 1, 4, 7, 2, 5, 8)))
    nodes = drain(groups), drain(mixed)
    assert (128, 3) in shared(groups) and shared(mixed) == {(96, 1)}
    for uid, expected in whole(name).items():
        for one in nodes:
            agrees(*one[uid], expected)


@pytest.mark.slow
def test_forks_and_extended_rows_share_what_was_read_at_the_start():
    one = engine(slots=4, slot_tokens=LONGEST + 3 * T)
    one.submit(asked(0, keep=True, limit=5, stop_tokens=()))
    drain(one)
    one.submit(*(asked(uid, parent=0, tokens=[1, 2, 3], limit=12, stop_tokens=()) for uid in (20, 21)))
    one.extend(0, [1, 2, 3], limit=12)
    nodes = drain(one)
    assert (128, 1) in shared(one)
    alone = engine(slots=1, slot_tokens=LONGEST + 3 * T)
    alone.submit(asked(0, keep=True, limit=5, stop_tokens=()))
    first = drain(alone)[0][0]
    assert shared(alone) == {(0, 0)}
    for uid in (20, 21):
        alone.submit(asked(uid, parent=0, tokens=[1, 2, 3], limit=12, stop_tokens=()))
        assert drain(alone)[uid][0].tokens.tolist() == nodes[uid][0].tokens.tolist()
    assert len(first.tokens) == 5 and len(nodes[0][0].tokens) == 7


@pytest.mark.slow
def test_prompts_read_under_other_weights_are_read_apart():
    """A row that was there before a publication keeps its old cache; one that comes after has the new prompt."""
    def run(together):
        one = engine(slots=2, slot_tokens=LONGEST + T)
        one.submit(asked(0, stop_tokens=()))
        one.step()
        one.publish(1, params(seed=1))
        if together:
            one.submit(asked(1, stop_tokens=()))
        nodes = drain(one)
        if not together:
            one.submit(asked(1, stop_tokens=()))
            nodes |= drain(one)
        return one, nodes

    one, nodes = run(True)
    _, apart = run(False)
    assert shared(one) <= {(0, 0), (128, 1)}
    for uid in (0, 1):
        assert nodes[uid][0].tokens.tolist() == apart[uid][0].tokens.tolist()
        np.testing.assert_allclose(nodes[uid][0].logprobs, apart[uid][0].logprobs, atol=1e-5)


def prefilled(one, *requests):
    """The nodes of these rows, and how many tokens of prompts were computed for them."""
    before = one.prefilled
    one.submit(*requests)
    return drain(one), one.prefilled - before


@pytest.mark.parametrize("name", ("dense", *(pytest.param(n, marks=pytest.mark.slow) for n in ("windows", "experts"))))
def test_a_prompt_goes_on_from_what_an_earlier_one_begins_with(name):
    """64 of the 100 tokens that all have in common are a whole width; sliding-window layers keep no beginning."""
    one, own = engine(name, slots=4, slot_tokens=LONGEST + T), [len(tokens) - 1 for tokens in QUESTIONS]
    known = 0 if name == "windows" else 64
    for uid, wanted in ((0, own[0]), (3, own[1] - known), (6, own[2] - known), (7, 0)):
        nodes, computed = prefilled(one, asked(uid))
        agrees(*nodes[uid], whole(name)[uid])
        assert computed == wanted, uid


@pytest.mark.slow
def test_prompts_go_on_from_different_ones_beside_a_new_one():
    """From caches of several lengths, all at once, and with a prompt that begins like none."""
    def ask(uid, tokens):
        return asked(uid, tokens=tokens, limit=4, stop_tokens=())

    random = np.random.default_rng(20)
    a, b, c = (random.integers(0, V, n).tolist() for n in (330, 200, 20))
    one = engine(slots=8, slot_tokens=600)
    for uid, tokens in enumerate((a, b, c)):
        prefilled(one, ask(uid, tokens))
    later = {10: a + [1, 2, 3], 11: a[:130] + b, 12: b + a, 13: b[:70], 14: [5] + a, 15: b[:64] + [9]}
    nodes, computed = prefilled(one, *(ask(uid, tokens) for uid, tokens in later.items()))
    assert computed == (332 - 320) + (329 - 128) + (529 - 192) + (69 - 64) + 330 + (64 - 64)
    for uid, tokens in later.items():
        alone, _ = prefilled(engine(slots=1, slot_tokens=600), ask(uid, tokens))
        assert nodes[uid][0].tokens.tolist() == alone[uid][0].tokens.tolist()
        np.testing.assert_allclose(nodes[uid][0].logprobs, alone[uid][0].logprobs, atol=1e-5)
    nodes, computed = prefilled(one, ask(20, a + [7] * 40), ask(21, b + [7] * 40))  # and with none that is new
    assert computed == (369 - 320) + (239 - 192) and {"pick", "put"} <= {program[0] for program in one.programs}
    alone, _ = prefilled(engine(slots=1, slot_tokens=600), ask(20, a + [7] * 40))
    assert nodes[20][0].tokens.tolist() == alone[20][0].tokens.tolist()
    one.publish(1, params())
    assert prefilled(one, ask(30, a + [1]))[1] == 330


def test_a_recovered_engine_shares_what_it_read_again():
    one = engine(slots=3, slot_tokens=LONGEST + T)
    one.submit(*(asked(uid) for uid in range(3)))
    one.step()
    one.recover()
    nodes = drain(one)
    for uid in range(3):
        agrees(*nodes[uid], whole("dense")[uid])
