"""Traces and open messages of files of problems: what reaches the problem, and what is refused with line and key."""
import json

import pytest

from jaxrl_llm.engines.prompts import spelled
from jaxrl_llm.tasks.answered import graded, reward_of
from jaxrl_llm.tasks.base import Part, Problem, ProblemSource, Task
from jaxrl_llm.tasks.dataset import dataset
from jaxrl_llm.tasks.mixture import mixture
from jaxrl_llm.tasks.traces import Trace, traces_of, useful
from jaxrl_llm.tokenizers import ByteTokenizer

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
                                         "the 2 rows.*imitated: give the file as config.texts.path"):
        problems({"messages": [ASK, said]}, {"messages": [ASK]})
    opened = {"role": "assistant", "content": "Let me think of 15 things."}
    assert problems({"messages": [ASK, opened]})[0].prompt[-1] == opened


def task(name, *texts):
    problems = [Problem(f"{name} {n}: 2+3", "5", n, extra={"traces": [{"text": one, "correct": given} for one, given in said]})
                for n, said in enumerate(texts)]
    return Task(name, ProblemSource(problems, lambda one, number: one), (), "last_number")


def test_traces_of_unknown_correctness_are_compared_with_the_answer():
    one = task("a", [("It is 5.", None), ("It is 6.", None)], [("hm", None), ("It is 7.", True)], [])
    with pytest.warns(RuntimeWarning, match="of 3 traces, 33.3% end without an answer and 33.3% with another answer than that "
                                            "of their problem, the first of problem 0; they count as wrong"):
        found = graded(one, reward_of("last_number")).train
    assert [[trace.correct for trace in traces_of(problem)] for problem in found] == [[True, False], [False, True], []]
    assert [useful(problem) for problem in found] == [[0], [1], []] and useful(found[-3], wrong=True) == [0, 1]


def test_a_mixture_keeps_its_tasks_when_traces_are_compared():
    parts = [Part(name, task(name, [(f"It is {answer}.", None)])) for name, answer in (("a", 5), ("b", 6))]
    with pytest.warns(RuntimeWarning, match="of 2 traces, 0.0% .* and 50.0%"):
        found = graded(mixture(parts), reward_of("last_number"))
    assert [(problem.task, problem.extra["traces"][0]["correct"]) for problem in found.train] == [(0, True), (1, False)]


def test_log_probs_of_a_trace_are_those_of_its_writer():
    chat = "{% for m in messages %}{{ m.content + ('<|eos|>' if m.role == 'assistant' else '') }}{% endfor %}"
    steps = ({"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"})
    made = spelled(Trace(steps, logprobs=[-1, None, -2, -3]), Problem((ASK,), "5", 0), ByteTokenizer(chat))
    assert made.ids == [*b"a", 258, *b"bc", 258] and made.said == [True, True, False, True, True]
    assert [x == x for x in made.logprobs] == [True, False, False, True, True] and made.logprobs[3:] == [-2.0, -3.0]
    with pytest.raises(ValueError, match="a trace has 1 log-probs, and 4 tokens with its end token"):
        spelled(Trace(steps, logprobs=[-1]), Problem((ASK,), "5", 0), ByteTokenizer(chat))
