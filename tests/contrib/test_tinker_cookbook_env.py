"""Token environments of the tinker cookbook: tokens in, tokens out."""
import gc
import time

import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.environments import base
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.tokenizers import ByteTokenizer, conversation

pytest.importorskip("tinker_cookbook")
BYTES = ByteTokenizer()


def say(text):
    return {"role": "assistant", "content": text, "ids": [*BYTES.encode(text), BYTES.eos_id]}


@pytest.fixture(scope="module")
def letters():
    return environments.make("tinker_cookbook_env", dataset="cookbook_bytes:builder", returns=(0.0, 1.5), deadline=5.0)


def test_tokens_in_tokens_out(letters):
    import cookbook_bytes
    assert letters.tokens and letters.waits and (len(letters.task.train), len(letters.task.heldout)) == (10, 3)
    state, opening = base.begin(letters, letters.task.train[9], 0)
    assert conversation.given(BYTES, opening.messages) == BYTES.encode("Say j.\n")
    odd = {**say("j"), "ids": [ord("j"), 1, 0, 255, BYTES.eos_id]}  # no encoding of any text
    first = base.advance(letters, state, odd)
    assert conversation.given(BYTES, first.messages) == BYTES.encode("Good.\n"), "only the new message"
    assert state.ids == BYTES.encode("Say j.\n") + odd["ids"] + BYTES.encode("Good.\n") and first.reward == 0.5
    last = base.advance(letters, state, say("no"))
    assert last.done and last.reward == 0.0 + 0.5, "with the reward of the group of one"
    assert first.info == {"good": 1.0}
    cookbook_bytes.CLEANED.clear()
    del state
    gc.collect()
    for _ in range(100):
        if cookbook_bytes.CLEANED:
            break
        time.sleep(0.05)
    assert cookbook_bytes.CLEANED == ["j"]
    held = environments.make("tinker_cookbook_env", dataset="cookbook_bytes:builder", options={"test": False}, heldout=2)
    assert (len(held.task.train), len(held.task.heldout)) == (8, 2)
    assert conversation.given(BYTES, base.begin(held, held.task.heldout[1], 0)[1].messages) == BYTES.encode("Say j.\n")


def test_what_is_no_continuation_is_refused(letters):
    def after(text):
        state, _ = base.begin(letters, letters.task.train[0], 0)
        return base.advance(letters, state, say(text))

    with pytest.raises(ValueError, match="observes other tokens from place 0 of the 15 on"):
        after("rewrite")
    with pytest.raises(ValueError, match="holds image"):
        after("image")
    with pytest.raises(base.Late, match="nothing came back within 5 s"):
        after("hang")


def test_a_runner_keeps_the_tokens(letters):
    options = {"dataset": "cookbook_bytes:builder", "replayable": True, "returns": [0.0, 1.5]}
    runner = Runner("tinker_cookbook_env", options, seed=0, kind="threads")
    runner.reset({0: letters.task.train[0]})
    message = say("a")
    turns = runner.step({0: message})
    assert runner.recording(0).said == [message] and runner.replay(0)[-1] == turns[0]
    runner.close()


def test_the_audit_and_what_is_no_builder(capsys):
    options = '{"dataset": "cookbook_bytes:builder", "replayable": true, "returns": [0.0, 1.5]}'
    audit.main(["tinker_cookbook_env", f"--options={options}", "--trajectories=6"])  # its attacks hold letters, and earn
    printed = capsys.readouterr().out
    assert "holds  raises nothing" in printed and "holds  repeats itself" in printed and "holds  returns in range" in printed
    with pytest.raises(ValueError, match="cookbook_bytes:nothing returned a NoneType"):
        environments.make("tinker_cookbook_env", dataset="cookbook_bytes:nothing")
