"""The scan sampler and the slot engine behind one contract: the same requests are the same nodes."""
import dataclasses
import functools
import os

import jax
import numpy as np
import pytest
from engines import DENSE, KEY, MODELS, STOPS, G, P, S, T, V, params, prompts

from jaxrl_llm.engines import Sampling, base, generate, kinds, row_keys, scan
from jaxrl_llm.engines.caches import widths_of
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.engines.scan import ScanEngine
from jaxrl_llm.models import RopeScaling, Transformer
from jaxrl_llm.parallel import make_mesh
from jaxrl_llm.tokenizers.byte import ByteTokenizer

WARM = Sampling(np.float32(0.8))


def asked(sampling=WARM, limits=(T,) * P, begun=None, stop_ids=STOPS, ids=None, group=G, **fields):
    """Requests of P groups whose keys are those of the uids from 2^33 on; `begun`: what each has behind its prompt."""
    ids = ids or prompts()
    uids = 2**33 + np.arange(len(ids) * group)
    words = np.asarray(jax.random.key_data(row_keys(KEY, uids))).tolist()
    begun = begun or [[]] * len(words)
    return [Request(uid, limits[n // group], [*ids[n // group], *begun[n]], sampling=sampling, stop_tokens=stop_ids,
                    key=tuple(words[n]), drawn=len(begun[n]), **fields) for n, uid in enumerate(uids.tolist())]


def scanning(name="dense", stop_ids=STOPS, most=T, parts=1, prompts=P, prompt_tokens=S, group=G, columns=()):
    program = functools.partial(generate, MODELS[name], max_tokens=most, stop_ids=stop_ids, columns=columns)
    return ScanEngine(program, params(name), None, 5, prompts=prompts, group=group, parts=parts,
                      prompt_tokens=prompt_tokens, max_tokens=most, mesh=make_mesh(data=1), vocab=V)


def slots(slots=4, slot_tokens=S + T, **options):
    return SlotEngine(DENSE, params(), jax.random.key(1), slots=slots, slot_tokens=slot_tokens, version=5, **options)


def nodes(engine, requests):
    engine.submit(*requests)
    made = {}
    while found := engine.collect():
        made |= {node.uid: node for node in found}
    return made


def assert_alike(one, other):
    assert one.keys() == other.keys() and one
    for uid, node in one.items():
        same = other[uid]
        assert (node.finish, node.start) == (same.finish, same.start)
        np.testing.assert_array_equal(node.tokens, same.tokens)
        np.testing.assert_array_equal(node.policy_version, same.policy_version)
        for name in ("logprobs", "entropies"):
            np.testing.assert_allclose(getattr(node, name), getattr(same, name), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("sampling", (pytest.param(WARM, marks=pytest.mark.slow), Sampling(np.float32(0.8), top_k=20)))
def test_slots_sample_what_the_scan_samples(sampling):
    scanned = nodes(scanning(), asked(sampling))
    assert_alike(scanned, nodes(slots(), asked(sampling)))
    assert len({len(node.tokens) for node in scanned.values()}) > 2
    assert {node.finish for node in scanned.values()} == {"stop", "limit"}


def test_limits_of_prompts_and_beginnings_hold_in_both():
    """Some rows have tokens of an expert behind the prompt, which count; each prompt has its limit."""
    limits, begun = (3, T, 9), [[]] * (P * G)
    begun[1], begun[4], begun[5], begun[9] = [11, 12], [1, 2, 3, 4, 5], [6], [20] * 8
    requests = asked(limits=limits, begun=begun)
    scanned = nodes(scanning(), requests)
    assert_alike(scanned, nodes(slots(), requests))
    for n, request in enumerate(requests):
        assert 0 < len(scanned[request.uid].tokens) <= limits[n // G] - len(begun[n])
    free = nodes(scanning(), asked(limits=limits))
    assert_alike({one.uid: free[one.uid] for n, one in enumerate(requests) if not begun[n]},
                 {one.uid: scanned[one.uid] for n, one in enumerate(requests) if not begun[n]})
    for engine in (slots(), scanning()):
        with pytest.raises(ValueError, match="limit"):
            engine.submit(Request(0, 2, (1, 1, 2, 3), drawn=3, key=(0, 0)))


def test_what_is_behind_the_prompt_is_read_and_the_rest_is_as_if_the_policy_had_written_it():
    """Rows that begin with their completion of before go on with the same tokens, by the same random numbers."""
    free = nodes(scanning(), asked())
    begun = {uid: node.tokens[:n % len(node.tokens)].tolist() for n, (uid, node) in enumerate(free.items())}
    for engine in (scanning(), slots()):
        found = nodes(engine, asked(begun=[*begun.values()]))
        for uid, before in begun.items():
            assert found[uid].start == free[uid].start + len(before)
            np.testing.assert_array_equal(found[uid].tokens, free[uid].tokens[len(before):])
            np.testing.assert_allclose(found[uid].logprobs, free[uid].logprobs[len(before):], atol=1e-5)


def test_beginnings_leave_rows_as_long_as_a_scaling_of_positions_allows(monkeypatch):
    """A prompt of S tokens with T - 1 of its completion behind it is padded, and the last one is drawn."""
    scaling = RopeScaling("dynamic", 2.0, original_max_positions=S + T)
    model = Transformer(dataclasses.replace(MODELS["dense"].config, rope_scaling=scaling))
    monkeypatch.setitem(MODELS, "dense", model)
    requests = asked(ids=[[1] * S], begun=[[2] * (T - 1)] * G)
    assert_alike(nodes(scanning(), requests), nodes(slots(), requests))
    with pytest.raises(ValueError, match=f"a sequence of {S + T + 1} tokens"):
        kinds.choose("scan", wanted(model=model, prompt_tokens=S + 1), {})


def test_a_stop_text_may_begin_in_what_a_completion_begins_with():
    """It ends with the first token that the policy draws, and is found in the completion's own text alone."""
    engine, (plain, *_) = slots(tokenizer=ByteTokenizer()), asked(begun=[[40, 41]] + [[]] * (P * G - 1))
    (free,) = nodes(engine, [plain]).values()
    text = ByteTokenizer().decode([41, int(free.tokens[0])])
    for begun, count in ((2, 1), (0, len(free.tokens))):
        (node,) = nodes(engine, [dataclasses.replace(plain, stop_texts=(text,), begun=begun)]).values()
        assert node.tokens.tolist() == free.tokens[:count].tolist()


def test_a_batch_comes_in_parts_and_what_is_missing_of_it_is_padded():
    """Five prompts for an engine of two at a time: three batches, the last one half empty; each part comes alone."""
    ids = [[n + 1] for n in range(5)]
    requests = asked(ids=ids, limits=(4,) * 5, group=2)
    engine = scanning(prompts=2, parts=2, most=4, group=2, prompt_tokens=1)
    engine.submit(*requests)
    parts = []
    while found := engine.collect():
        parts.append([node.uid - 2**33 for node in found])
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    whole = nodes(scanning(prompts=5, most=4, group=2, prompt_tokens=1), requests)
    assert_alike(whole, nodes(scanning(prompts=2, parts=2, most=4, group=2, prompt_tokens=1), requests))


def test_numbers_of_requests_are_exact_in_both():
    """Five of the first prompt in two rows, one of the second, none of the third; what pads the rows is no node."""
    whole = nodes(scanning(), asked())
    again = [dataclasses.replace(one, uid=one.uid + 2**40) for one in asked()[:1]]
    some = [*asked()[:G], *again, asked()[G]]
    scanned, engine = nodes(scanning(), some), scanning()
    assert [*scanned] == [one.uid for one in some]
    assert_alike(scanned, nodes(slots(), some))
    known = {one.uid for one in (*some[:G], some[-1])}
    assert_alike({uid: whole[uid] for uid in known}, {uid: scanned[uid] for uid in known})
    engine.submit(*some)
    engine.release(some[1].uid)
    engine.release(some[-1].uid)
    assert [node.uid for node in engine.collect()] == [one.uid for one in (some[0], *some[2:-1])] and not engine.step()


def test_what_no_compiled_batch_can_hold_is_refused():
    engine = scanning()
    for wrong, reason in ((asked(ids=[[1] * (S + 1)] * P), f"has a prompt of {S + 1} tokens"),
                          (asked(limits=(T + 1,) * P), f"a limit of {T + 1}; the sampler is made for {S} and {T}"),
                          (asked(ids=[[V]] * P), "outside the vocabulary")):
        with pytest.raises(ValueError, match=reason):
            engine.submit(*wrong)
    with pytest.raises(NotImplementedError, match="one turn"):
        engine.extend(0, [1])
    with pytest.raises(KeyError, match="uid 0 is not held"):
        engine.release(0)
    assert engine.collect() == [] and not engine.step()


def test_weights_change_between_batches_and_are_freed_when_an_engine_rests():
    """The version of a token is that of the weights that drew it; a second batch compiles nothing."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kwargs: compiled.append(event) if "backend_compile" in event else None)
    for engine in (scanning(), slots()):
        first = nodes(engine, asked())
        engine.rest()
        compiled.clear()
        engine.submit(*asked())
        with pytest.raises(ValueError, match="the engine rests, without weights; publish weights before it samples"):
            engine.collect()
        engine.publish(6, params(seed=1))
        second = nodes(engine, [])
        assert not compiled
        assert {n for node in first.values() for n in node.policy_version.tolist()} == {5}
        assert {n for node in second.values() for n in node.policy_version.tolist()} == {6}
        engine.publish(7, params())
        third = nodes(engine, asked())
        assert all(np.array_equal(third[uid].tokens, first[uid].tokens) for uid in first)
        assert any(not np.array_equal(second[uid].tokens, first[uid].tokens) for uid in first)


@pytest.mark.slow
def test_stop_texts_end_completions_where_they_are_cut_else():
    tokenizer = ByteTokenizer()
    whole = nodes(scanning(stop_ids=()), asked(stop_ids=()))
    rows = [whole[uid].tokens for uid in sorted(whole)]
    stop = tokenizer.decode(rows[G + 2][4:6].tolist())
    made = nodes(slots(tokenizer=tokenizer), asked(stop_ids=(), stop_texts=(stop,)))
    cut = np.array([next((n for n in range(1, T) if stop in tokenizer.decode(row[:n].tolist())), T) for row in rows])
    assert [len(made[uid].tokens) for uid in sorted(made)] == cut.tolist() and cut.min() <= 6
    for uid, node in made.items():
        np.testing.assert_array_equal(node.tokens, whole[uid].tokens[:len(node.tokens)])


@pytest.mark.slow
def test_prompts_of_several_widths_are_read_whole():
    """100 and 70 tokens go into their caches in pieces, beside one that is there after the first."""
    assert [widths_of(n) for n in (1, 16, 17, 64, 65, 200)] == [(16,), (16,), (32,), (64,), (64, 16), (64, 64, 64, 16)]
    tokens = np.random.default_rng(2).integers(0, V, (3, 100)).tolist()
    ids = [tokens[0], tokens[1][:70], tokens[2][:3]]
    requests = asked(ids=ids, limits=(6,) * 3, stop_ids=(), group=2)
    scanned = nodes(scanning(stop_ids=(), most=6, prompt_tokens=100, group=2), requests)
    assert_alike(scanned, nodes(slots(slot_tokens=106), requests))


def wanted(**changes):
    fields = dict(model=DENSE, mesh=make_mesh(data=1), tokenizer=ByteTokenizer(), prompts=P, group=G, parts=4, prompt_tokens=S,
                  max_tokens=T, stop_ids=STOPS, stop_texts=())
    return base.Wanted(**fields | changes)


def test_auto_is_the_faster_engine_that_can_what_is_wanted():
    assert kinds.choose("auto", wanted(), {}).name == "slots"
    assert kinds.choose("auto", wanted(parts=1), {}).name == "scan"
    assert kinds.choose("auto", wanted(prompt_tokens=T + 1), {}).name == "scan"
    assert kinds.choose("auto", wanted(), {"spread": "x"}).name == "scan"
    assert kinds.choose("auto", wanted(parts=1), {"extend": "x"}).name == "slots"
    assert kinds.choose("slots", wanted(parts=1), {"limits": "x", "entropies": "x"}).name == "slots"
    for name, lacks, message in (
            ("slots", {"spread": "method 'props'"}, "method 'props' needs an engine that draws the first tokens of a group "
                                                    "together, and 'slots' does not; set sampling.engine='auto'"),
            ("scan", {"paged": "sampling.paged_cache=True"}, "keeps caches in pages, and 'scan' does not"),
            ("auto", {"spread": "a", "extend": "b"}, "a needs an engine that draws .*; b needs an engine that goes on "
                                                     ".* and no engine of this process does all of that")):
        with pytest.raises(ValueError, match=message):
            kinds.choose(name, wanted(), lacks)
    with pytest.raises(ValueError, match="Unknown engine 'slot'. Did you mean 'slots'"):
        kinds.choose("slot", wanted(), {})


def test_an_engine_from_outside_is_one_function(tmp_path, monkeypatch):
    (tmp_path / "my_engine.py").write_text(
        "from jaxrl_llm.engines import scan\n\n\ndef kind(run):\n    return scan.kind(run)._replace(name='mine')\n")
    monkeypatch.syspath_prepend(os.fspath(tmp_path))
    made = kinds.choose("my_engine:kind", wanted(), {"spread": "x"})
    assert made.name == "mine" and isinstance(made.make(params(), None, 0), ScanEngine)
    with pytest.raises(ValueError, match="b needs an engine that goes on with a trajectory.*'mine' does not"):
        kinds.choose("my_engine:kind", wanted(), {"extend": "b"})
    assert scan.CAN <= {*base.CAN}
