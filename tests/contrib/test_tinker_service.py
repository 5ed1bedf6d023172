"""Adapters on one base: each sampled with its weights, trained apart, saved and loaded, dropped with its session."""
import concurrent.futures
import os
import sys
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from server import KEY, MODEL, SLOT_TOKENS, SLOTS, TOKENIZER, params
from tinker_server import RANK, make_service

from jaxrl_llm.contrib.tinker import service as tinker
from jaxrl_llm.contrib.tinker.examples import Datum
from jaxrl_llm.contrib.tinker.learner import Adam, LoraShape, fresh_moments
from jaxrl_llm.contrib.tinker.store import AdapterCheckpoint, Store
from jaxrl_llm.contrib.tinker.turns import AdapterSnapshot
from jaxrl_llm.engines import Sampling
from jaxrl_llm.engines import engine as engines
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.models import lora
from jaxrl_llm.serving.worker import Failure

PROMPT = list(b"a prompt")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    one = make_service(tmp_path_factory.mktemp("tinker"), models=64)
    yield one
    one.worker.close()


def created(service, session=None, shape=LoraShape(3), seed=1):
    session = session or service.begin()
    name = f"{session}:train:{len(service._models)}"
    service.create(session, name, "tiny", shape, seed).result(60)
    return name


def example(seed=0, n=12):
    rng = np.random.default_rng(seed)
    return [Datum(*rng.integers(0, 256, (2, n)).astype(np.int32), {})]


def train(service, name, seed=0, steps=1, rate=0.05):
    for _ in range(steps):
        loss = service.run(name, example(seed), "cross_entropy", {}, True).result(60).loss
        service.step(name, Adam(rate)).result(60)
    return loss


def tree(service, name):
    return jax.device_get(service.model(name).adapter.tree)


def equal(one, other):
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), one, other)))


def rows(seeds, limit=10, **fields):
    return [Request(0, limit, PROMPT, seed=seed, **fields) for seed in seeds]


def merged(adapter, seeds, limit=10, **fields):
    """The nodes of an engine of this process that has the adapter in its weights."""
    own = params() if adapter is None else lora.merge(params(), adapter)
    engine = SlotEngine(MODEL, own, KEY, slots=SLOTS, slot_tokens=SLOT_TOKENS, tokenizer=TOKENIZER, chunks=(4,))
    engine.submit(*(Request(seed, limit, PROMPT, **fields) for seed in seeds))
    result = {}
    while nodes := engine.collect():
        result |= {node.uid: node for node in nodes}
    return [result[seed] for seed in seeds]


def check_nodes(result, expected):
    for one, other in zip(result, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.slow
def test_many_adapters_are_sampled_at_once_each_under_its_own_weights(service):
    names = [created(service, seed=seed, shape=shape) for seed, shape in ((1, LoraShape(3)), (2, LoraShape(RANK, mlp=False)))]
    for i, name in enumerate(names):
        train(service, name, seed=i, steps=3)
    trees = [None, *(tree(service, name) for name in names)]
    snapshots = [AdapterSnapshot(tree) for tree in trees]
    order = [0, 1, 2, 1, 0, 2, 2, 1]
    futures = [service.sample(snapshots[which], rows(range(3 * i, 3 * i + 3))) for i, which in enumerate(order)]
    result = [future.result(120) for future in futures]
    for i, which in enumerate(order[:4]):
        check_nodes(result[i], merged(trees[which], range(3 * i, 3 * i + 3)))
    assert len({tuple(result[i][0].tokens) for i in (0, 1, 2)}) == 3
    programs = service.worker.call(lambda engine: engine.programs).result()
    assert ("with_adapters",) in programs, "the base is not read again for each adapter"


def test_two_models_do_not_disturb_each_other(service):
    alone = created(service, seed=5)
    first = [train(service, alone, 1) for _ in range(3)]
    one, other = created(service, seed=5), created(service, seed=6)
    between = []
    for _ in range(3):
        pending = service.run(one, example(1), "cross_entropy", {}, True)
        train(service, other, 2)
        between.append(pending.result(60).loss)
        service.step(one, Adam(0.05)).result(60)
        service.sample(AdapterSnapshot(tree(service, other)), rows([1], 4)).result(60)
    assert between == pytest.approx(first, rel=1e-6) and equal(tree(service, one), tree(service, alone))
    assert not equal(tree(service, one), tree(service, other))


def test_a_saved_state_continues_exactly(service):
    session = service.begin()
    name = created(service, session)
    train(service, name, steps=2)
    path = service.save(name, "two", False).result(60)
    assert path == f"tinker://{name}/weights/two"
    restored, fresh = f"{session}:train:7", f"{session}:train:8"
    service.load(restored, path, True, session).result(60)
    service.load(fresh, path, False, session).result(60)
    assert equal(tree(service, restored), tree(service, name)) and equal(tree(service, fresh), tree(service, name))
    for one in (name, restored, fresh):
        train(service, one)
    assert equal(tree(service, restored), tree(service, name)) and not equal(tree(service, fresh), tree(service, name))
    service.load(name, path, True, None).result(60)
    train(service, name)
    assert equal(tree(service, restored), tree(service, name))


def test_wrong_checkpoints_are_refused(service, tmp_path):
    session = service.begin()
    name = created(service, session)
    path = service.save(name, "taken", False).result(60)
    sampler = service.save_to_sample(name, "s", None, False).result(60)
    def refused(future, message):
        with pytest.raises(ValueError, match=message):
            future.result(60)
    refused(service.save(name, "taken", False), "exists already; give another name, or overwrite=True")
    assert service.save(name, "taken", True).result(60) == path
    refused(service.save(name, "../up", False), "give letters, digits")
    refused(service.load(name, "tinker://x/weights/none", False, None), "does not exist on this server")
    for wrong in ("tinker://x/weights/../y", "tinker://../weights/y", "tinker://x/other/y", "/etc/passwd", "tinker://x/weights"):
        refused(service.load(name, wrong, False, None), "the address .*; give tinker://MODEL/weights")
    refused(service.load(name, sampler, True, None), "has no optimiser state")
    refused(service.load(created(service, session, LoraShape(2)), path, False, None), "create a training client from the state")
    service.name = "another"
    try:
        refused(service.load(name, path, False, None), "belongs to the model tiny, this server has another")
    finally:
        service.name = "tiny"


def test_checkpoints_in_files_that_never_end_or_lie_elsewhere_are_refused(service, tmp_path):
    name = created(service)
    path = service.save(name, "right", False).result(60)
    file = service.store._file(path)
    bad, wrong = path.replace("right", "bad"), file.with_name("bad.safetensors")
    (tmp_path / "elsewhere").write_bytes(file.read_bytes())
    for make, message in ((lambda: os.mkfifo(wrong), "is no regular file but a pipe"),
                          (lambda: wrong.symlink_to("/dev/zero"), "lies outside|no regular file"),
                          (lambda: wrong.symlink_to(tmp_path / "elsewhere"), "lies outside")):
        make()
        for load in (lambda: service.load(name, bad, True, None).result(60), lambda: service.open_sampler("s", None, bad),
                     lambda: service.stored(bad)):
            with pytest.raises(ValueError, match=message):
                load()
        wrong.unlink()
    assert service.load(name, path, True, None).result(60) is None


def test_samplers_of_checkpoints_and_snapshots_keep_their_weights(service):
    session = service.begin()
    name = created(service, session)
    train(service, name, steps=2)
    was = tree(service, name)
    path = service.save_to_sample(name, "two", None, False).result(60)
    service.open_sampler(f"{session}:sample:0", None, path)
    service.save_to_sample(name, None, f"{session}:sample:1", False).result(60)
    service.save_to_sample(name, None, f"{session}:sample:2", True).result(60)
    service.open_sampler(f"{session}:sample:3", "tiny", None)
    train(service, name, steps=2)
    for i, expected in enumerate((was, was, was, None)):
        result = service.snapshot_of(f"{session}:sample:{i}").tree
        assert result is None if expected is None else equal(result, expected)
    assert [service.address_of(f"{session}:sample:{i}") for i in range(4)] == [path, None, None, None]
    service.save_to_sample(name, None, f"{session}:sample:4", True).result(60)
    assert equal(service.snapshot_of(f"{session}:sample:2").tree, tree(service, name)), "all in flight have the newest"
    assert equal(service.snapshot_of(f"{session}:sample:1").tree, was)
    for i in range(8):
        service.save_to_sample(name, None, f"{session}:sample:{10 + i}", False).result(60)
    with pytest.raises(ValueError, match="the newest 8 snapshots without a name"):
        service.snapshot_of(f"{session}:sample:1")
    service.finish(session).result(60)
    for ask in (lambda: service.snapshot_of(f"{session}:sample:0"), lambda: service.model(name)):
        with pytest.raises(ValueError, match="its session has ended"):
            ask()
    assert not any(key.startswith(session) for key in service._held)


def test_samplers_have_the_weights_that_were_saved_last(service, monkeypatch):
    """Also where a state is written again while a thread reads it."""
    session, load = service.begin(), service.store.load
    name = created(service, session)
    path = service.save(name, "last", False).result(60)

    def opened(number):
        service.open_sampler(f"{session}:sample:{number}", None, path)
        return service.snapshot_of(f"{session}:sample:{number}")

    first = opened(0)
    assert opened(1) is first and equal(first.tree, tree(service, name)), "read once"
    train(service, name)
    assert service.save(name, "last", True).result(60) == path
    second = opened(2)
    assert not equal(second.tree, first.tree) and equal(second.tree, tree(service, name))
    train(service, name)
    service.save(name, "last", True).result(60)

    def slow(*given):
        monkeypatch.undo()
        saved = load(*given)
        train(service, name)
        service.save(name, "last", True).result(60)
        return saved

    monkeypatch.setattr(service.store, "load", slow)
    opened(3)
    assert equal(opened(4).tree, tree(service, name))


def test_threads_open_samplers_of_more_checkpoints_than_are_held(service, monkeypatch):
    monkeypatch.setattr(tinker, "_CACHED", 1)
    session = service.begin()
    name = created(service, session)
    paths = [service.save_to_sample(name, f"s{i}", None, False).result(60) for i in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            opened = list(pool.map(lambda i: service._of_checkpoint(paths[i % 4]).tree, range(400)))
    finally:
        sys.setswitchinterval(before)
    assert all(equal(one, tree(service, name)) for one in opened) and len(service._cached) == 1


@pytest.mark.slow
def test_log_probs_of_prompts_are_those_of_the_adapter(service):
    name = created(service)
    train(service, name, steps=2)
    for adapter in (tree(service, name), None):
        result = service.score(AdapterSnapshot(adapter), PROMPT, None).result(60)
        ids = np.array(PROMPT)
        states, _, _ = MODEL.hidden_states(params(), ids[None], np.ones((1, len(ids)), bool), lora=adapter)
        logits = jax.nn.log_softmax(MODEL.finished(states[0] @ MODEL.unembedding(params()).T))
        np.testing.assert_allclose(result[1:], logits[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
        assert np.isnan(result[0])
    last = service.score(AdapterSnapshot(), PROMPT, 3).result(60)
    assert np.isnan(last[:-3]).all() and (last[-3:] == result[-3:]).all()
    assert np.isnan(service.score(AdapterSnapshot(), [65], None).result(60)).all()


def test_refusals_of_the_engine_do_not_hold_up_others(service):
    other = AdapterSnapshot(tree(service, created(service)))
    with pytest.raises(ValueError, match="a slot holds 128"):
        service.sample(other, rows([1], 10_000)).result(60)
    with pytest.raises(ValueError, match="temperature"):
        service.sample(AdapterSnapshot(), rows([1], sampling=Sampling(temperature=-1.0))).result(60)
    check_nodes(service.sample(AdapterSnapshot(), rows([3])).result(60), merged(None, [3]))


@pytest.mark.parametrize("wrong, message", [
    ({"stop_tokens": [2**31]}, "the stop token 2147483648; give"),
    ({"sampling": Sampling(top_k=2**31)}, "top_k=2147483648: must"),
    ({"tokens": [2**31]}, "outside the vocabulary, 0 to 258")])
def test_numbers_that_fit_no_array_fail_their_own_request_alone(service, wrong, message):
    """They would share an array with the row that runs."""
    let_go, base = threading.Event(), AdapterSnapshot()
    service.worker.call(lambda engine: let_go.wait(30))
    good, bad = service.sample(base, rows([1], 100)), service.sample(base, [replace(rows([2])[0], **wrong)])
    let_go.set()
    with pytest.raises(ValueError, match=message):
        bad.result(60)
    check_nodes(good.result(60), merged(None, [1], 100))


def test_numbers_beyond_64_bits_are_refused_wherever_they_go(service):
    for token in (2**31, 2**70, -1):
        with pytest.raises(ValueError, match=f"model_input must have .* from .*{token}"):
            service.score(AdapterSnapshot(), [*PROMPT, token, 65], None).result(60)
    with pytest.raises(ValueError, match=f"seed={2**70}; give a whole number from"):
        created(service, seed=2**70)


def test_an_adapter_that_does_not_fit_fails_its_request_and_holds_up_nobody(service, monkeypatch):
    big, other = service.learner.create(LoraShape(RANK + 4), 0), AdapterSnapshot(tree(service, created(service)))
    publish, let_go = engines.SlotEngine.publish, threading.Event()
    def broken(engine, version, params, adapter=None):
        if version == fails:
            raise MemoryError("the device is full")
        publish(engine, version, params, adapter)

    monkeypatch.setattr(engines.SlotEngine, "publish", broken)
    fails = service.worker.call(lambda engine: engine.version).result() + 2  # the second switch
    service.worker.call(lambda engine: let_go.wait(30))
    futures = [service.sample(one, rows([3])) for one in (other, AdapterSnapshot(big.tree), AdapterSnapshot(), other)]
    let_go.set()
    for future, kind, message in zip(futures[1:3], (ValueError, MemoryError), ("broadcast", "the device is full")):
        with pytest.raises(kind, match=message):
            future.result(20)
    for future in (futures[0], futures[3]):
        check_nodes(future.result(60), merged(other.tree, [3]))
    path = "tinker://someone:train:0/sampler_weights/big"
    service.store.save(path, AdapterCheckpoint("tiny", big.shape, jax.device_get(big.tree)))
    with pytest.raises(ValueError, match=f"{path} holds an adapter of rank 8; this server takes 1 to 4 .start it with another"):
        service.open_sampler(f"{service.begin()}:sample:0", None, path)


def test_a_failing_engine_fails_its_rows_and_continues(service, monkeypatch):
    decode = engines.programs_of.decode

    def broken(model, weights, slots, lanes, *arguments, **options):
        if np.isin(np.asarray(lanes.uid)[:, 1], 77).any():
            raise RuntimeError("the device is on fire")
        return decode(model, weights, slots, lanes, *arguments, **options)

    monkeypatch.setattr(engines.programs_of, "decode", broken)
    other = AdapterSnapshot(tree(service, created(service)))
    futures = [service.sample(AdapterSnapshot(), rows([77, 2])), service.sample(other, rows([77]))]
    for future in futures:
        with pytest.raises(Failure, match="the device is on fire"):
            future.result(60)
    check_nodes(service.sample(AdapterSnapshot(), rows([3])).result(60), merged(None, [3]))


def test_sessions_that_are_lost_make_room(service, monkeypatch):
    session, lost = service.begin(), service.begin()
    first = created(service, lost)
    monkeypatch.setattr(service, "_most", len(service._models))
    with pytest.raises(ValueError, match="the most that this server holds; close a ServiceClient"):
        service.create(session, "x:train:0", "tiny", LoraShape(2), 0).result(60)
    service._sessions[lost] -= 1000
    service.create(session, "x:train:0", "tiny", LoraShape(2), 0).result(60)
    with pytest.raises(ValueError, match="holds no model"):
        service.model(first)
    for shape, base, message in ((LoraShape(RANK + 1), "tiny", "takes 1 to 4"), (LoraShape(0), "tiny", "takes 1 to 4"),
                                 (LoraShape(2), "Qwen", "this server has 'tiny'")):
        with pytest.raises(ValueError, match=message):
            service.create(session, "x:train:1", base, shape, 0).result(60)
    with pytest.raises(ValueError, match="no session"):
        service.create("nobody", "x:train:1", "tiny", LoraShape(2), 0).result(60)
    assert isinstance(service.finish(session), concurrent.futures.Future)


def test_a_checkpoint_has_its_scale_and_one_of_before_has_it_in_a(tmp_path):
    """Files without a scale were written when A was multiplied by it at the start: they are adapters of scale 1."""
    store, path = Store(tmp_path), "tinker://x:train:0/weights/one"
    one = lora.Adapters({"q": {"a": np.ones((1, 3, 2), np.float32), "b": np.ones((1, 2, 3), np.float32)}}, 16.0)
    store.save(path, AdapterCheckpoint("tiny", LoraShape(2), one, fresh_moments(one)))
    file = next(tmp_path.rglob("*.safetensors"))
    loaded = store.load(path, "tiny")
    assert loaded.tree.scale == loaded.moments.mu.scale == loaded.moments.nu.scale == 16.0
    save_file(load_file(file), file, {"adapter": '{"base": "tiny", "rank": 2, "attention": true, "mlp": true}'})
    loaded = store.load(path, "tiny")
    assert loaded.tree.scale == loaded.moments.mu.scale == 1.0 and loaded.tree["q"]["a"].sum() == 6


@pytest.mark.parametrize("header, change, words", [
    (None, {"lora.q.a": np.zeros((2, 3, 3), np.float32)}, "'lora' have the shapes"),
    ('{"base": "tiny", "rank": 2, "attention": true, "mlp": true}', {}, "'lora' have the shapes .* its header says"),
    ('{"base": "tiny", "rank": 3, "attention": false, "mlp": true}', {}, "'lora' have the shapes"),
    ('{"base": "tiny", "rank": 1000000000000, "attention": true, "mlp": true}', {}, "this server takes 1 to 4"),
    ('{"base": "tiny", "rank": "3", "attention": true, "mlp": true}', {}, "expected a rank from 1 on and two flags"),
    ('{"base": "tiny", "rank": 3, "more": 1}', {}, "describes no adapter"), ("[]", {}, "describes no adapter"),
    ("[" * 100_000, {}, "describes no adapter"), (None, {"mu.q.a": np.zeros(3, np.float32)}, "'mu' have the shapes"),
    (None, {"lora": np.zeros(3, np.float32)}, "'lora' have the shapes"), (None, {"count": np.zeros(2, np.int32)}, "'count'"),
    (None, {"count": np.array(-1, np.int32)}, "negative number of steps"),
    (None, {"nu.q.a": np.full((2, 32, 3), -1, np.float32)}, "negative squares"),
    (None, {"lora.q.a": np.zeros((2, 32, 3))}, "not all of float32"),
    ('{"base": "tiny", "rank": 5, "attention": true, "mlp": true}', {}, "of rank 5; this server takes 1 to 4"),
    (None, {"lora.v.b": np.float32([np.nan])}, "'lora.v.b' holds values that are NaN"), ("", {}, "describes no adapter")])
def test_checkpoints_whose_tensors_are_others_than_their_header_says(service, header, change, words):
    saved = service.learner.create(LoraShape(3), 1)
    path = service.store.path("hostile", "weights", "one")
    service.store.save(path, AdapterCheckpoint("tiny", saved.shape, saved.tree, saved.moments), overwrite=True)
    assert service.stored(path).shape == LoraShape(3)
    file = service.store.folder / "hostile" / "weights" / "one.safetensors"
    right = '{"base": "tiny", "rank": 3, "attention": true, "mlp": true}'
    save_file(load_file(file) | change, file, {"adapter": right if header is None else header})
    with pytest.raises(ValueError, match=f"(?s){path}.*{words}"):
        service.stored(path)
    for text in (b"", b"\xff" * 40, file.read_bytes()[:-3]):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=f"{path} is no readable checkpoint"):
            service.stored(path)
