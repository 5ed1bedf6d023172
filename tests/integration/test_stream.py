"""One stream for a whole run: an engine that lives, one road for tasks, held-out measurements apart, engines from outside."""
import itertools
import os
import pickle
import threading

import chatter
import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.engines.scan import ScanEngine
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling import heldout
from jaxrl_llm.setup import setup, sources
from jaxrl_llm.setup.judge import make_judge
from jaxrl_llm.setup.resolve import of_one_turn
from jaxrl_llm.topologies import Begin, BeginPart, groups

TOOLS = {"environment": "tool_use(tools=('calculator',), options={'level': 'digit', 'chat': True}, turns=3)",
         "prompts.max_tokens": 0, "sampling.max_tokens": 96, "sampling.turn_tokens": 12}


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"eval.every": 0, "samples_every": 0} | changes)
    return config


def batches(config, count=2):
    """The run and its first batches."""
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    steps = itertools.islice(run.schedule.steps(run.source, run.learner, state, run.learner.frozen(params)), count)
    return run, [step.finished for step in steps]


def assert_equal(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("config", (tiny(**{"sampling.engine": "slots", "sampling.micro_batches": 2}),
                                    chatter.get_config(**TOOLS)), ids=("single turns", "tools"))
def test_one_engine_samples_a_whole_run_and_compiles_for_the_first_batch(config):
    """The programs of the second batch and of later ones are those of the first, and none is compiled again."""
    run, params = setup.build(config)
    stream, key = run.source.stream, jax.random.key(0)
    compiled, engines, first = [], set(), None
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kwargs: compiled.append(event) if "backend_compile" in event else None)
    for number in range(4):
        compiled.clear()
        if first is None:
            first = run.source.next(Snapshot(0, params, None, key))
        else:  # the same prompts again: other ones may need other lengths
            stream.publish(Snapshot(number, params, None, key))
            rows = np.arange(len(first.forest.problems))
            again = stream.run(run.source.planted([(p, first.forest.prompt_ids(i).tolist()) for i, p in enumerate(
                first.forest.problems)], 0), groups(rows, stream.group), 10**6 * number)
            stream.rest()
            assert set(again.version[again.version >= 0].tolist()) == {number}
        engines.add(id(stream._engine))
    assert len(engines) == 1 and not compiled
    assert stream._engine._weights is None and stream._engine._caches.slots is None  # nothing is held while it rests


@pytest.mark.slow
def test_a_task_is_an_environment_of_one_turn():
    """`single(task=...)` and the task are one road: equal rollouts, and the same evaluation sets."""
    sets = {"eval.sets": "arithmetic(level='add2', label='harder', problems=4)", "rewards": ""}
    spelled = "single(task='arithmetic', options={'level': 'digit'}, reward='last_number')"
    other, same = batches(tiny(**sets, environment=spelled, task="arithmetic(level='add3')"))
    _, wanted = batches(tiny(**sets, task="arithmetic(level='digit', reward='last_number')"))
    assert other.config.task == "arithmetic(level='digit', reward='last_number')" and not other.config.environment
    for one, two in zip(same, wanted, strict=True):
        assert_equal(one.rollouts, two.rollouts)
        assert one.forest.names == two.forest.names == ("last_number",)
    assert [one.label for one in other.source.sets] == ["harder"]
    with pytest.raises(ValueError, match="sets 'tasks'; single has task, options"):
        setup.build(tiny(environment="single(tasks='arithmetic')"))
    assert of_one_turn(tiny(environment="single(options=None, reward=None)")).task == "arithmetic()"


@pytest.mark.slow
def test_the_two_engines_sample_one_task_alike():
    (_, scanned), (_, slots) = (batches(tiny(**{"sampling.engine": name, "sampling.micro_batches": 2}), 1)
                                for name in ("scan", "slots"))
    one, other = scanned[0].rollouts, slots[0].rollouts
    for name in ("tokens", "mask", "policy_version", "rewards", "valid"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    for name in ("behavior_logprobs", "entropies"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_two_engines_cut_what_an_expert_wrote_at_the_limit_of_a_prompt():
    forests = []
    for name in ("scan", "slots"):
        config, policy, source, params = setup.build_policy(tiny(**{"sampling.engine": name}))
        source = sources.make_plain_source(config, policy, policy.mesh, source.stream.tokenizer, make_judge(config))
        stream, problem = source.stream, source.task.train[0]
        stream.publish(Snapshot(0, params, None, jax.random.key(0)))
        forest = source.planted([(problem, stream.partner.encode([problem], stream.tokenizer)[0])], 0)
        forests.append(stream.run(forest, [Begin(0, 1, (BeginPart(Role.EXPERT, [49] * n),), limit=2) for n in range(4)], 0))
    assert forests[0].length[1:].tolist() == [2, 1, 1, 2, 2]  # the policy's; an expert's and the policy's; an expert's twice
    for name in ("length", "role", "tokens", "stopped", "rewards"):
        np.testing.assert_array_equal(forests[0].columns[name], forests[1].columns[name], err_msg=name)


@pytest.mark.slow
def test_held_out_measurements_leave_training_as_it_is(monkeypatch):
    """An evaluation in the middle of a batch of an environment, with trajectories that it loses, changes nothing of it."""
    config = chatter.get_config(environment="chatter:letters", **{"eval.sets": "arithmetic(level='digit', problems=2)"})
    run, params = setup.build(config)
    stream, key = run.source.stream, jax.random.key(0)

    def batch(interrupted):
        problems = [run.source.task.train[i] for i in range(2)]
        ids = stream.partner.encode(problems, stream.tokenizer)
        stream.publish(Snapshot(0, params, None, key))
        forest, looks = run.source.planted(list(zip(problems, ids)), 0), 0
        stream.apply(forest, groups(range(2), stream.group), 100)
        while stream.advance():
            looks += 1
            if interrupted and looks == 2:
                heldout.evaluate(run.source, params, None, problems=2, key=jax.random.key(9))
                heldout.evaluate_set(run.source, params, None, run.source.sets[0], key=jax.random.key(9))
        return stream.take(forest), looks

    runner = stream.partner.runner
    ran = []
    monkeypatch.setattr(Runner, "forget", lambda self, forget=Runner.forget: (ran.append(self), forget(self))[1])
    (whole, looks), (cut, _) = batch(True), batch(False)
    assert looks >= 2 and ran and runner not in ran
    assert len(whole.ends) == 2 * stream.group
    for name, column in whole.columns.items():
        np.testing.assert_array_equal(column, cut.columns[name], err_msg=name)
    held_out = run.source.held_out
    assert held_out is not stream and held_out.partner is not stream.partner and held_out.partner.runner is not runner
    mutable = stream._queue, stream._going, stream._held, stream._begun
    assert not {*map(id, vars(held_out).values())} & {*map(id, mutable)}


@pytest.mark.slow
def test_an_engine_from_outside_samples_a_run(tmp_path, monkeypatch):
    """One file: an engine that counts its batches, around the scan sampler; its samples are those of the run without it."""
    (tmp_path / "counting_engine.py").write_text('''
from jaxrl_llm.engines import scan

batches = []


def kind(run):
    inner = scan.kind(run)

    def make(params, lora, version):
        engine = inner.make(params, lora, version)
        step = engine.step
        engine.step = lambda: batches.append(engine.version) or step()
        return engine

    return inner._replace(name="counting", make=make, rows=(("sampled by", "an engine that counts"),))
''')
    monkeypatch.syspath_prepend(os.fspath(tmp_path))
    run, found = batches(tiny(**{"sampling.engine": "counting_engine:kind"}))
    import counting_engine
    assert set(counting_engine.batches) == {0, 1} and isinstance(run.source.stream._engine, ScanEngine)
    _, wanted = batches(tiny())
    for one, two in zip(found, wanted, strict=True):
        assert_equal(one.rollouts, two.rollouts)


def test_what_a_stream_cannot_do_is_said_before_it_samples():
    run, params = setup.build(tiny())
    stream = run.source.stream
    forest = run.source.planted([(run.source.task.train[0], [1, 2])], 0)
    with pytest.raises(ValueError, match="max_turns=2, and completions have one turn"):
        stream.publish(Snapshot(0, params, None, jax.random.key(0), {"max_turns": np.int32(2)}))
    with pytest.raises(ValueError, match="temperature=-1"):
        stream.publish(Snapshot(0, params, None, jax.random.key(0), {"temperature": np.float32(-1)}))
    with pytest.raises(ValueError, match="publish weights first"):
        stream.run(forest, groups([0], 1), 0)
    assert stream.pending() == ()
    stream.publish(Snapshot(0, params, None, jax.random.key(0)))
    stream.apply(forest, [], 0)
    assert not stream.advance() and not len(stream.take(forest).ends)


def begun(config, at, uid=100, rows=2):
    """`(run, stream, forest, weights)`: groups at two prompts that have been advanced `at` times, or until they have ended.

    How often that is depends on when an environment that waits answers.
    """
    run, params = setup.build(config)
    stream, key = run.source.stream, jax.random.key(0)
    problems = [run.source.task.train[i] for i in range(rows)]
    ids = stream.partner.encode(problems, stream.tokenizer)
    stream.publish(Snapshot(3, params, None, key))
    forest = run.source.planted(list(zip(problems, ids)), 0)
    stream.apply(forest, groups(range(rows), stream.group), uid)
    for _ in range(at):
        stream.advance()
    return run, stream, forest, params


@pytest.mark.slow
@pytest.mark.parametrize("environment", ("", "chatter:letters(replayable=True)",
                                         "chatter:letters(replayable=True, waits=True)", "chatter:alphabet"))
def test_what_grows_goes_on_in_another_stream(environment):
    """Wherever it is cut: between turns, within one, while an environment answers, before a group is complete."""
    config = (chatter.get_config(environment=environment, **{"sampling.turn_tokens": 24, "sampling.max_tokens": 96})
              if environment else tiny(**{"sampling.engine": "slots", "sampling.max_tokens": 40, "sampling.group": 16,
                                                "prompts.per_step": 2, "sampling.micro_batches": 2}))
    _, stream, forest, params = begun(config, 0)
    looks = 0
    while stream.advance():
        looks += 1
    whole = stream.take(forest)
    assert looks >= 2
    for at in range(0, looks + 1, max(looks // 3, 1)):
        _, first, forest, _ = begun(config, at)
        pending = pickle.loads(pickle.dumps(first.pending()))
        run, params = setup.build(config)
        stream = run.source.stream
        stream.publish(Snapshot(3, params, None, jax.random.key(0)))
        stream.restore(forest, pending)
        while stream.advance():
            pass
        again = stream.take(forest)
        for name, column in whole.columns.items():
            if name in ("logprobs", "entropies", "turn_info"):  # read again in other pieces
                continue
            np.testing.assert_array_equal(again.columns[name], column, err_msg=f"{name} {at}")
        np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=1e-5)
        while first.advance():  # the first stream goes on too
            pass
        np.testing.assert_array_equal(first.take(forest).tokens, whole.tokens)


@pytest.mark.slow
def test_what_cannot_be_restored_is_said():
    config = tiny(**{"sampling.engine": "slots"})
    run, stream, forest, params = begun(config, 0)
    pending = stream.pending()
    with pytest.raises(ValueError, match="8 trajectories grow in this stream"):
        stream.restore(forest, pending)
    other = stream.apart()
    with pytest.raises(ValueError, match="publish weights first"):
        other.restore(forest, pending)
    other.publish(Snapshot(3, params, None, jax.random.key(0)))
    with pytest.raises(ValueError, match="trajectory 100 begins with another prompt than row 0 of this forest"):
        other.restore(run.source.planted([(run.source.task.train[0], [1, 2])], 0), pending)
    with pytest.raises(ValueError, match="trajectory 100 grows already"):
        stream.apply(forest, [Begin(0)], 100)


@pytest.mark.slow
def test_a_batch_waits_for_the_one_that_another_thread_samples(monkeypatch):
    """An interrupt of `pipelined` leaves its thread behind; a run that goes on in this process samples one after the other."""
    run, params = setup.build(tiny(**{"sampling.engine": "slots"}))
    source, snapshot, begun, forests = run.source, Snapshot(0, params, None, jax.random.key(0)), threading.Event(), []
    monkeypatch.setattr(source.stream.partner, "begin", lambda *given, begin=source.stream.partner.begin: (
        begun.set(), begin(*given))[1])
    thread = threading.Thread(target=lambda: forests.append(source.next(snapshot).forest))
    thread.start()
    assert begun.wait(60)
    forests.append(source.next(snapshot).forest)
    thread.join()
    assert [sorted(forest.uid[forest.ends].tolist()) for forest in forests] == [[*range(16)], [*range(16, 32)]]


def fails_once(monkeypatch, of, name, at, error):
    """Lets a method of an object raise at its call number `at`."""
    calls, whole = itertools.count(1), getattr(of, name)

    def called(*given, **more):
        if next(calls) == at:
            raise error
        return whole(*given, **more)

    monkeypatch.setattr(of, name, called)


@pytest.mark.slow
@pytest.mark.parametrize("what", ("reward", "engine", "environment", "environment that waits"))
def test_a_batch_after_an_error_is_as_if_the_error_had_not_been(monkeypatch, what):
    """Nothing of the broken batch grows on, and its uids are free again."""
    config = (chatter.get_config(environment=f"chatter:letters(waits={'waits' in what})") if "environment" in what else
              tiny(**{"sampling.engine": "scan" if what == "reward" else "slots", "sampling.micro_batches": 2}))
    run, params = setup.build(config)
    source, stream, snapshot = run.source, run.source.stream, Snapshot(0, params, None, jax.random.key(0))
    begin, wanted = source.position(), source.next(snapshot).forest
    held_out = source.held_out  # before a method of the runner is replaced
    if what == "reward":
        fails_once(monkeypatch, type(stream.partner.reward), "part", 1, KeyboardInterrupt("now"))
    elif what == "engine":
        fails_once(monkeypatch, stream._engine, "collect", 2, KeyboardInterrupt("now"))
    else:
        fails_once(monkeypatch, stream.partner.runner, "recv" if "waits" in what else "step", 2, KeyboardInterrupt("now"))
    source.set_position(begin)
    with pytest.raises(KeyboardInterrupt, match="now"):
        source.next(snapshot)
    source.set_position(begin)
    forest = source.next(snapshot).forest
    for name in ("uid", "parent", "tokens", "rewards", "version"):
        np.testing.assert_array_equal(forest.columns[name], wanted.columns[name], err_msg=name)
    assert len(heldout.evaluate(source, params, None, problems=2, key=jax.random.key(9)).forest.ends) == 2 * held_out.group


@pytest.mark.slow
@pytest.mark.parametrize("more", (0, 4))
def test_sets_have_a_distribution_of_their_own_at_any_length(more):
    """Longer completions than those of training have a stream of their own, which cuts the distribution as well."""
    most = tiny().sampling.max_tokens + more
    sets = f"arithmetic(level='add2', label='sure', problems=2, top_p=0.000001, max_tokens={most})"
    run, params = setup.build(tiny(**{"eval.sets": sets}))
    forest = heldout.evaluate_set(run.source, params, None, run.source.sets[0], key=jax.random.key(9)).forest
    texts = forest.texts[forest.ends].reshape(2, -1)
    assert texts.shape[1] > 1 and (texts == texts[:, :1]).all()


@pytest.mark.slow
def test_what_is_lost_or_over_is_restored_without_the_environment():
    """One trajectory is lost at its opening; the others end at a limit of the run, and the environment hears nothing again."""
    config = chatter.get_config(environment="chatter:letters(replayable=True)", environment_invalid=1.0,
                                **{"sampling.max_turns": 2})
    _, first, forest, params = begun(config, 0)
    runner = first.partner.runner

    def reset(problems, reset=runner.reset):
        turns = reset(problems)
        runner._lose(102, "error", "closed")
        return {uid: turn for uid, turn in turns.items() if uid != 102}

    runner.reset = reset
    assert first.advance()
    early = first.pending()  # 7 go on
    while first.advance():
        pass
    for pending, resumed in ((early, 7), (first.pending(), 0)):
        run, params = setup.build(config)
        stream = run.source.stream
        stream.publish(Snapshot(3, params, None, jax.random.key(0)))
        stream.restore(forest, pickle.loads(pickle.dumps(pending)))
        assert len(stream.partner.runner._running) == resumed
        while stream.advance():
            pass
        again = stream.take(forest)
        assert again.uid[again.ends].tolist() == [100, 101, *range(103, 108)] and again.lost.tolist() == [1, 0]
        assert not stream.partner.runner._running
    np.testing.assert_array_equal(first.take(forest).tokens, again.tokens)


@pytest.mark.parametrize("engine, lost", (("scan", "reward"), ("slots", "reward"), ("scan", "engine"), ("slots", "engine")))
def test_after_an_error_a_batch_begins_anew(engine, lost, monkeypatch):
    """Nothing of the batch that an error has cut enters the next one."""
    run, params = setup.build(tiny(**{"sampling.engine": engine, "sampling.micro_batches": 2}))
    stream, snapshot = run.source.stream, Snapshot(0, params, None, jax.random.key(0))
    first = run.source.next(snapshot).forest
    broken, name = (stream.partner.reward.__class__, "part") if lost == "reward" else (type(stream._engine), "step")
    with monkeypatch.context() as patch:
        patch.setattr(broken, name, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.source.next(snapshot)
    assert not stream.advance()
    again = run.source.next(snapshot)
    count = len(first.ends)
    assert again.forest.uid[again.forest.ends].tolist() == list(range(2 * count, 3 * count))
    assert again.rollouts.valid.sum() == count and len(stream._engine.finished()) == 0


def test_an_interrupted_trajectory_of_an_environment_is_ended(monkeypatch):
    config = chatter.get_config(environment="chatter:letters")
    run, params = setup.build(config)
    stream, snapshot = run.source.stream, Snapshot(0, params, None, jax.random.key(0))
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.source.next(snapshot)
    assert stream.partner.limits(10**6, None, None).tokens == config.sampling.max_tokens
    assert not stream.partner.runner._running and not stream._held and not stream.partner._going
    again = run.source.next(snapshot).forest
    assert len(again.ends) == config.prompts.per_step * stream.group


def test_weights_change_while_a_thread_samples():
    """The thread has ended what it samples, and what it has made is heard; limits stay those of the beginning."""
    config = tiny(**{"sampling.engine": "slots", "sampling.micro_batches": 4, "sampling.max_tokens": 12})
    run, stream, forest, params = begun(config, 1, rows=4)
    knobs = {"max_tokens": np.int32(3), "temperature": np.float32(0.5)}
    stream.apply(forest, [Begin(0, 2)], 900)
    stream.publish(Snapshot(4, params, None, jax.random.key(0), knobs))
    assert stream._nodes is None
    while stream.advance():
        pass
    whole = stream.take(forest)
    assert len(whole.ends) == 4 * stream.group + 2
    late = np.flatnonzero(whole.uid >= 900)
    assert whole.length[late].max() > 3 and set(whole.version[np.repeat(whole.uid, whole.length) >= 900].tolist()) == {4}


@pytest.mark.parametrize("engine", ("scan", "slots"))
def test_keys_of_another_implementation_sample_what_their_first_words_do(engine):
    _, stream, forest, params = begun(tiny(**{"sampling.engine": engine}), 0)
    words, sampled = jax.random.key_data(jax.random.key(3)), []
    for key in (jax.random.key(3), jax.random.wrap_key_data(np.concatenate([words, words]), impl="rbg")):
        stream.forget()
        stream.publish(Snapshot(0, params, None, key))
        sampled.append(stream.run(forest, groups(range(2), stream.group), 0))
    np.testing.assert_array_equal(sampled[0].tokens, sampled[1].tokens)
