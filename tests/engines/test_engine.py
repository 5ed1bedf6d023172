"""The slot engine on tiny real models: tokens of the scan sampler whatever the schedule, and of a plain forward pass."""
import jax
import numpy as np
import pytest
from engines import (
    DENSE,
    KEY,
    MODELS,
    OPTIONS,
    STOPS,
    G,
    P,
    S,
    T,
    V,
    agrees,
    drain,
    engine,
    logits_before,
    params,
    plain,
    prompts,
    request,
    scanned,
)

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.models import lora


@pytest.fixture(autouse=True, params=("slots", "pages"))
def caches(request, monkeypatch):
    """Every test, with both kinds of caches."""
    if request.param == "pages" and "windows" in request.node.name:
        pytest.skip("caches of sliding windows are not paged")
    monkeypatch.setitem(OPTIONS, "paged", request.param == "pages")


@pytest.mark.slow
def test_the_cases_occur():
    found = scanned()
    lengths = [len(tokens) for tokens, *_ in found.values()]
    assert len(set(lengths)) > 4 and any(stopped for *_, stopped in found.values())
    assert not all(stopped for *_, stopped in found.values())


@pytest.mark.parametrize("slots", (4, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 64))))
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_the_scan_sampler(name, slots):
    one = engine(name, slots)
    one.submit(*(request(uid) for uid in range(P * G)))
    found = drain(one)
    assert sorted(found) == list(range(P * G))
    for uid, expected in scanned(name).items():
        agrees(*found[uid], expected)
    assert one.prefilled == sum(len(ids) - 1 for ids in prompts())  # every prompt once, its last token with the first step
    assert one.collect() == [] and not one.step()


@pytest.mark.parametrize("slots, seed", [(4, 0), (4, 1), (4, 2), (16, 3), (64, 4)])
def test_no_schedule_changes_a_row(slots, seed):
    """Submitted bit by bit in any order, paused, resumed and with slots that others take in between."""
    random = np.random.default_rng(seed)
    one, found, paused, waiting = engine(slots=slots), {}, [], list(random.permutation(P * G))
    pauses = 0
    while waiting or paused or len(found) < P * G:
        for _ in range(min(len(waiting), random.integers(0, 4))):
            one.submit(request(int(waiting.pop())))
        for _ in range(random.integers(0, 3)):
            one.step()
        running = one._decoding()
        if running and random.random() < 0.5:
            uid = running[random.integers(len(running))].request.uid
            try:
                node = one.pause(uid)
            except KeyError:  # it ended in the chunk that was on its way
                assert uid in {node.uid for node in one._done}
            else:
                assert node.finish == "paused" and node.tokens.tolist() == scanned()[uid][0][:len(node.tokens)]
                paused.append(uid)
                pauses += 1
        if paused and random.random() < 0.5:
            one.resume(paused.pop(random.integers(len(paused))))
        if random.random() < 0.3 or not waiting and not paused:
            found |= {node.uid: node for node in one.collect()}
    assert pauses > 1
    for uid, expected in scanned().items():
        agrees(found[uid], expected)


def test_a_slot_whose_row_ended_takes_the_next_request_at_the_next_chunk():
    one, steps = engine(slots=4, chunks=(1,)), 0
    one.submit(*(request(uid) for uid in range(P * G)))
    while True:
        waiting, free = len(one._queue), one._slots.count(None)
        if not one.step():
            break
        assert len(one._queue) == max(waiting - free, 0)
        steps += 1
    lengths = [len(tokens) for tokens, *_ in scanned().values()]
    batches = sum(max(lengths[start:start + 4]) for start in range(0, P * G, 4))
    assert -(-sum(lengths) // 4) <= steps < batches  # batches of as many rows would have waited for their longest


@pytest.mark.slow
def test_equal_prompts_are_computed_once_also_later_and_again_under_new_weights():
    one = engine(slots=4)
    one.submit(request(4), request(5))
    one.collect()
    assert one.prefilled == 3
    one.submit(request(6))
    drain(one)
    assert one.prefilled == 3
    one.publish(1, params(seed=1))
    one.submit(request(7))
    [node] = drain(one)[7]
    assert one.prefilled == 6
    agrees(node, scanned(seed=1)[7])


@pytest.mark.slow
def test_prompts_that_are_read_again_stay_while_others_come():
    """Two prompts are kept, and a third comes together with the older one of them."""
    def asked(first, *starts):
        return [request(first + i, tokens=[start, 2, 3, 4], stop_tokens=()) for i, start in enumerate(starts)]

    one, other = engine(slots=2), engine(slots=2)
    one.submit(*asked(0, 10, 20))
    drain(one)
    one.submit(*asked(2, 30, 10))
    other.submit(*asked(2, 30, 10))
    found, expected = drain(one), drain(other)
    for uid in (2, 3):
        assert found[uid][0].tokens.tolist() == expected[uid][0].tokens.tolist()
        np.testing.assert_allclose(found[uid][0].logprobs, expected[uid][0].logprobs, atol=1e-5)
    assert one.prefilled == 9


@pytest.mark.slow
def test_rows_have_distributions_limits_and_stops_of_their_own():
    """Each row is the row of an engine, and of a scan, in which all are like it."""
    kinds = {0: dict(sampling=Sampling(0.0)), 4: dict(sampling=Sampling(1.3, top_k=3)),
             5: dict(sampling=Sampling(1.0, top_p=0.6)),
             6: dict(sampling=Sampling(0.8, min_p=0.2)), 8: dict(limit=3, stop_tokens=()), 9: dict(stop_tokens=range(0, V, 3)),
             10: {}}
    one = engine(slots=16)
    one.submit(*(request(uid, **kind) for uid, kind in kinds.items()))
    found = drain(one)
    for uid, kind in kinds.items():
        whole = request(uid, **kind)
        tokens = np.asarray([whole.tokens], np.int32)
        s = whole.sampling
        made = jax.device_get(generate(DENSE, params(), tokens, tokens >= 0, row_keys(KEY, np.array([[uid]])), s,
                                       max_tokens=whole.limit, stop_ids=tuple(whole.stop_tokens)))
        kept = made.mask[0, 0]
        agrees(*found[uid], (made.tokens[0, 0][kept].tolist(), made.logprobs[0, 0][kept], made.entropies[0, 0][kept],
                             made.stopped[0, 0]))
    assert len(found[8][0].tokens) == 3 and (found[4][0].entropies <= np.log(3) + 1e-5).all()


def test_forks_before_the_first_token_are_rows_that_were_sampled_whole():
    one = engine()
    one.submit(request(4))
    one.fork(4, (5, 6, 7))
    found = drain(one)
    for uid in (4, 5, 6, 7):
        agrees(*found[uid], scanned()[uid])
    assert found[5][0].parent == 4 and found[4][0].parent is None
    assert one.prefilled == 3


@pytest.mark.slow
def test_forks_go_on_from_where_their_parent_stands():
    one = engine()
    one.submit(request(8, stop_tokens=()))
    one.step()
    [parent] = [row for row in one._slots if row]
    one.fork(8, (100, 101, 102, 103))  # more than there are slots for
    stood = parent.drawn
    assert 0 < stood < T
    found = drain(one)
    assert found[8][0].tokens.tolist() == scanned(stop_tokens=())[8][0]
    for uid in (100, 103):
        [node] = found[uid]
        assert node.start == S + stood and node.parent == 8 and len(node.tokens) == T - stood
        before = [*prompts()[2], *found[8][0].tokens[:stood]]
        assert node.tokens.tolist() == plain(before, uid, stood, T - stood)
    assert len({tuple(found[uid][0].tokens) for uid in (100, 101, 102, 103)}) == 4


def test_a_fork_of_a_kept_row_reads_tokens_of_its_own():
    one = engine()
    one.submit(request(10, limit=6, stop_tokens=(), keep=True))
    [root] = one.collect()
    one.submit(request(50, parent=10, tokens=(3, 1, 4), limit=10, stop_tokens=()))
    one.submit(request(51, parent=10, tokens=(), limit=10, stop_tokens=()))
    found = drain(one)
    whole = [*prompts()[2], *root.tokens]
    assert found[50][0].tokens.tolist() == plain([*whole, 3, 1, 4], 50, 6, 4)
    assert found[51][0].tokens.tolist() == plain(whole, 51, 6, 4)
    assert (found[50][0].start, found[51][0].start) == (S + 9, S + 6)


@pytest.mark.slow
@pytest.mark.parametrize("state", ("ended", "running", "paused", "waiting"))
def test_an_extension_equals_a_model_run_over_the_whole_sequence(state):
    one = engine(slot_tokens=48)
    others = [request(uid) for uid in range(4)]
    if state == "waiting":
        one.submit(*others)
    one.submit(request(8, limit=12, stop_tokens=(), keep=True))
    first = []
    if state == "ended":
        first = one.collect()
    elif state != "waiting":
        one.step()
        if state == "paused":
            one.pause(8)
    said = np.random.default_rng(3).integers(0, V, 19).tolist()  # more than one width
    one.extend(8, said, limit=18)
    if state != "waiting":
        one.submit(*others)
    found = drain(one)
    nodes = [*first, *found[8]]
    expected = {"ended": ["limit", "limit"], "waiting": ["limit"]}.get(state, ["extended", "limit"])
    assert [node.finish for node in nodes] == expected
    *before, last = nodes
    early = before[0].tokens.tolist() if before else []
    assert early == scanned(stop_tokens=())[8][0][:len(early)] and (state == "waiting" or early)
    sequence = [*prompts()[2], *early, *said]
    assert last.start == len(sequence) and len(early) + len(last.tokens) == 18
    assert last.tokens.tolist() == plain(sequence, 8, len(early), 18 - len(early))
    z = logits_before([*sequence, *last.tokens], len(sequence), params()) / 0.8
    logprobs = z - np.log(np.exp(z).sum(-1, keepdims=True))
    np.testing.assert_allclose(last.logprobs, logprobs[np.arange(len(last.tokens)), last.tokens], atol=1e-5)
    for uid in range(4):  # those beside it
        agrees(*found[uid], scanned()[uid])


@pytest.mark.slow
@pytest.mark.parametrize("name", ("windows", pytest.param("experts", marks=pytest.mark.slow)))
def test_extensions_beside_decoding_rows_in_other_models(name):
    """The extension is longer than the window and than one width."""
    one = engine(name, slot_tokens=48)
    one.submit(*(request(uid) for uid in range(3)), request(8, limit=12, stop_tokens=(), keep=True))
    one.step()
    said = np.random.default_rng(4).integers(0, V, 19).tolist()
    one.extend(8, said, limit=18)
    one.step()
    assert len(one.running) > 1 and 8 in one.running
    found = drain(one)
    first, last = found[8]
    early = first.tokens.tolist()
    assert early == scanned(name, stop_tokens=())[8][0][:len(early)] and 0 < len(early) < 12
    sequence = [*prompts()[2], *early, *said]
    assert last.tokens.tolist() == plain(sequence, 8, len(early), 18 - len(early), name=name)
    for uid in range(3):
        agrees(*found[uid], scanned(name)[uid])


def test_new_weights_go_on_with_the_caches_of_old_ones():
    """Versions change between two chunks; log-probs after it are those of new weights that read old keys and values."""
    one = engine()
    one.submit(request(8, stop_tokens=()))
    one.step()
    one.publish(3, params(seed=1))
    [node] = drain(one)[8]
    switch = int((node.policy_version == 0).sum())
    assert 0 < switch < T and node.policy_version.tolist() == [0] * switch + [3] * (T - switch)
    old, new = params(), params(seed=1)
    assert node.tokens[:switch].tolist() == scanned(stop_tokens=())[8][0][:switch]
    tokens = [*prompts()[2], *node.tokens]
    read = S + switch - 1  # what the old weights had read; the token behind it is the first that the new ones read
    row = np.asarray([tokens], np.int32)
    cache, _ = jax.jit(DENSE.prefill)(old, row[:, :read], row[:, :read] >= 0)
    own = DENSE.empty_completions(cache, 1, T)

    @jax.jit
    def step(token, t, own):
        normed, own = DENSE.decode_step(new, DENSE.unstack_layers(new), token[None], t, cache, own)
        return DENSE.logits(new, normed)[0, 0], own

    for t in range(T - switch):
        z, own = step(row[:, read + t], t, own)
        z = np.asarray(z, np.float64) / 0.8
        assert abs(z[node.tokens[switch + t]] - np.log(np.exp(z).sum()) - node.logprobs[switch + t]) < 1e-5
    z = logits_before(tokens, S + switch, new) / 0.8
    fresh = z - np.log(np.exp(z).sum(-1, keepdims=True))
    fresh = fresh[np.arange(T - switch), node.tokens[switch:]]
    assert np.abs(fresh - node.logprobs[switch:]).max() > 1e-3  # with caches of the new weights they would be others


def test_the_same_weights_published_again_change_nothing_but_versions():
    one = engine()
    one.submit(*(request(uid) for uid in range(P * G)))
    version = 0
    while one.step():
        version += 1
        one.publish(version, params())
    found = drain(one)
    for uid, expected in scanned().items():
        agrees(*found[uid], expected)
    versions = found[4][0].policy_version
    assert (np.diff(versions) >= 0).all() and len(set(versions.tolist())) > 1


@pytest.mark.slow
def test_adapters_are_part_of_the_policy():
    adapters = jax.tree.map(lambda x: x + 0.1, lora.init(jax.random.key(3), params(), 2, 4.0, ("q", "v")))
    tokens = np.asarray([prompts()[1]], np.int32)
    made = generate(DENSE, params(), tokens, tokens >= 0, row_keys(KEY, np.array([[4]])), Sampling(np.float32(0.8)),
                    max_tokens=T, stop_ids=STOPS, lora=adapters)
    one = engine(lora=adapters)
    one.submit(request(4))
    [node] = drain(one)[4]
    assert node.tokens.tolist() == made.tokens[0, 0][made.mask[0, 0]].tolist() != scanned()[4][0]
