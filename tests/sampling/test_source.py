"""Sources: texts, rewards, filling and uids. The completions are given, or sampled by a real tiny model."""
import dataclasses
import threading
import types

import jax
import numpy as np
import pytest
import run_files
import streams
from streams import BYTES, EOS, completions

from jaxrl_llm import parallel, rewards
from jaxrl_llm.data import rollouts, shapes
from jaxrl_llm.data.forest import metrics
from jaxrl_llm.engines import Sampling
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.parallel import make_mesh
from jaxrl_llm.rewards import Scores
from jaxrl_llm.sampling import fitting, source, stages
from jaxrl_llm.sampling import stream as stream_module
from jaxrl_llm.sampling.fitting import fitting_problems
from jaxrl_llm.sampling.one_turn import OneTurn
from jaxrl_llm.sampling.stream import Stream, _Beside
from jaxrl_llm.setup import parts, setup, start
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.learners import make_learner
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.topologies import single


def sampled(groups, prompts=None, T=8, first_uid=0):
    """`(source, forest)`: a batch made by the real path from completions that are known; what was asked is in `seen`."""
    problems = [Problem(f"q{p}", "12", p) for p in range(len(groups))]
    prompts, seen = prompts or len(groups), {}

    def generate(params, tokens, mask, keys, sampling, lora, limits, drawn):
        seen.update(tokens=np.asarray(tokens), mask=np.asarray(mask), keys=keys)
        return completions(groups + [groups[0]] * (prompts - len(groups)), T)

    mesh = make_mesh()
    group = len(groups[0])
    partner = OneTurn(rewards.combine(["exact"]), BYTES, prompts, group, T)
    stream = Stream(streams.in_parts(generate, prompts, group, max_tokens=T), partner, Sampling(), prompts, group, 4, T, BYTES,
                    (EOS,), mesh, np.float32)
    task = Task("q", problems, problems, "exact")
    made = source.Source(task=task, data=run_files.Given([]), stream=stream, topology=single(prompts, group=stream.group),
                         stages=stages.chain(stages.measure(None)), prompts=prompts, max_tokens=T)
    forest = made.planted([(problem, [10 + p, 20]) for p, problem in enumerate(problems)], draw=0)
    forest = streams.grow(stream, {}, forest, np.arange(len(groups)), first_uid, jax.random.key(0), 3)
    return made, forest, seen


def test_texts_leave_the_stop_token_out_and_rewards_follow_rows():
    _, forest, seen = sampled([["12$", "13$"], ["12", " 12 $"]], first_uid=40)
    assert forest.texts[forest.ends].tolist() == ["12", "13", "12", " 12 "]
    assert forest.rewards[forest.ends].tolist() == [1, 0, 1, 1] and forest.uid[forest.ends].tolist() == [40, 41, 42, 43]
    np.testing.assert_array_equal(seen["tokens"], [[10, 20, 0, 0], [11, 20, 0, 0]])
    assert seen["keys"].shape == (2, 2)
    facts = metrics(forest)
    assert facts["reward/mean"] == 0.75 and facts["reward/exact"] == 0.75
    assert facts["completion/length"] == (3 + 3 + 2 + 5) / 4 and facts["completion/truncated"] == 0.25
    assert facts["groups/all_equal"] == 0.5


def test_a_short_batch_is_filled_and_the_filling_dropped():
    _, forest, seen = sampled([["12$", "1$"]], prompts=3)
    assert seen["tokens"].shape == (3, 4) and seen["mask"].any(1).all()  # no row without a real token
    np.testing.assert_array_equal(seen["tokens"], [[10, 20, 0, 0]] * 3)
    assert len(forest.ends) == 2 and forest.uid[forest.ends].tolist() == [0, 1]


def test_the_view_is_trimmed_to_a_bucket_and_missing_prompts_are_invalid():
    made, forest, _ = sampled([["12$", "1"], ["1$", "12$"]], prompts=4)
    batch = rollouts.check(made.view(forest, 5))
    assert batch.mask.shape == (4, 2, 4) == batch.tokens.shape == batch.behavior_logprobs.shape
    assert batch.valid.tolist() == [[True, True], [True, True], [False, False], [False, False]]
    assert (batch.policy_version[batch.token_mask] == 3).all() and (batch.policy_version[~batch.mask] == 5).all()
    np.testing.assert_array_equal(batch.rewards[:2], [[1, 0], [0, 1]])
    np.testing.assert_array_equal(batch.extras["truncated"][:2], [[False, True], [False, False]])
    np.testing.assert_array_equal(np.asarray(batch.lengths), [[3, 1], [2, 3], [0, 0], [0, 0]])
    assert batch.tokens[1, 1].tolist() == [*b"12", EOS, 0]
    assert {name: x.dtype for name, x in batch.extras.items()} == {
        "truncated": bool, "correct": bool, "task": np.int32, "answers": np.int32}


def test_equal_answers_get_equal_numbers():
    made, forest, _ = sampled([[" 12 $", "7$", "12$", "$"], ["7$", "7$", "5$", "12$"]])
    assert forest.answers[forest.ends].tolist() == ["12", "7", "12", None, "7", "7", "5", "12"]
    np.testing.assert_array_equal(made.view(forest, 0).extras["answers"], [[0, 1, 0, -1], [0, 0, 1, 2]])


def test_failures_of_rewards_are_counted():
    def broken(texts, answers, problems, lengths, spent):
        return Scores(np.zeros(len(texts), np.float32), np.zeros((len(texts), 1), np.float32), ("exact",), {"code/timeout": 2})

    made, forest, _ = sampled([["1$", "2$"]])
    stream = made.stream.apart(partner=made.stream.partner.scoring(run_files.called(made.stream.partner.reward, broken)))
    for uid in (9, 11):
        forest = streams.grow(stream, {}, forest, np.array([0]), uid, jax.random.key(0))
    assert metrics(forest)["reward_failures/code/timeout"] == 4 and len(forest.ends) == 6


GROUPS = [["12$", "1;2"], ["7$", "12$"], ["5", "12;$"], ["$", "12$"], ["12", "3$"]]


def grown(made, stream, count):
    """The forest of one group for each of `count` problems, whose prompts begin with 10, 11, ..."""
    problems = [Problem(f"q{p}", "12", p) for p in range(count)]
    forest = made.planted([(problem, [10 + p, 20]) for p, problem in enumerate(problems)], draw=0)
    return streams.grow(stream, {}, forest, np.arange(count), 40, jax.random.key(0), 3)


def of_six(made, kind, reward):
    """The stream of `made` with another engine, another reward, a stop string, and 6 prompts of a batch."""
    partner = dataclasses.replace(made.stream.partner, prompts=6, reward=reward, stop_strings=(";",))
    return made.stream.apart(kind=kind, partner=partner, prompts=6, stop_strings=(";",))


def in_parts(made, parts, reward=None, groups=GROUPS):
    """`(forest, log)` of `groups` sampled in parts by a batch of 6 prompts; the log says what was begun, in order."""
    log = []
    reward = reward or made.stream.partner.reward

    def generate(params, tokens, mask, keys, sampling, lora, limits, drawn):
        log.append(("sample", *tokens[:, 0].tolist()))
        return completions([groups[min(number - 10, len(groups) - 1)] for number in tokens[:, 0].tolist()])

    def rewarded(texts, answers, problems, lengths, spent):
        log.append(("reward", *dict.fromkeys(10 + problem.id for problem in problems)))
        return reward(texts, answers, problems, lengths, spent)

    stream = of_six(made, streams.in_parts(generate, 6, 2, parts), run_files.called(reward, rewarded))
    return grown(made, stream, len(groups)), log


@pytest.mark.parametrize("parts", (2, 3, 6))
def test_parts_make_the_forest_of_the_whole(parts):
    made, _, _ = sampled([["1$", "2$"]])
    (whole, _), (forest, log) = in_parts(made, 1), in_parts(made, parts)
    for name, column in vars(whole).items():
        np.testing.assert_equal(vars(forest)[name], column, err_msg=name)
    assert whole.rewards[whole.ends].sum() == 4 and len(log) == 2 * -(-5 // (6 // parts))  # none of filling alone


def test_a_part_is_begun_before_the_rewards_of_the_one_before():
    made, _, _ = sampled([["1$", "2$"]])
    assert in_parts(made, 3)[1] == [("sample", 10, 11), ("sample", 12, 13), ("reward", 10, 11), ("sample", 14, 10),
                                    ("reward", 12, 13), ("reward", 14)]


def test_the_head_says_when_rewards_that_run_programs_begin():
    made, _, _ = sampled([["1$", "2$"]])
    def head(stream, parts=1):
        return dict(stream.prepare(parts)).get("rewards begin")
    slow = made.stream.apart(partner=made.stream.partner.scoring(rewards.combine([rewards.make("boxed")])))
    assert head(slow) == "after the last completion; with sampling.micro_batches=2 after the first half"
    assert head(made.stream) is None and head(slow, 2) is None and head(slow.apart(kind=streams.beside(iter))) is None


def streaming(made, tell, rewarded):
    """The forest of `GROUPS` from an engine that samples beside the rewards, see `streams.beside`."""
    reward = run_files.called(made.stream.partner.reward, rewarded)
    return grown(made, of_six(made, streams.beside(tell), reward), len(GROUPS))


def told(requests, version, part):
    """The nodes of these of the `GROUPS`, whose prompts begin with 10, 11, ..."""
    texts = {10 + number: iter(GROUPS[number]) for number in range(*part.indices(len(GROUPS)))}
    return [streams.node(one.uid, next(texts[one.tokens[0]]), len(one.tokens), version) for one in requests
            if one.tokens[0] in texts]


def test_prompts_of_an_engine_are_sampled_beside_the_rewards_of_those_before():
    """Each part's rewards wait for the beginning of the next part, which waits for them to begin: both must run at once."""
    made, _, _ = sampled([["1$", "2$"]])
    parts = slice(0, 2), slice(2, 3), slice(3, 5)
    begun, scored = ([threading.Event() for _ in range(4)] for _ in range(2))

    def tell(requests, version):
        assert [one.tokens for one in requests[::2]] == [[10 + p, 20] for p in range(5)] and len(requests) == 10  # no filling
        for number, part in enumerate(parts):
            begun[number].set()
            assert not number or scored[number - 1].wait(60)
            yield told(requests, version, part)
        begun[3].set()

    def rewarded(texts, answers, problems, *others):
        number = [part.start for part in parts].index(problems[0].id)
        scored[number].set()
        assert begun[number + 1].wait(60)
        return made.stream.partner.reward(texts, answers, problems, *others)

    whole, _ = in_parts(made, 1)
    for name, column in vars(streaming(made, tell, rewarded)).items():
        np.testing.assert_equal(column, vars(whole)[name], err_msg=name)


def test_an_error_of_the_sampling_thread_is_raised_and_one_of_a_reward_waits_for_nothing():
    made, _, _ = sampled([["1$", "2$"]])
    silent = threading.Event()

    def breaks(requests, version):
        yield told(requests, version, slice(2))
        raise OSError("the server died")

    def never_answers(requests, version):
        yield told(requests, version, slice(2))
        silent.wait(60)

    def broken(*given):
        raise ZeroDivisionError

    with pytest.raises(OSError, match="the server died"):
        streaming(made, breaks, made.stream.partner.reward)
    with pytest.raises(ZeroDivisionError):
        streaming(made, never_answers, broken)
    assert not silent.is_set()
    silent.set()


def test_several_processes_hear_equal_nodes(monkeypatch):
    """What a thread has ready depends on time, and all processes must score the same rows together."""
    monkeypatch.setattr(stream_module, "_Beside", None)
    monkeypatch.setattr(stream_module, "parallel", types.SimpleNamespace(**vars(parallel) | {"several": lambda: True}))
    made, _, _ = sampled([["1$", "2$"]])
    forest = streaming(made, lambda requests, version: iter([told(requests, version, slice(3)), told(
        requests, version, slice(3, 5))]), made.stream.partner.reward)
    assert len(forest.ends) == 10


def test_an_engine_that_forgets_a_request_is_named():
    made, _, _ = sampled([["1$", "2$"]])
    with pytest.raises(RuntimeError, match="engine 'beside' has nothing more to sample, and 6 trajectories have not ended"):
        streaming(made, lambda requests, version: iter([told(requests, version, slice(2))]), made.stream.partner.reward)


def test_an_error_of_the_sampling_thread_comes_behind_the_nodes_before_it():
    left = iter([["a"], ["b"]])

    def collect():
        if not (nodes := next(left, [])):
            raise OSError("died")
        return nodes

    made = _Beside(collect)
    made._thread.join()
    assert made.get() == ["a", "b"]
    with pytest.raises(OSError, match="died"):
        made.get()
    assert made.get() == [] and made.stop() == []


def test_a_reward_of_the_whole_batch_waits_for_the_last_part():
    made, _, _ = sampled([["1$", "2$"]])
    seen = []
    ranks = rewards.combine([rewards.Reward("ranks", lambda texts, *_: seen.append(len(texts)) or np.arange(len(texts)), 1.0,
                                            "batch")])
    forest, log = in_parts(made, 3, ranks)
    assert forest.rewards[forest.ends].tolist() == [*range(10)] and seen == [10]
    assert [kind for kind, *_ in log] == ["sample"] * 3 + ["reward"]


def test_parts_share_one_deadline():
    made, _, _ = sampled([["1$", "2$"]])
    seen = []

    def slow(texts, answers, problems, lengths, spent):
        seen.append(np.asarray(spent).tolist())
        zeros = np.zeros((len(texts), 1), np.float32)
        return Scores(zeros[:, 0], zeros, ("exact",), {"exact/late": 1}, np.array([1.5]))

    forest, _ = in_parts(made, 3, run_files.called(made.stream.partner.reward, slow))
    assert seen == [0.0, [1.5], [3.0]] and forest.failures == {"exact/late": 3}


def test_problems_that_do_not_fit():
    problems = [Problem("abc", "", 0), Problem("abcdefgh", "", 1), Problem("x", "", 2)]

    def ids(policy):
        return [p.id for p, _ in fitting_problems(problems, BYTES, 5, policy)]

    assert ids("skip") == [0, 2] and ids("truncate") == [0, 1, 2]
    assert fitting_problems(problems, BYTES, 5, "truncate")[1][1] == [257, *b"efgh"]
    with pytest.raises(ValueError, match="prompt 1 has 9 tokens"):
        ids("fail")


def test_processes_that_read_in_turns_all_get_the_batch_in_order(monkeypatch):
    """Two of three processes read: each reads its problems, and too long ones are left out afterwards."""
    problems = [Problem("abcdefgh"[:n], "", i) for i, n in enumerate((1, 8, 3, 2, 8, 4))]
    one_alone = fitting_problems(problems, BYTES, 5, "skip")
    sent = []
    for reader in range(2):
        monkeypatch.setattr(fitting.parallel, "gather_objects", lambda mine: sent.append(mine) or [mine] * 3)
        fitting_problems(problems[reader::2], BYTES, 5, "skip", processes=2)
    monkeypatch.setattr(fitting.parallel, "gather_objects", lambda mine: [*sent, "read nothing"])
    for reader in range(3):
        assert fitting_problems(problems[reader % 2::2], BYTES, 5, "skip", processes=2) == one_alone
    assert [problem.id for problem, _ in one_alone] == [0, 2, 3, 5]


# --- with a real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 1, 4, 48
    c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 4, 2, 6
    built, params = setup.build(c)
    return built, setup.initial_state(built, params)


def by_uid(forest):
    """The tokens and log-probs of each trajectory by its uid."""
    return {int(forest.uid[end]): (forest.tokens[forest.offset[end]:][:forest.length[end]].tolist(),
                                   forest.logprobs[forest.offset[end]:][:forest.length[end]].round(4).tolist())
            for end in forest.ends}


def test_a_trajectory_does_not_change_with_its_company(run):
    """The same uids in one batch, alone, in another order and after others."""
    built, state = run
    stream, key = built.source.stream, state.key
    rows = fitting_problems([built.source.task.train[i] for i in range(4)], stream.tokenizer, 8, "fail")

    def grown(forest, chosen, uid, version=0):
        return streams.grow(stream, state.params, forest, np.array(chosen), uid, key, version)

    whole = by_uid(grown(built.source.planted(rows, 0), range(4), 100))
    assert sorted(whole) == list(range(100, 108)) and len({str(x) for x in whole.values()}) > 4
    for first in (2, 0, 3, 1):
        alone = built.source.planted(rows[first:first + 1], 0)
        result = by_uid(grown(alone, [0], 100 + 2 * first, version=9))
        assert result == {uid: whole[uid] for uid in (100 + 2 * first, 101 + 2 * first)}
    later = by_uid(grown(grown(built.source.planted(rows, 0), [2, 1], 500), [0], 100))
    assert {uid: later[uid] for uid in (100, 101)} == {uid: whole[uid] for uid in (100, 101)}
    other = by_uid(grown(built.source.planted(rows, 0), range(4), 108))
    assert list(other.values()) != list(whole.values())


def test_uids_are_used_once_and_continue_from_a_saved_position(run):
    built, state = run
    one = dataclasses.replace(built.source)
    first = one.next(built.learner.publish(state))
    position = one.position()
    second = one.next(built.learner.publish(state))
    assert first.forest.uid[first.forest.ends].tolist() == list(range(8))
    assert second.forest.uid[second.forest.ends].tolist() == list(range(8, 16)) and one.next_uid == 16
    one.set_position(position)
    again = one.next(built.learner.publish(state))
    assert by_uid(again.forest) == by_uid(second.forest)
    np.testing.assert_array_equal(again.rollouts.tokens, second.rollouts.tokens)
    assert [p.id for p in again.forest.problems] == [p.id for p in second.forest.problems]


@pytest.mark.slow
def test_a_learner_works_without_a_source():
    """From a policy and the sizes of batches, on rollouts written out by hand: what is rewarded becomes likelier."""
    c = default_config()
    c.model.hidden_size, c.model.num_layers, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 32, 1, 2, 2, 4
    c.optimizer.warmup_updates, c = 0, resolve(c, {})
    _, model, weights = start.open_model(c.model)
    policy = Policy(model, mesh=make_mesh())
    learner, _ = make_learner(c, parts.make_parts(c, 32), policy, shapes.padded(3, 4, 2, 1))
    tokens = np.array([[[*b"12", EOS, 0], [*b"1", EOS, 0, 0]], [[*b"9999"], [*b"10", EOS, 0]]], np.int32)
    batch = rollouts.Rollouts(
        mask=tokens > 0, valid=np.ones((2, 2), bool), rewards=np.array([[1, 0], [0, 1]], np.float32), tokens=tokens,
        prompt_tokens=np.array([[*b"7+5"], [*b"9+1"]], np.int32), prompt_mask=np.ones((2, 3), bool))
    state = learner.init(weights(policy.mesh, 0), None, jax.random.key(0))
    before = np.asarray(learner.layout.logprobs(state.params, None, _texts(batch))[0])
    learned = learner.learn(state, batch)
    after = np.asarray(learner.layout.logprobs(learned.state.params, None, _texts(batch))[0])
    moved = ((after - before) * batch.mask).sum(-1)
    assert moved[0, 0] > moved[0, 1] and moved[1, 1] > moved[1, 0] and int(learned.state.step) == 1
    np.testing.assert_allclose(np.asarray(learned.advantages)[..., 0], np.sqrt(0.5) * np.array([[1, -1], [-1, 1]]), atol=1e-5)


def _texts(batch):
    from jaxrl_llm.recorders.base import texts_of
    return jax.device_put(texts_of(batch))
