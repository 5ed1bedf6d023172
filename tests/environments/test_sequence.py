"""Several problems in one conversation."""
import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.environments import base


def say(text):
    return {"role": "assistant", "content": text}


def test_problems_follow_each_other_with_a_reward_and_a_verdict_for_each():
    environment = environments.make("sequence", options={"level": "add3", "size": 60, "chat": True}, length=3)
    inner = environments.make("single", options={"level": "add3", "size": 60, "chat": True}).task
    assert len(environment.task.train) == len(inner.train) // 3 and len(environment.task.heldout) == len(inner.heldout) // 3
    problems = [inner.train[i] for i in (3, 4, 5)]
    state, opening = base.begin(environment, environment.task.train[1], 0)
    assert opening.messages == [dict(one) for one in problems[0].prompt]
    first = base.advance(environment, state, say(problems[0].answer))
    assert first.messages == [{"role": "user", "content": f"Right.\n\n{problems[1].prompt[0]['content']}"}]
    second = base.advance(environment, state, say("no idea"))
    assert second.messages[0]["content"] == f"Wrong: {problems[1].answer}.\n\n{problems[2].prompt[0]['content']}"
    last = base.advance(environment, state, say(problems[2].answer))
    assert [turn.reward for turn in (first, second, last)] == [pytest.approx(1 / 3), 0, pytest.approx(1 / 3)]
    assert last.done and not last.messages and not (first.done or second.done)
    silent = environments.make("sequence", options={"level": "add3", "size": 60, "chat": True}, answers=False)
    state, _ = base.begin(silent, silent.task.train[0], 0)
    assert base.advance(silent, state, say("no idea")).messages[0]["content"].startswith("Wrong.\n\n")


@pytest.mark.slow
def test_sequences_of_a_data_set_of_reasoning_gym(capsys):
    pytest.importorskip("reasoning_gym")
    options = {"task": "reasoning_gym", "length": 2,
               "options": {"dataset": "leg_counting", "train_size": 20, "heldout_size": 6}}
    environment = environments.make("sequence", **options)
    state, opening = base.begin(environment, environment.task.train[0], 0)
    turns = [opening]
    while not turns[-1].done:
        turns.append(base.advance(environment, state, say(environment.oracle(state))))
    assert [turn.reward for turn in turns] == [0, 0.5, 0.5] and "how many legs" in turns[1].messages[0]["content"]
    assert audit.main(["sequence", "--trajectories=6", f"--options={__import__('json').dumps(options)}"]) == 0
    assert "FAILS" not in capsys.readouterr().out


def test_what_cannot_be_a_sequence():
    with pytest.raises(ValueError, match="length=0; give at least 1"):
        environments.make("sequence", length=0)
    with pytest.raises(ValueError, match="has no training problems"):
        environments.make("sequence", options={"level": "digit", "chat": True}, length=10**6)
