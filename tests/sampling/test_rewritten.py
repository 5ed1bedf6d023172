"""Failed calls that give way to their corrections: which, in the environment, and what the forest then holds."""
import contextlib
import json

import chatter
import numpy as np
import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.environments import Environment, Turn, base
from jaxrl_llm.environments.purified import merged, purified, similarity
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.sampling.dialogue import complete
from jaxrl_llm.sampling.trajectory import Trajectory
from jaxrl_llm.setup import setup
from jaxrl_llm.tasks.base import seeded

CONFIG = {"environment": "purified(environment='chatter:letters', mark='')", "method": "cleaner_saar", "sampling.max_turns": 4}


def programs() -> Environment:
    """Messages are calls where they have a bar, and fail where they have no closing bracket; ten of them end it."""
    def step(state, message):
        state.append(message["content"])
        failed = "|" in message["content"] and ")" not in message["content"]
        sent = f"{len(state)} {'error' if failed else 'ok'}"
        return Turn([{"role": "user", "content": sent}], float(failed), len(state) == 10, {"tool_errors": int(failed)})

    return Environment(name="programs", task=seeded("programs", "?", 4, 2), step=step, facts={"tool_errors": "count"},
                       reset=lambda problem, key: ([], list(problem.prompt)))


def play(sent, side="train", **options):
    environment = purified(environment="test_rewritten:programs", mark="|", **options)
    state, _ = base.begin(environment, getattr(environment.task, side)[0], 0)
    turns = [base.advance(environment, state, {"role": "assistant", "content": text}) for text in sent]
    return state, [turn.messages[0]["content"] for turn in turns], [[tuple(part) for part in turn.rewritten] for turn in turns]


def test_worked_example_of_similar_calls():
    assert merged("so |print(x+1)", "oh |print(x + 1)", "|", 0.5) == ("so |print(x + 1)", [(1, 0, 3), (0, 3, 17)])
    assert merged("so |import os", "oh |y = 3*7", "|", 0.5) == ("oh |y = 3*7", [(0, 0, 12)])
    for limit, fixed, other in ((0.90, "so", "oh"), (0.91, "oh", "oh"), (0.125, "so", "so")):  # 0.9091, 0.125
        assert merged("so |print(x+1)", "oh |print(x + 1)", "|", limit)[0] == f"{fixed} |print(x + 1)"
        assert merged("so |import os", "oh |y = 3*7", "|", limit)[0] == f"{other} |y = 3*7"
    assert merged("no call", "oh |f()", "|", 0.0) == ("oh |f()", [(0, 0, 8)])


def test_similarity_of_long_calls_counts_what_is_around_the_change():
    one, other = ("x" * 3000 + middle + "y" * 3000 for middle in ("abcd", "abed"))
    assert similarity(one, other) == pytest.approx(2 * 6003 / 12008)
    assert similarity("ab" * 400, "ab" * 400 + "c" * 800) == pytest.approx(2 * 800 / 2400)
    assert similarity("u" * 2000, "v" * 2000) == 0 and similarity("u" * 2000, "u" * 2000) == 1


def test_worked_example_of_attempts():
    """Four attempts of the first turn; the third has another idea, and then nothing is rewritten any more."""
    state, read, parts = play(["a|f(1", "b|f(1", "c|zzz", "d|g(", "e|h(", "f|h()"])
    assert read == ["1 error"] * 4 + ["2 error", "3 ok"] and state.inner == ["d|g(", "e|h(", "f|h()"]
    assert parts == [[], [(1, 0, 1), (0, 1, 6)], [(0, 0, 6)], [(0, 0, 5)], [], []]


def test_corrections_without_a_call_and_shares():
    state, read, parts = play(["a|f(1", "sorry", "b|g(", "c|g(2)", "d|f(", "e|f()"])
    assert state.inner == ["a|f(1", "sorry", "b|g(2)", "d|f()"] and read[3:] == ["3 ok", "4 error", "4 ok"]
    assert [bool(one) for one in parts] == [False, False, False, True, False, True]
    for options in ({"side": "heldout"}, {"share": 0.0}, {"retries": 0}, {"messages": 1}):
        assert play(["a|f(1", "b|f(1)"], **options)[0].inner == ["a|f(1", "b|f(1)"]
    with pytest.raises(ValueError, match="does not say the fact 'tool_errors'"):
        environments.make("purified", environment="treasure")


@pytest.mark.slow
def test_corrections_of_a_tool_in_processes():
    """A call of the calculator that divides by zero, its correction, the answer: as in this process, and played again."""
    def call(expression):
        arguments = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        return {"role": "assistant", "content": f"so <tool_call>{arguments}</tool_call>"}

    sent = [call("1/0"), call("1/2"), call("6*7"), {"role": "assistant", "content": "42"}]
    with contextlib.closing(Runner("purified", seed=0, kind="processes")) as runner:
        problem = runner.environment.task.train[0]
        runner.reset({3: problem})
        turns = [runner.step({3: message})[3] for message in sent]
        assert turns == runner.replay(3)[1:] == base.replay(runner.environment, problem, base.key_of(0, 3), sent)[1][1:]
    assert turns[0].messages[0]["content"].startswith("error") and turns[1].messages[0]["content"] == "0.5"
    assert [len(turn.rewritten) for turn in turns] == [0, 2, 0, 0] and turns[1].rewritten[0] == [1, 0, 3]
    assert [turn.info["tool_errors"] for turn in turns] == [1, 0, 0, 0] and turns[3].done


def test_audit():
    rows, checks = audit.audit(*(environments.make("purified") for _ in range(2)), count=12, seed=0)
    assert not any(check.failed for check in checks.values()), checks


@pytest.fixture(scope="module")
def sampled():
    run, params = setup.build(chatter.get_config(**CONFIG))
    state = setup.initial_state(run, params)
    return run, state, run.source.next(run.learner.publish(state))


def test_trajectories_equal_those_that_begin_with_the_correction(sampled):
    run, _, finished = sampled
    forest, letters, corrected = finished.forest, chatter.letters(), 0
    for end in forest.ends:
        nodes = []
        while forest.role[end] != Role.PROMPT:
            nodes.insert(0, end)
            end = forest.parent[end]
        assert [int(forest.role[n]) for n in nodes] == ([Role.POLICY, Role.ENVIRONMENT] * 4)[:len(nodes)] and len(nodes) % 2
        state, _ = base.begin(letters, forest.problems[forest.prompt[nodes[0]]], 0)
        turns = [base.advance(letters, state, {"role": "assistant", "content": forest.texts[n]}) for n in nodes[::2]]
        assert [turn.messages[0]["content"] for turn in turns[:-1]] == [forest.texts[n] for n in nodes[1::2]]
        assert [forest.turn_rewards[n] for n in nodes[::2]] == [turn.reward for turn in turns]
        assert forest.rewards[nodes[-1]] == pytest.approx(sum(turn.reward for turn in turns))
        result = [forest.turn_info[n] for n in nodes[::2]]
        assert [{**turn.info, "rewritten": info["rewritten"]} for turn, info in zip(turns, result)] == result
        corrected += sum(info["rewritten"] for info in result)
    assert corrected > 0
    tokens = run.source.stream.tokenizer
    for node in np.flatnonzero(forest.role == Role.POLICY):
        ids = forest.tokens[forest.offset[node]:][:forest.length[node]].tolist()
        assert tokens.decode(ids[:-1] if ids[-1] == tokens.eos_id else ids, skip_special=False) == forest.texts[node]


@pytest.mark.parametrize("failed, correction", [
    ("\u7b97\u3002|f(1", "\u6539\u2192|f(1)"), ("a\U0001f600\u00e9|f(1", "\u00e9|f(1)"),
    ("\u7b97 |f(1", "a|print(\"\u7b97\")")])
def test_characters_of_several_tokens_stay_whole(sampled, failed, correction):
    """The tokens are those of the text that the environment reads, each with its own numbers."""
    partner, one = sampled[0].source.stream.partner, Trajectory([], 0, [])
    text, parts = merged(failed, correction, "|", 0.5)

    def turn(text, first):
        ids = [*partner.tokenizer.encode(text), partner.tokenizer.eos_id]
        numbers = first + np.arange(len(ids))
        return {"ids": ids, "text": text, "logprobs": numbers, "entropies": numbers, "version": 1000 + numbers,
                "author": np.where(numbers < 2, Role.EXPERT, Role.POLICY), "named": np.where(numbers < 2, "a", "")}

    one.append(Role.POLICY, [1], "first")
    one.append(Role.POLICY, **turn(failed, 0))
    one.append(Role.ENVIRONMENT, [1], "error")
    result = partner._rewritten(one, {"role": Role.POLICY, **turn(correction, 100)}, parts)
    assert result["ids"] == [*partner.tokenizer.encode(text), partner.tokenizer.eos_id] and result["text"] == text
    kept = len(failed.partition("|")[0].encode()) if len(parts) == 2 else 0
    begun = 100 + len(correction.partition("|")[0].encode()) * (kept > 0)
    numbers = [*range(kept), *range(begun, 101 + len(correction.encode()))]
    assert result["logprobs"].tolist() == result["entropies"].tolist() == numbers
    assert result["named"].tolist() == ["a" if number < 2 else "" for number in numbers]
    assert result["role"] == Role.POLICY and result["author"].tolist() == [4 if number < 2 else 1 for number in numbers]
    assert result["version"].tolist() == [1000 + number for number in numbers], "each token keeps the weights that drew it"


def test_sizes_of_what_is_decoded_without_characters_that_lack_tokens():
    for text, whole, size in (("", "a", 0), ("a", "ab", 1), ("a\ufffd", "a\u7b97b", 1), ("a\ufffd\ufffd", "a\u7b97", 1),
                              ("\ufffd", "\ufffdb", 1), ("\ufffd\ufffd", "\ufffd\u7b97", 1)):
        assert complete(text, whole) == size


@pytest.mark.slow
def test_what_was_rewritten_is_learned_from_with_log_probs_of_the_learner(sampled):
    run, state, finished = sampled
    rollouts = finished.rollouts
    assert rollouts.extras["rewritten"].dtype == np.int32 and rollouts.extras["rewritten"].sum() > 0
    learned = run.learner.learn(state, rollouts, run.learner.frozen(state.params))
    assert abs(learned.metrics["max/ratio"] - 1) < 1e-4 and learned.metrics["grad_norm"] > 0
    assert learned.metrics["max/mismatch"] > 1e-3  # the sampler drew corrections behind what is no longer there


@pytest.mark.slow
def test_the_first_turn_cannot_be_rewritten():
    run, params = setup.build(chatter.get_config(environment="test_rewritten:wrong", method="grpo"))
    with pytest.raises(ValueError, match="rewrites the first turn"):
        run.source.next(run.learner.publish(setup.initial_state(run, params)))


def wrong() -> Environment:
    """Rewrites a message that does not exist."""
    return Environment(name="wrong", task=seeded("wrong", "?", 20, 8), reset=lambda problem, key: ([], list(problem.prompt)),
                       step=lambda state, message: Turn(done=True, rewritten=[(0, 0, 1)]))


@pytest.mark.parametrize("parts, role, expert", [
    ([(1, 0, 2), (0, 1, 2)], Role.POLICY, [True, True, False]), ([(0, 0, 2), (1, 0, 1)], Role.HINT, [False, False, True])])
def test_what_an_expert_wrote_stays_an_experts(sampled, parts, role, expert):
    """A message that it does not begin, and in which it wrote a part, is not trained."""
    partner, one = sampled[0].source.stream.partner, Trajectory([], 0, [])

    def turn(text, begun):
        numbers = np.zeros(len(text), np.float32)
        return {"ids": [*text.encode()], "text": text, "logprobs": numbers, "entropies": numbers, "version": numbers,
                "author": np.where(np.arange(len(text)) < begun, Role.EXPERT, Role.POLICY),
                "named": np.full(len(text), "", object)}

    one.append(Role.POLICY, [1], "first")
    one.append(Role.POLICY, **turn("abc", 2))
    one.append(Role.ENVIRONMENT, [1], "error")
    result = partner._rewritten(one, {"role": Role.POLICY, **turn("xyz", 0)}, parts)
    assert (result["role"], (result["author"] == Role.EXPERT).tolist()) == (role, expert)
