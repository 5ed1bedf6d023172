"""Programs against tests: verdicts, limits, and no way to pass without the right output."""

import pytest

from jaxrl_llm import rewards, sandbox
from jaxrl_llm.rewards import RewardError, combine, program_tests
from jaxrl_llm.rewards.code import extract_program, run_test, same_output, same_value
from jaxrl_llm.tasks import Problem

DOUBLE = {"input": "21\n", "output": "42\n"}


def outcome(program, test=DOUBLE, deadline=20.0):
    return run_test(program, test, sandbox.ResourceLimits(seconds=deadline, memory_mb=512), sandbox.require().mode)


@pytest.mark.parametrize(("completion", "program"), [
    ("a ```python\nx = 1\n``` b ```python\ny = 2\n```", "y = 2"), ("```python\nx = 1", None), ("```\nx = 1\n```", "x = 1"),
    ("x = 1", None), ("```python\n\n```", ""), ("```python3\nx\n```", "x"), ("```Py \r\nx\n```", "x"),
    ('```python\ns = "```"\nprint(len(s))\n```', 's = "```"\nprint(len(s))'),  # a fence begins a line
    ("```python\nprint(1)```", "print(1)"), ("```python\nprint(1)``` then\n```python\nprint(2)\n```", "print(2)"),
    ("```python\nx = 1\n```\nIt prints\n```\n5\n```", "x = 1"), ("```\nx = 1\n```\n```text\n5\n```", "x = 1"),
    ("```cpp\nx;\n```", None), ("- So:\n  ```python\n  if x:\n      y\n  ```", "if x:\n    y"),
    ('```python\n"""\n    ```\n    """\n```', '"""\n    ```\n    """'), ("```python\nA\n```python\nB\n```", "B"),
])
def test_extract_program(completion, program):
    assert extract_program(completion) == program


@pytest.mark.parametrize(("printed", "expected", "same"), [
    ("1 2\n3\n", "1 2 \n3", True), (".333333", ".3333331", True), ("1\n2", "1 2", False), ("1 2", "1 3", False),
    ("a", "b", False), ("", "0", False),
    ("YES\n0.50", "YES\n0.5", True), ("1.9999999999", "2.000000", True),
    ("1e-12", "0.000000", True), ("a  b", "a b", True), ("x 1.0000001", "x 1", False), ("x 2", "y 2", False),
    ("0.1", "0.0", False), ("1.9999999999", "2", False), ("YES 2.0", "YES 2", True), ("yes 0.5", "YES 0.5", False),
    ("1.0 x", "1 x", True), ("nan", "1", False), ("1 2 3", "1 2", False),
])
def test_same_output(printed, expected, same):
    assert same_output(printed, expected) is same


def test_same_value_is_strict_about_kinds():
    assert same_value(0.1 + 0.2 - 0.3, 0.0) and not same_value(0.1 + 0.2 - 0.3, 0)
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


def test_programs_run_as_in_the_harnesses_of_their_data():
    call = {"function": "f", "args": [[1, 2]], "result": 3}
    typed = "class Solution:\n    def f(self, a: List[int]) -> Optional[int]:\n        return reduce(add, a)"
    assert outcome(typed, call) == 1
    assert outcome("x: Deque = collections.deque([gcd(12, 18)])\nprint(math.sqrt(16), *x)", {"output": "4.0 6"}) == 1
    assert outcome("print(10**5000)", {"output": "1" + "0" * 5000}) == 1
    assert outcome("print(sum(map(int, open('/dev/stdin').read().split())))", {"input": "1 2\n3", "output": "6"}) == 1
    assert outcome("import sys, pathlib\nsys.stdin = open('/dev/stdin')\nprint(input())", {"input": "7", "output": "7"}) == 1
    assert outcome("def f(n):\n    return n and 1 + f(n - 1)\nprint(f(9000))", {"output": "9000"}) == 1
    assert outcome("pow = gcd = lambda a, b: 7\nprint(pow(2, 3), gcd(4, 6))", {"output": "7 7"}) == 1
    assert outcome("print(pow(2, 3, 5))", {"output": "3"}) == 1  # Python's, not that of math
    assert outcome("print(no_such_name)", {"output": "1"}) == -2


def test_tests_of_functions_are_calls_by_lines_of_json():
    test = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}
    extra = {"tests": [test, {**test, "input": '["a"]\n"b"', "output": '["a", "b"]'}], "metadata": '{"func_name": "f"}'}
    assert program_tests.read(extra["tests"], extra) == [{"function": "f", "args": [[1, 2], 3], "result": 6},
                                                         {"function": "f", "args": [["a"], "b"], "result": ["a", "b"]}]
    program = "```python\nclass Solution:\n    def f(self, a, k):\n        return %s\n```"
    problem = Problem("", "", 0, extra=extra)
    completions = [program % "sum(a) + k if k == 3 else (*a, k)", program % "sum(a) + k if k == 3 else [k]"]
    assert combine(["code"])(completions, [""] * 2, [problem] * 2).total.tolist() == [1, 0]
    for named in ({"fn_name": "f"}, {"func_name": "f"}, {"metadata": {"func_name": "f"}}):
        assert program_tests.read([{**test, **named}], {}) == [{"function": "f", "args": [[1, 2], 3], "result": 6}]
    streams = [{"input": "1", "output": "2", "testtype": "stdin"}]
    assert program_tests.read(streams, extra) == streams


@pytest.mark.parametrize(("test", "message"), [
    ({"input": "1", "output": "2", "testtype": "functional"}, "lacks its name: give func_name in the test, or in the column"),
    ({"input": "1", "output": "2", "testtype": "interactive"}, "testtype 'interactive'; read are .*functional.*stdin"),
    ({"input": "1 2", "output": "2", "fn_name": "f"}, "no JSON in each line, '1 2' and '2'"),
    ({"input": "1", "output": 2, "fn_name": "f"}, "give lines of JSON, one for each argument"),
    ({"input": "1", "output": "2", "checker": "def check(x): ..."}, "has checker, which is not read"),
    ({"function": "f", "args": "1", "result": 2}, "args='1' is no list of Python literals"),
    ("assert f(x) == 2", "the test 'assert f.x. == 2' is not read; an assert statement calls a function"),
    ("assert set(f(1)) == {2}", "is not read"), ("assert f(1) ==", "no assert statements in Python"),
    ("assert candidate(1) == 2", "which the column entry_point names"), ("x = 1", "is not read"),
])
def test_tests_that_are_not_read_are_refused(test, message):
    with pytest.raises(ValueError, match=message):
        program_tests.read([test], {})


def test_keys_of_tests_that_are_not_read_are_said():
    with pytest.warns(RuntimeWarning, match="keys of tests of programs that are not read: points"):
        program_tests.read([{"input": "1", "output": "2", "points": 3, "checker": None}], {})


def test_assert_statements_are_calls_that_are_compared_outside():
    mbpp = ["assert similar((3, 4), (4, 'x')) == (4,)", "assert not similar((1,), (2,))", 'assert similar("a", "a")']
    assert program_tests.read(mbpp, {}) == [
        {"function": "similar", "args": "[(3, 4), (4, 'x')]", "result": [4]},
        {"function": "similar", "args": "[(1,), (2,)]", "result": False, "truth": True},
        {"function": "similar", "args": "['a', 'a']", "result": True, "truth": True}]
    for value, is_true, is_false in (("x", 1, 0), ("[]", 0, 1), ("None", 0, 1), ("'0'", 1, 0)):  # as Python's assert has it
        tests = program_tests.read(["assert f(1)", "assert not f(1)", "assert f(1) == True"], {})
        assert [outcome(f"def f(x):\n    return {value}", test) for test in tests] == [is_true, is_false, 0]
    human_eval = ("METADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3, 'sum'\n"
                  "    assert True\ncheck(f)\n")
    assert program_tests.read(human_eval, {"entry_point": "f"}) == [{"function": "f", "args": "[[1, 2]]", "result": 3}]
    (test,) = program_tests.read(["assert f((1, 2), {3: 'x'}) == (1, 2, 'x')"], {})
    assert outcome("def f(a, b):\n    return a + (b[3],)", test) == 1  # a list plus a tuple would fail
    assert outcome("def f(a, b):\n    return a", test) == 0
    cheat = "class All:\n    def __eq__(self, other):\n        return True\ndef f(*a):\n    return All()"
    assert outcome(cheat, test) == -2


@pytest.mark.slow
def test_slow_programs_do_not_take_the_time_of_those_behind_them():
    """12 endless programs would take two workers 6 seconds, the batch has 4."""
    loop, right = "```python\nwhile True: pass\n```", "```python\nprint(int(input()) * 2)\n```"
    problem = Problem("", "", 0, extra={"tests": [DOUBLE, {"input": "1", "output": "2"}]})
    reward = combine([rewards.make("code", workers=2, deadline=1.0)], on_error="zero", deadline=4.0)
    scores = reward([loop] * 12 + [right] * 4, [""] * 16, [problem] * 16)
    assert scores.total.tolist() == [0] * 12 + [1] * 4


def test_a_slow_test_does_not_take_the_time_of_those_behind_it():
    program = "n = int(input())\nwhile n < 2: pass\nprint(n * 2)"
    problem = Problem("", "", 0, extra={"tests": [{"input": str(n), "output": str(2 * n)} for n in (0, 1, 21, 30)]})
    reward = combine([rewards.make("code", deadline=0.6, partial_credit=0.5)])
    scores = reward([f"```python\n{program}\n```"], [""], [problem])
    assert scores.total.tolist() == [0.25] and scores.failures == {"code/timeout": 1}
