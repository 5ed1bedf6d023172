"""Traces and open messages of files of problems: what reaches the problem, and what is refused with line and key."""
import json

import pytest

from jaxrl_llm.tasks.dataset import dataset

ASK = {"role": "user", "content": "2+3"}


@pytest.fixture
def problems(tmp_path):
    def of(*rows):
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(json.dumps({"answer": "5", **row}) + "\n" for row in rows))
        task = dataset(path=str(path), split="", heldout=str(path))
        return [task.heldout[i] for i in range(len(task.heldout))]

    return of


def test_traces_reach_the_problem_with_all_their_keys(problems):
    steps = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]},
             {"role": "tool", "content": "5"}, {"role": "assistant", "content": "5"}]
    (problem,) = problems({"prompt": "2+3", "traces": [
        {"text": "It is 5.", "writer": "qwen", "correct": True, "logprobs": [-1, None]}, {"messages": steps}]})
    first, second = problem.extra["traces"]
    assert first == {"text": "It is 5.", "writer": "qwen", "correct": True, "logprobs": [-1, None]}
    assert [one["role"] for one in second["messages"]] == ["assistant", "tool", "assistant"]
    assert (second["writer"], second["correct"], second["logprobs"]) == ("", None, None)


@pytest.mark.parametrize(("traces", "error"), [
    ("It is 5.", "'traces' is 'It is 5.'; give a list"),
    (["It is 5."], r"traces\[0\] is 'It is 5.'"),
    ([{"text": "5"}, {"txt": "5"}], r"traces\[1\]: Unknown key 'txt'. Did you mean 'text'"),
    ([{"writer": "qwen"}], r"traces\[0\] has the keys \['writer'\]; give either"),
    ([{"text": "5", "correct": "yes"}], r"traces\[0\].correct is 'yes'"),
    ([{"text": "5", "logprobs": [1]}], r"traces\[0\]: 'logprobs' is \[1\]"),
    ([{"messages": [ASK]}], r"traces\[0\].messages has the roles \['user'\]"),
    ([{"messages": [{"role": "bot", "content": "5"}]}], r"traces\[0\].messages\[0\].role: Unknown role 'bot'.*'assistant'")])
def test_malformed_traces_are_refused_with_line_and_key(problems, traces, error):
    with pytest.raises(ValueError, match=r"problems\.jsonl, line 2: .*" + error):
        problems({"prompt": "1+4"}, {"prompt": "2+3", "traces": traces})


def test_conversations_with_the_answer_are_no_prompts(problems):
    said = {"role": "assistant", "content": "2+3 is 5."}
    with pytest.raises(ValueError, match="line 1: 'messages' end with the assistant's answer, '2.3 is 5.', and so do 1 of "
                                         "the 2 rows.*imitated, by supervised fine-tuning"):
        problems({"messages": [ASK, said]}, {"messages": [ASK]})
    opened = {"role": "assistant", "content": "Let me think of 15 things."}
    assert problems({"messages": [ASK, opened]})[0].prompt[-1] == opened
