"""The slot engine on tiny real models: tokens of the scan sampler whatever the schedule, and of a plain forward pass."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.generation import Sampling, generate, row_keys
from jaxrl_llm.generation.engine import Engine, Request, lane_counts, rooms
from jaxrl_llm.generation.sampling import draw
from jaxrl_llm.generation.stopping import StopSearch
from jaxrl_llm.models import Experts, ModelConfig, Transformer, lora
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.training.scoring import cut_at_stop_strings

V, P, G, S, T = 64, 3, 4, 5, 20
STOPS = 7, 9
KEY = jax.random.key(7)
SHAPE = dict(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48,
             tie_embeddings=False)
MODELS = {"dense": Transformer(ModelConfig(**SHAPE)),
          "windows": Transformer(ModelConfig(**SHAPE, window=4, local_layers=(True, False), rope_local_theta=100.0)),
          "experts": Transformer(ModelConfig(**SHAPE, experts=Experts(count=4, per_token=2, size=24)))}
DENSE = MODELS["dense"]


@functools.cache
def params(name="dense", seed=0):
    fresh = MODELS[name].init(jax.random.key(seed))
    louder = jax.tree.map(lambda x: x * 8 if x.ndim >= 3 else x, fresh["layers"])  # so that the context matters
    return fresh | {"layers": louder, "embed": fresh["embed"] * 30, "unembed": fresh["unembed"] * 8}


def prompts():
    """P prompts of different lengths, of which one has a single token."""
    tokens = np.random.default_rng(5).integers(0, V, (P, S)).tolist()
    return [tokens[0][:1], tokens[1][:4], tokens[2]]


@functools.cache
def scanned(name="dense", seed=0, temperature=0.8, stop_tokens=STOPS, limit=T):
    """`uid -> (tokens, log-probs, entropies, stopped)` by the scan sampler, uids counted through P prompts x G."""
    rows, mask = np.zeros((P, S), np.int32), np.zeros((P, S), bool)
    for i, ids in enumerate(prompts()):
        rows[i, :len(ids)], mask[i, :len(ids)] = ids, True
    uids = np.arange(P * G).reshape(P, G)
    made = jax.device_get(generate(MODELS[name], params(name, seed), rows, mask, row_keys(KEY, uids),
                                   Sampling(np.float32(temperature)), max_tokens=limit, stop_ids=stop_tokens))
    return {p * G + g: (made.tokens[p, g][kept := made.mask[p, g]].tolist(), made.logprobs[p, g][kept],
                        made.entropies[p, g][kept], bool(made.stopped[p, g])) for p, g in np.ndindex(P, G)}


def engine(name="dense", slots=4, seed=0, slot_tokens=S + T, chunks=(4,), **options):
    return Engine(MODELS[name], params(name, seed), KEY, slots=slots, slot_tokens=slot_tokens, chunks=chunks, **options)


def request(uid, **changes):
    fields = dict(uid=uid, limit=T, tokens=prompts()[uid // G % P], sampling=Sampling(0.8), stop_tokens=STOPS)
    return Request(**(fields | changes))


def drain(one):
    """All nodes to come, `uid -> nodes`."""
    found = {}
    while nodes := one.collect():
        for node in nodes:
            found.setdefault(node.uid, []).append(node)
    return found


def agrees(node, expected, start=0):
    """The node is what the scan sampler made from token `start` on."""
    tokens, logprobs, entropies, stopped = expected
    assert node.tokens.tolist() == tokens[start:]
    np.testing.assert_allclose(node.logprobs, logprobs[start:], atol=1e-5)
    np.testing.assert_allclose(node.entropies, entropies[start:], atol=1e-5)
    assert node.finish == ("stop" if stopped else "limit")


@jax.jit
def all_logits(weights, row, length):
    normed, _, _ = DENSE.hidden_states(weights, row, jnp.arange(row.shape[1])[None] < length)
    return DENSE.logits(weights, normed)[0]


def logits_before(tokens, start, weights):
    """f64[n, V], the logits before each of `tokens[start:]` in a plain forward pass over the whole sequence."""
    row = np.zeros((1, 48), np.int32)
    row[0, :len(tokens)] = tokens
    return np.asarray(all_logits(weights, row, len(tokens))[start - 1:len(tokens) - 1], np.float64)


@jax.jit
def drawn_token(row_key, t, logits, sampling):
    return draw(jax.random.fold_in(row_key, t)[None], logits, sampling).token[0]


def plain(tokens, uid, drawn, count, sampling=Sampling(0.8)):
    """The next `count` tokens of a trajectory that has drawn some, each by a plain forward pass over all before it."""
    tokens = list(tokens)
    row_key = row_keys(KEY, np.array([uid]))[0]
    for t in range(drawn, drawn + count):
        z = logits_before([*tokens, 0], len(tokens), params())
        tokens.append(int(drawn_token(row_key, t, z.astype(np.float32), sampling)))
    return tokens[-count:]


def test_the_cases_occur():
    found = scanned()
    lengths = [len(tokens) for tokens, *_ in found.values()]
    assert len(set(lengths)) > 4 and any(stopped for *_, stopped in found.values())
    assert not all(stopped for *_, stopped in found.values())


@pytest.mark.parametrize("slots", (4, 16, 64))
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


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_row(seed):
    """Submitted bit by bit in any order, paused, resumed and with slots that others take in between."""
    random = np.random.default_rng(seed)
    one, found, paused, waiting = engine(), {}, [], list(random.permutation(P * G))
    pauses = 0
    while waiting or paused or len(found) < P * G:
        for _ in range(min(len(waiting), random.integers(0, 4))):
            one.submit(request(int(waiting.pop())))
        for _ in range(random.integers(0, 3)):
            one.step()
        running = [row for row in one._slots if row]
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


def test_adapters_are_part_of_the_policy():
    adapters = jax.tree.map(lambda x: x + 0.1, lora.init(jax.random.key(3), params(), 2, 4.0, ("q", "v")))
    tokens = np.asarray([prompts()[1]], np.int32)
    made = generate(DENSE, params(), tokens, tokens >= 0, row_keys(KEY, np.array([[4]])), Sampling(np.float32(0.8)),
                    max_tokens=T, stop_ids=STOPS, lora=adapters)
    one = engine(lora=adapters)
    one.submit(request(4))
    [node] = drain(one)[4]
    assert node.tokens.tolist() == made.tokens[0, 0][made.mask[0, 0]].tolist() != scanned()[4][0]


# --- stop strings ----------------------------------------------------------------------------------------------------------


def test_stop_sequences_end_rows_and_nothing_behind_them_is_kept():
    whole, _, _, _ = scanned(stop_tokens=())[8]
    for chunks in ((1,), (4,)):
        for sequence in (whole[4:7], whole[:1], whole[-2:], whole[6:8]):
            end = next(n for n in range(1, T + 1) if whole[:n][-len(sequence):] == sequence)
            one = engine(chunks=chunks)
            one.submit(*(request(uid, stop_tokens=()) for uid in range(4, 8)),
                       request(8, stop_tokens=(), stop_sequences=([99, 1], sequence)), request(9, stop_tokens=()))
            found = drain(one)
            [node] = found[8]
            assert node.tokens.tolist() == whole[:end] and node.finish == "stop_string"
            assert len(node.logprobs) == len(node.entropies) == len(node.policy_version) == end
            for uid in (4, 9):
                assert found[uid][0].tokens.tolist() == scanned(stop_tokens=())[uid][0]


def test_stop_texts_are_found_wherever_tokens_end():
    tokenizer = ByteTokenizer()
    whole, _, _, _ = scanned(stop_tokens=())[8]
    text = tokenizer.decode(whole)
    for stop in (text[3:6], text[0], text[-1]):
        one = engine(tokenizer=tokenizer)
        one.submit(request(8, stop_tokens=(), stop_texts=("never there", stop)))
        [node] = drain(one)[8]
        assert node.tokens.tolist() == whole[:text.index(stop) + len(stop)] and node.finish == "stop_string"


def test_a_kept_row_goes_on_behind_its_stop_string():
    whole, _, _, _ = scanned(stop_tokens=())[8]
    one = engine(slot_tokens=48)
    one.submit(request(8, stop_tokens=(), stop_sequences=(whole[3:5],), keep=True))
    [node] = one.collect()
    one.extend(8, [5, 6])
    last = drain(one)[8][-1]
    n = len(node.tokens)
    assert last.tokens.tolist()[:4] == plain([*prompts()[2], *node.tokens, 5, 6], 8, n, T - n)[:4]


def test_a_stop_string_may_begin_before_a_fork_but_not_before_an_extension():
    whole, _, _, _ = scanned(stop_tokens=())[8]
    one = engine()
    one.submit(request(8, stop_tokens=()))
    one.step()
    [row] = [row for row in one._slots if row]
    one._settle()
    stood = row.drawn
    first = plain([*prompts()[2], *whole[:stood]], 60, stood, 1)
    one.submit(request(60, parent=8, tokens=(), stop_tokens=(), stop_sequences=([whole[stood - 1], *first],)))
    [node] = drain(one)[60]
    assert node.tokens.tolist() == first and node.finish == "stop_string"
    search = StopSearch([[1, 2]], ())
    assert search.feed([1]) is None and search.feed([2]) == 2 and StopSearch([[1, 2]], ()).feed([2]) is None


LETTERS = "a€b😀 éEND\n日本"


@pytest.mark.parametrize("stop", ("END", "€", "😀 é", "\n", "本", "日本", "nowhere"))
@pytest.mark.parametrize("size", (1, 2, 3, 7, 100))
def test_texts_are_found_in_pieces_where_they_are_found_in_the_whole(stop, size):
    """Byte by byte letters come in pieces too."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(LETTERS * 2)
    search, found = StopSearch((), (stop, "zzz"), tokenizer), None
    for start in range(0, len(tokens), size):
        if (found := search.feed(tokens[start:start + size])) is not None:
            break
    if stop == "nowhere":
        assert found is None
    else:
        assert found == cut_at_stop_strings([np.asarray(tokens)], tokenizer, (stop,))[0]


# --- errors ----------------------------------------------------------------------------------------------------------------


def busy():
    """An engine in the middle of its work."""
    one = engine()
    one.submit(*(request(uid) for uid in range(P * G)))
    one.step()
    return one


REFUSED = {
    "longer than a slot": (lambda e: e.submit(request(70, limit=T + 9)), ValueError, r"uid 70 may get 5 \+ 29 tokens, a slot "
                           "holds 25; lower its limit to 20, shorten its prompt, or make the engine with a larger slot_tokens"),
    "twice": (lambda e: e.submit(request(71), request(11)), ValueError, "uid 11 was submitted before"),
    "twice at once": (lambda e: e.submit(request(71), request(71)), ValueError, "uid 71 was submitted before"),
    "fork of an unknown row": (lambda e: e.fork(99, [100]), KeyError, "uid 99 is not held"),
    "a child of an unknown row": (lambda e: e.submit(request(100, parent=99)), KeyError, "uid 99 is not held"),
    "extension of an unknown row": (lambda e: e.extend(99, [1]), KeyError, "uid 99 is not held"),
    "release of an unknown row": (lambda e: e.release(99), KeyError, "uid 99 is not held"),
    "resume of a row that waits": (lambda e: e.resume(11), ValueError, "uid 11 is not paused"),
    "an extension that does not fit": (lambda e: e.extend(11, [1] * 30), ValueError, "a slot holds 25"),
    "an extension of nothing": (lambda e: e.extend(11, []), ValueError, "no tokens"),
    "an extension beyond the vocabulary": (lambda e: e.extend(11, [V]), ValueError, "outside the vocabulary, 0 to 63"),
    "an extension without tokens left": (lambda e: e.extend(11, [1], limit=0), ValueError, "limit of 0 tokens"),
    "no prompt": (lambda e: e.submit(request(71, tokens=())), ValueError, "no tokens"),
    "stop texts without a tokenizer": (lambda e: e.submit(request(71, stop_texts=("a",))), ValueError, "no tokenizer"),
    "an empty stop string": (lambda e: e.submit(request(71, stop_sequences=((),))), ValueError, "empty stop string"),
    "a distribution that is none": (lambda e: e.submit(request(71, sampling=Sampling(-1.0))), ValueError, "temperature"),
    "weights of another structure": (lambda e: e.publish(1, {"embed": params()["embed"]}), ValueError,
                                     "another policy: .*absent"),
    "weights of another shape": (lambda e: e.publish(1, params() | {"embed": np.zeros((V, 16), np.float32)}), ValueError,
                                 r"'embed'.* was float32\[64, 32\] and is float32\[64, 16\]; 1 arrays differ"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case):
    one, (call, error, message) = busy(), REFUSED[case]
    with pytest.raises(error, match=message):
        call(one)
    found = drain(one)
    assert sorted(found) == list(range(P * G))
    for uid, expected in scanned().items():
        agrees(*found[uid], expected)
        assert not found[uid][0].policy_version.any()


def test_released_rows_are_gone_and_others_go_on():
    one = busy()
    one.release(11)
    running = next(row.request.uid for row in one._slots if row)
    one.release(running)
    for call in (lambda: one.fork(11, [80]), lambda: one.extend(11, [1]), lambda: one.pause(running), lambda: one.resume(11)):
        with pytest.raises(KeyError, match="was released"):
            call()
    found = drain(one)
    assert sorted(found) == sorted(set(range(P * G)) - {11, running})
    for uid, [node] in found.items():
        agrees(node, scanned()[uid])
    with pytest.raises(KeyError, match="did not say keep=True"):
        one.extend(0, [1])  # it ended
    one.submit(request(11))  # a uid that is free again gives its row again
    agrees(drain(one)[11][0], scanned()[11])


def test_paused_and_ended_rows_say_what_they_are():
    one = engine()
    one.submit(request(8, keep=True), request(9))
    one.pause(9)
    with pytest.raises(ValueError, match="uid 9 is paused already"):
        one.pause(9)
    drain(one)
    for call in (one.pause, one.resume):
        with pytest.raises(ValueError, match="uid 8 has ended; extend it"):
            call(8)
    one.release(8)
    one.resume(9)
    agrees(drain(one)[9][0], scanned()[9])


# --- programs --------------------------------------------------------------------------------------------------------------


def test_programs_are_counted_and_few():
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
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
    assert {lanes for lanes, _ in decoded} == {16, 8} and {room for _, room in decoded} == {64, 96}
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


@pytest.mark.parametrize("lost, slots", [("cache", 4), ("flight", 16)])
def test_an_engine_recovers_from_what_the_device_loses(lost, slots):
    """Arrays are deleted behind its back; tokens are those of an engine that lost nothing."""
    one, found, failures = engine(slots=slots), {}, 0
    one.submit(*(request(uid) for uid in range(P * G)))
    while len(found) < P * G:
        found |= {node.uid: node for node in one.finished()}
        if failures < 3 and (one._cache is not None if lost == "cache" else one._flights):
            for array in jax.tree.leaves(one._cache if lost == "cache" else one._flights[0].drawn):
                array.delete()
            failures += 1
        try:
            one.step()
        except (RuntimeError, ValueError):
            one.recover()
    assert failures == 3
    for uid, expected in scanned().items():
        agrees(found[uid], expected)
