"""Programs against tests: verdicts, limits, and no way to pass without the right output."""

import pytest

from jaxrl_llm import rewards, sandbox
from jaxrl_llm.rewards import RewardError, combine
from jaxrl_llm.rewards.code import extract_program, run_test, same_output, same_value
from jaxrl_llm.tasks import Problem

DOUBLE = {"input": "21\n", "output": "42\n"}


def outcome(program, test=DOUBLE, deadline=20.0):
    return run_test(program, test, sandbox.Limits(seconds=deadline, memory_mb=512), sandbox.require().mode)


@pytest.mark.parametrize(("completion", "program"), [
    ("a ```python\nx = 1\n``` b ```python\ny = 2\n```", "y = 2"), ("```python\nx = 1", None), ("```\nx = 1\n```", None),
    ("x = 1", None), ("```python\n\n```", ""), ("```python3\nx\n```", None),
])
def test_extract_program(completion, program):
    assert extract_program(completion) == program


@pytest.mark.parametrize(("printed", "expected", "same"), [
    ("1 2\n3\n", "1 2 \n3", True), (".333333", ".3333331", True), ("1\n2", "1 2", False), ("1 2", "1 3", False),
    ("a", "b", False), ("", "0", False), ("1.0 x", "1 x", False), ("nan", "1", False), ("1 2 3", "1 2", False),
])
def test_same_output(printed, expected, same):
    assert same_output(printed, expected) is same


def test_same_value_is_strict_about_kinds():
    assert same_value([1, [2.0000001]], [1, [2.0]]) and same_value({"a": [1]}, {"a": [1]}) and same_value(2.0, 2)
    assert not any(same_value(*pair) for pair in [(True, 1), (1, True), ("1", 1), ([1], [1, 2]), (None, 0), (1.1, 1.0)])


def test_outcomes():
    assert outcome("print(int(input()) * 2)") == 1
    assert outcome("print(int(input()) * 3)") == 0
    assert outcome("raise SystemExit") == 0
    assert outcome("import os; os._exit(0)") == 0
    assert outcome("1 / 0") == -2
    assert outcome("print(") == -4
    assert outcome("x = '\\0") == -4
    assert outcome("while True: pass", deadline=0.7) == -3
    assert outcome("x = bytearray(1 << 30)\nprint(42)") == -2
    assert outcome("while True: print('x' * 10000)") == -2  # output is bounded
    assert outcome("import sys; sys.stdout.buffer.write(b'\\xff')") == 0
    call = {"function": "double", "args": [21], "result": 42}
    assert outcome("def double(x):\n    print('noise')\n    return x * 2", call) == 1
    assert outcome("def double(x):\n    return x", call) == 0
    assert outcome("def double(x):\n    return object()", call) == -2
    assert outcome("def other(x):\n    return x", call) == -2


def test_a_function_may_be_a_method_of_the_class_solution():
    call = {"function": "double", "args": [21], "result": 42}
    assert outcome("class Solution:\n    def double(self, x):\n        return x * 2", call) == 1
    assert outcome("class Solution:\n    def double(self, x):\n        return x", call) == 0
    assert outcome("class Solution:\n    def other(self, x):\n        return x * 2", call) == -2
    assert outcome("class Solution:\n    double = None\ndef double(x):\n    return x * 2", call) == 1


def test_a_result_in_a_list_of_one_counts_where_the_data_say_so():
    call = {"function": "double", "args": [21], "result": [42]}
    double = "def double(x):\n    return x * 2"
    assert outcome(double, call) == 0 and outcome(double, {**call, "wrapped": True}) == 1
    assert outcome("def double(x):\n    return [x * 2]", {**call, "wrapped": True}) == 1
    assert outcome("def double(x):\n    return x", {**call, "wrapped": True}) == 0


def test_the_expected_output_is_not_within_reach():
    # The program reads every file that it can and fails (-2) if one of them has the expected output.
    search = ("import os\nfor folder, _, files in os.walk('.'):\n    for name in files:\n"
              "        assert 'some' + 'secret' not in open(os.path.join(folder, name)).read()\n"
              "print('reached the end')")
    assert outcome(search, {"input": "", "output": "some" + "secret"}) == 0
    assert outcome(search, {"input": "", "output": "reached the end"}) == 1


def test_reward_and_counts():
    programs = ["print(int(input()) * 2)", "print(42)", "print(", "1 / 0"]
    completions = [f"Here:\n```python\n{program}\n```" for program in programs] + ["no program"]
    problem = Problem("Double it.", "", 0, extra={"tests": [DOUBLE, {"input": "1", "output": "2"}]})
    problems, answers = [problem] * 5, [""] * 5
    scores = combine([rewards.make("code", deadline=20.0)])(completions, answers, problems)
    assert scores.total.tolist() == [1, 0, 0, 0, 0]
    assert scores.failures == {"code/compile": 1, "code/runtime": 1, "code/no_program": 1}
    half = combine([rewards.make("code", deadline=20.0, partial_credit=0.5)])
    partial = half(completions[:2], answers[:2], problems[:2])
    assert partial.total.tolist() == [1, 0.25]


def test_missing_tests_are_an_error():
    with pytest.raises(RewardError, match="completion 0 'x' .*needs problem.extra"):
        combine(["code"])(["x"], [""])
    with pytest.raises(RewardError, match="function, args and result"):
        combine(["code"])(["x"], [""], [Problem("", "", 0, extra={"tests": [{"input": "1"}]})])
    with pytest.raises(RewardError, match="which are texts and not all blank, .* got .*'output': ' .n'"):
        combine(["code"])(["x"], [""], [Problem("", "", 0, extra={"tests": [{"input": "1", "output": " \n"}]})])
    with pytest.raises(ValueError, match="partial credit in"):
        rewards.make("code", partial_credit=1.0)


@pytest.mark.parametrize("test", [
    {"input": "3", "output": 9}, {"input": 3, "output": "9"}, {"input": ["3"], "output": "9"}, {"input": "3", "output": None},
    {"input": "3", "output": "\n"}, {"function": 3, "args": [], "result": 9}, {"function": "f", "args": 3, "result": 9},
    {"function": "f", "args": [{3}], "result": 9}, {"function": "f", "args": [3]}, "output", None])
def test_one_malformed_test_is_an_error_of_its_row_alone(test):
    completion = "```python\ndef f(x):\n    pass\nprint(9)\n```"
    problems = [Problem("", "", 0, extra={"tests": [one]}) for one in ({"input": "3", "output": "9"}, test, {"output": "9"})]
    scores = combine([rewards.make("code", deadline=20.0)], on_error="zero")([completion] * 3, [""] * 3, problems)
    assert scores.total.tolist() == [1, 0, 1] and scores.failures == {"code/error": 1}
