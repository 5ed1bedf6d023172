"""Valid returns of environments, keys and replays, for every kind without a download."""
import contextlib
import dataclasses
import json
import sys

import numpy as np
import pytest

from jaxrl_llm import environments
from jaxrl_llm.environments import Environment, Rubbish, Turn, base
from jaxrl_llm.tasks.base import seeded
from jaxrl_llm.tokenizers import ByteTokenizer, conversation

KINDS = {
    "single": {}, "single chat": {"task": "arithmetic", "options": {"chat": True, "level": "mul"}, "reward": "boxed"},
    "tool_use": {}, "guess_number": {}, "guess_number small": {"highest": 20}, "treasure": {}, "treasure large": {"size": 5},
}


def say(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_policy_gets_the_highest_return_and_every_problem_opens_alike(kind):
    environment = environments.make(kind.split()[0], **KINDS[kind])
    assert environment.returns == (0.0, 1.0)
    for place in (0, 1, len(environment.task.train) // 2):
        problem = environment.task.train[place]
        state, opening = base.begin(environment, problem, 5)
        assert base.begin(environment, problem, 6)[1] == opening, "a group starts from the same text, whatever its keys"
        total, messages, turns = 0.0, [], [opening]
        while not turns[-1].done:
            messages.append(say(environment.oracle(state)))
            turns.append(base.advance(environment, state, messages[-1]))
            total += turns[-1].reward
        assert total == 1.0
        _, again = base.replay(environments.make(kind.split()[0], **KINDS[kind]), problem, 5, messages)
        assert again == turns
        assert all(turn.messages or turn.done for turn in turns)


def environment_of(turn):
    return Environment(name="x", task=seeded("x", "x", 1, 1), reset=None, step=lambda state, message: turn)


@pytest.mark.parametrize("turn, why", [
    (None, "allowed is Turn"), ("done", "allowed is Turn"), ([[], 0.0, True, {}], "allowed is Turn"),
    (Turn([{"role": "user", "content": "x"}], fresh=1), "fresh is 1"),
    (Turn([{"role": "user", "content": "x"}], fresh=True), "contexts=1"),
    (Turn([{"role": "user", "content": "x"}], rewritten=[(2, 0, 1)]), "allowed is a list of .0 or 1, start, end"),
    (Turn([{"role": "user", "content": "x"}], rewritten=[(0, 3, 1)]), "allowed is a list of .0 or 1, start, end"),
    (Turn([{"role": "user", "content": "x"}], rewritten=7), "allowed is a list of .0 or 1, start, end"),
    (Turn([{"role": "assistant", "content": "I win"}]), "no message"),
    (Turn([{"role": "user", "content": None}]), "no message"), (Turn(["text"]), "no message"),
    (Turn("text"), "allowed is a list"),
    (Turn([{"role": "user", "content": "x", "extra": object()}]), "not in types of JSON"),
    (Turn(reward=float("inf"), done=True), "finite"), (Turn(reward=float("nan"), done=True), "finite"),
    (Turn(reward="1", done=True), "not a number"), (Turn(reward=None, done=True), "not a number"),
    (Turn(reward=np.ones(2), done=True), "shape"), (Turn(done=1), "allowed are True and False"),
    (Turn(done=True, info={"x": {1, 2}}), "types of JSON"), (Turn(done=True, info=3), "types of JSON"),
    (Turn(), "needs something to answer"),
])
def test_invalid_turns_are_refused(turn, why):
    with pytest.raises(Rubbish, match=why):
        base.advance(environment_of(turn), [], say("x"))


def test_what_is_a_turn():
    turn = Turn(({"role": "tool", "content": "7", "name": "f"},), np.float32(0.5), np.bool_(True), {"n": 1})
    result = base.advance(environment_of(turn), [], say("x"))
    assert result == Turn([{"role": "tool", "content": "7", "name": "f"}], 0.5, True, {"n": 1})
    assert type(result.reward) is float and type(result.done) is bool
    assert base.advance(environment_of(Turn(done=True, reward=True)), [], say("x")).reward == 1.0


@pytest.mark.parametrize("opened, why", [
    (({}, []), "no message"), (({}, ["x"]), "no message"), (({}, "x"), "allowed is a list"),
    (None, "allowed is .state, messages."),
    ([[], []], "allowed is .state, messages."), ((1, 2, 3), "allowed is .state, messages."),
])
def test_invalid_openings_are_refused(opened, why):
    environment = Environment(name="x", task=seeded("x", "x", 1, 1), reset=lambda problem, key: opened, step=None)
    with pytest.raises(Rubbish, match=why):
        base.begin(environment, environment.task.train[0], 0)


def test_halves_of_characters_are_read_as_question_marks():
    """A call can hold them as escapes, and a tool can repeat them; no tokenizer encodes them."""
    tokenizer = ByteTokenizer("{% for m in messages %}{{ m.content + '<|eos|>' }}{% endfor %}")
    said = {"role": "tool", "name": "a\udc00", "content": "no file \ud800, \U0001f600"}
    turn = base.checked(environment_of(None), Turn([said]))
    assert turn.messages == [{"role": "tool", "name": "a?", "content": "no file ?, \U0001f600"}]
    assert conversation.extend(tokenizer, [tokenizer.eos_id], turn.messages)
    environment = environments.make("tool_use")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    calls = ({"name": "re\ud800", "arguments": {}}, {"name": "calculator", "arguments": {"\ud800": "\ud800"}},
             {"name": "calculator", "arguments": {"expression": "\ud800"}})
    turn = base.advance(environment, state, say("".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)))
    assert len(turn.messages) == 3 and conversation.extend(tokenizer, [tokenizer.eos_id], turn.messages)


def test_messages_of_tokens_have_ids():
    def environment(**ids):
        message = {"role": "user", "content": "", **ids}
        return Environment(name="x", task=seeded("x", "x", 1, 1), reset=lambda problem, key: ({}, [message]), tokens=True,
                           step=lambda state, messages: Turn([message]))

    state, opening = base.begin(environment(ids=[3, 4]), None, 0)
    assert opening.messages == [{"role": "user", "content": "", "ids": [3, 4]}]
    assert conversation.given(ByteTokenizer(), [*opening.messages, {"ids": [5]}]) == [3, 4, 5]
    for ids in ({}, {"ids": "34"}, {"ids": [3.0]}):
        with pytest.raises(Rubbish, match="has no ids; in an environment of tokens each message has a list of them"):
            base.begin(environment(**ids), None, 0)
        with pytest.raises(Rubbish, match="has no ids"):
            base.advance(environment(**ids), {}, say("x"))
    for play in (lambda: base.begin(environment(ids=[]), None, 0), lambda: base.advance(environment(ids=[]), {}, say("x"))):
        with pytest.raises(Rubbish, match="no ids in any.*the policy needs something to answer"):
            play()
    with pytest.raises(ValueError, match="70000 is outside the vocabulary"):
        conversation.given(ByteTokenizer(), [{"ids": [70000]}])
    with pytest.raises(ValueError, match="speaks in tokens: it has one context"):
        dataclasses.replace(environment(ids=[1]), contexts=2)


def test_keys_belong_to_a_seed_and_a_uid():
    keys = {base.key_of(seed, uid) for seed in range(10) for uid in range(100)}
    assert len(keys) == 1000 and base.key_of(3, 4) == base.key_of(3, 4) != base.key_of(4, 3)
    assert base.key_of(0, 0) == int(np.random.SeedSequence((0, 0)).generate_state(1, np.uint64)[0])
    assert base.key_of(2**40, 2**40) < 2**64


def test_fingerprints_chain():
    one, two = Turn([{"role": "user", "content": "a"}]), Turn(reward=1.0, done=True)
    assert base.digest([one, two]) == base.digest([two], base.digest([one]))
    assert base.digest([one, two]) != base.digest([two, one]) and base.digest([]) == ""


def test_names():
    with pytest.raises(ValueError, match="Did you mean 'treasure'"):
        environments.make("tresure")
    with pytest.raises(ValueError, match="Unknown keyword of environment 'treasure' 'sise'. Did you mean 'size'"):
        environments.make("treasure", sise=3)
    with pytest.raises(ValueError, match="needs the keyword 'env_id'"):
        environments.make("gymnasium_text")
    with pytest.raises(ValueError, match="returned a str; it must return a jaxrl_llm.environments.base.Environment"):
        environments.make("faulty_environments:nothing")
    assert environments.make("faulty_environments:obedient", replayable=False).replayable is False
    with pytest.raises(ValueError, match="not replayable"):
        unplayable = environments.make("faulty_environments:obedient", replayable=False)
        base.replay(unplayable, unplayable.task.train[0], 0, [])


def test_single_rewards_by_the_verifier_of_the_task():
    environment = environments.make("single", task="arithmetic", options={"chat": True}, reward="boxed")
    problem = environment.task.train[7]
    for text, reward in ((rf"\boxed{{{problem.answer}}}", 1.0), (problem.answer + ".", 0.0), ("", 0.0)):
        state, _ = base.begin(environment, problem, 0)
        assert base.advance(environment, state, say(text)) == Turn([], reward, True, {})
    with pytest.raises(ValueError, match="Unknown reward 'boxes'"):
        environments.make("single", reward="boxes")


@contextlib.contextmanager
def another_package(folder, monkeypatch, code, **names):
    """An installed package with this code and these entry points, name -> function."""
    known = {*environments.ENVIRONMENTS}
    (folder / "another_package.py").write_text(code)
    told = folder / "another_package-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: another_package\nVersion: 1.0\n")
    points = "\n".join(f"{name} = {function}" for name, function in names.items())
    (told / "entry_points.txt").write_text(f"[jaxrl_llm.environments]\n{points}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "another_package", raising=False)
    environments.factories.cache_clear()
    try:
        yield
    finally:
        environments.factories.cache_clear()
        for name in environments.ENVIRONMENTS.keys() - known:
            del environments.ENVIRONMENTS[name]
        sys.modules.pop("another_package", None)


HIDDEN = """from jaxrl_llm import environments


def hidden_number(*, highest=20):
    return environments.make("guess_number", highest=highest)


def by_position(highest):
    return hidden_number(highest=highest)
"""


def test_another_package_names_its_environments_as_entry_points(tmp_path, monkeypatch):
    with another_package(tmp_path, monkeypatch, HIDDEN, concealed="another_package:hidden_number"):
        assert environments.make("concealed", highest=30).name == "guess_number"
        with pytest.raises(ValueError, match="Unknown environment 'conceled'. Did you mean 'concealed'"):
            environments.make("conceled")
        with pytest.raises(ValueError, match="Unknown keyword of environment 'concealed' 'hihgest'. Did you mean 'highest'"):
            environments.make("concealed", hihgest=3)
        assert {"treasure", "gymnasium_text", "verifiers_env"} <= environments.factories().keys()
        assert "hidden_number" not in environments.factories()


def test_a_faulty_entry_point_leaves_the_other_environments(tmp_path, monkeypatch):
    with another_package(tmp_path, monkeypatch, HIDDEN, gone="another_package:nothing", mine="another_package:hidden_number",
                         by_position="another_package:by_position", treasure="another_package:hidden_number"):
        with pytest.warns(RuntimeWarning) as caught:
            assert environments.make("treasure", size=2).name == "treasure"
        texts = sorted(str(warning.message) for warning in caught)
        assert len(texts) == 3
        assert "'by_position' of another_package:by_position is left out" in texts[0] and "must be keyword-only" in texts[0]
        assert "'gone' of another_package:nothing is left out: AttributeError" in texts[1]
        assert "'treasure' of another_package:hidden_number is left out" in texts[2] and "is defined twice" in texts[2]
        assert environments.make("mine").name == "guess_number"
