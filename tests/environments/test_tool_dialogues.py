"""Dialogues with tools: facts of turns, void turns, ends, tools and parsers of your own by name."""
import contextlib

import pytest
from spoken import call, linux, say

from jaxrl_llm import environments, tasks
from jaxrl_llm.environments import base, call_kinds, endings, parsers, python_tool, tools
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.environments.tool_use import FACTS, of_tools
from jaxrl_llm.environments.tools import Call


def test_a_dialogue_with_tools():
    environment = environments.make("tool_use", task="arithmetic", options={"chat": True, "level": "mul2"}, turns=3)
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator"]
    problem = environment.task.train[5]
    state, opening = base.begin(environment, problem, 0)
    assert [message["role"] for message in opening.messages] == ["user"]
    expression = opening.messages[0]["content"].removeprefix("What is ").split("?")[0]
    turn = base.advance(environment, state, say(call("calculator", expression=expression) + call("no")))
    assert turn.messages[0] == {"role": "tool", "name": "calculator", "content": problem.answer}
    assert turn.messages[1]["content"].startswith("error: Unknown tool 'no'") and not turn.done and turn.reward == 0.0
    last = base.advance(environment, state, say(f"It is {turn.messages[0]['content']}"))
    assert (last.reward, last.done, last.info) == (1.0, True, {
        "action": f"answer {problem.answer}", "tool_calls": 0, "tool_errors": 0, "answer_blocks": 1, "malformed": False,
        "void": False, "tool_failed": 0, "tool_unknown": 0, "error_words": 0})
    state, _ = base.begin(environment, problem, 0)
    for count in range(3):
        turn = base.advance(environment, state, say(call("calculator", expression=expression)))
        assert turn.done == (count == 2) and turn.reward == 0.0
    assert turn.info["out_of_turns"] and not turn.messages


@pytest.mark.parametrize(("text", "facts"), (
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>', (1, 0, 0, False, False, 0, 0, 0)),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>', (1, 1, 0, False, False, 1, 0, 1)),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": 1}}</tool_call>', (1, 1, 0, False, False, 1, 0, 1)),
    ('<tool_call>{"name": "calculator", ', (1, 1, 0, True, True, 0, 0, 1)),  # never closed
    (r"\boxed{7} or \boxed{8}", (0, 0, 2, False, False, 0, 0, 0)), ("The answer is 7", (0, 0, 0, False, True, 0, 0, 0)),
    ('<tool_call>{"name": "abacus"}</tool_call>', (1, 1, 0, False, False, 0, 1, 1)),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>' * 6, (6, 2, 0, False, False, 2, 0, 2)),
    ("", (0, 0, 0, False, True, 0, 0, 0)),
))
def test_facts_of_a_turn(text, facts):
    environment = environments.make("tool_use", reward="boxed")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    info = base.advance(environment, state, say(text)).info
    assert tuple(info[name] for name in environment.facts) == facts and info.keys() == {*environment.facts, "action"}


@pytest.mark.parametrize("turn, void", [
    ("```python\nprint(1)\n```", False), (r"so it is \boxed{7}", False), ("the answer is 7", True),
    ("```python\nprint(1)", True), (r"\boxed{7", True), ("```\nprint(1)\n```", True), ("", True),
    ("first\n```python\nx = 1\n```\nthen more", False), ("<answer>7</answer>", False), ("<answer>7", True)])
def test_void_turns(turn, void):
    assert endings.is_void(turn, parsers.fenced(turn)) == void
    assert not endings.is_void(call("calculator", expression="1"), parsers.hermes(call("calculator", expression="1")))


@pytest.mark.parametrize(("text", "reward"), [
    ('<tool_call>{"name": "calculator", ', 0.0), ('<tool_call>{"name": "calculator"</tool_call>{answer}', 0.0),
    ("{answer}", 1.0)])
def test_a_void_turn_ends_the_dialogue(text, reward):
    """Malformed calls alone earn nothing; the verifier reads an answer without a box, and the turn is void all the same."""
    for ends in (True, False):
        environment = environments.make("tool_use", void_ends=ends)
        problem = environment.task.train[5]
        state, _ = base.begin(environment, problem, 0)
        turn = base.advance(environment, state, say(text.replace("{answer}", problem.answer)))
        answers = not text.startswith("<")
        assert (turn.done, turn.info["void"]) == ((True, True) if ends else (answers, not answers))
        assert turn.reward == reward
    environment = environments.make("tool_use", void_ends=True)
    state, _ = base.begin(environment, problem, 0)
    assert not base.advance(environment, state, say(rf"\boxed{{{problem.answer}}}")).info["void"]


def test_the_policy_reads_that_its_last_turn_comes():
    environment = environments.make("tool_use", turns=3, asks=True)
    state, _ = base.begin(environment, environment.task.train[5], 0)
    first, second, third = [base.advance(environment, state, say(call("calculator", expression="1+1"))) for _ in range(3)]
    assert first.messages[-1]["content"] == "2" and second.messages[-1]["content"] == f"2\n{endings.LAST}"
    assert third.done and third.info["out_of_turns"]


def test_answers_are_checked_before_the_end():
    environment = environments.make("tool_use", turns=4, checks=2)
    problem = environment.task.train[5]
    state, _ = base.begin(environment, problem, 0)
    said = ("0", call("calculator", expression="1+1"), "1", problem.answer)
    told = [base.advance(environment, state, say(text)) for text in said]
    assert [turn.done for turn in told] == [False, False, False, True] and [turn.reward for turn in told] == [0, 0, 0, 1]
    assert told[0].messages == told[2].messages == [{"role": "user", "content": endings.CHECK}]
    state, _ = base.begin(environment, problem, 0)
    for _ in range(3):
        base.advance(environment, state, say(call("calculator", expression="1+1")))
    last = base.advance(environment, state, say(problem.answer))
    assert last.done and last.reward == 1, "an answer at the last turn counts"
    with pytest.raises(ValueError, match="checks=8 of answers in a dialogue of turns=8; give 0 to 7"):
        environments.make("tool_use", checks=8)


def test_searches_and_queries_are_counted():
    """The same search with other spaces is repeated, in a later message too; calls of other tools count as nothing."""
    environment = environments.make("tool_use", tools={"own_tools:weather": {}, "calculator": {}},
                                    kinds={"weather": "search", "calculator": "query"})
    assert environment.facts == FACTS | dict.fromkeys(call_kinds.COUNTS, "count")
    state, _ = base.begin(environment, environment.task.train[5], 0)
    bonn, rome = call("weather", city="Bonn"), call("weather", city="Rome")
    said = (bonn + call("weather", city=" Bonn") + rome, bonn + call("calculator", expression="1+1"),
            call("dice") + "<tool_call>", "7")
    seen = [base.advance(environment, state, say(text)).info for text in said]
    assert [tuple(info[name] for name in call_kinds.COUNTS) for info in seen] == [
        (2, 1, 0, 0), (0, 1, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0)]
    with pytest.raises(ValueError, match="tool in kinds 'calculater'. Did you mean 'calculator'"):
        environments.make("tool_use", kinds={"calculater": "query"})
    with pytest.raises(ValueError, match="kind of the tool 'calculator' 'serch'. Did you mean 'search'"):
        environments.make("tool_use", kinds={"calculator": "serch"})


@linux
def test_a_program_prints_the_answer():
    environment = environments.make("tool_use", tools=["python"], parser="fenced", printed=True, turns=1, reward="boxed")
    problem = environment.task.train[5]
    for code, reward in ((rf"print('\boxed{{{problem.answer}}}')", 1.0), (r"print('\boxed{no}')", 0.0), ("print(1)", 0.0)):
        state, _ = base.begin(environment, problem, 0)
        turn = base.advance(environment, state, say(f"```python\n{code}\n```"))
        assert turn.done and turn.reward == reward and turn.info.get("out_of_turns", False) == (code == "print(1)")
        assert turn.info["tool_calls"] == 1 and turn.info["tool_errors"] == 0


@linux
def test_outputs_of_programs_are_cut():
    tool = python_tool.python(deadline=20.0, brief=20)
    long = tools.run([tool], Call("python", {"code": "print('a' * 30 + 'b' * 30)"})).text
    assert long == f"{'a' * 10}\n[40 characters left out]\n{'b' * 10}"
    failed = tools.run([tool], Call("python", {"code": "print(1)\nraise ValueError('x')"}))
    assert failed.failed and failed.text == "1\nValueError: x"
    with pytest.raises(ValueError, match="brief=-1"):
        python_tool.python(brief=-1)


@linux
def test_a_dialogue_with_programs_in_fences():
    environment = environments.make("tool_use", tools=["python"], parser="fenced")
    problem = environment.task.train[5]
    state, opening = base.begin(environment, problem, 0)
    assert opening.messages[0]["role"] == "system" and "```python" in opening.messages[0]["content"] and not environment.tools
    turn = base.advance(environment, state, say(f"```python\nprint({problem.answer} + 0)\n```"))
    assert turn.messages == [{"role": "user", "name": "python", "content": problem.answer}]
    assert base.advance(environment, state, say(problem.answer)).reward == 1.0


def test_messages_before_the_problem_and_calls_in_python():
    preface = [{"role": "system", "content": "Call."}, {"role": "user", "content": "1 + 1?"},
               {"role": "assistant", "content": '[calculator(expression="1 + 1")]'}, {"role": "tool", "content": "2"}]
    environment = environments.make("tool_use", parser="pythonic", preface=preface)
    problem = environment.task.train[3]
    state, opening = base.begin(environment, problem, 0)
    assert opening.messages[:4] == preface and opening.messages[4:] == list(problem.prompt)
    call = environment.oracle(state)
    assert call.startswith('[calculator(expression="') and call.endswith('")]')
    turn = base.advance(environment, state, say(call))
    assert turn.messages == [{"role": "tool", "name": "calculator", "content": problem.answer}]
    assert base.advance(environment, state, say(environment.oracle(state))).reward == 1.0


def test_names_of_tools_and_parsers():
    with pytest.raises(ValueError, match="Unknown tool 'calculater'. Did you mean 'calculator'"):
        environments.make("tool_use", tools=["calculater"])
    with pytest.raises(ValueError, match="Unknown parser of calls 'hermess'. Did you mean 'hermes'"):
        environments.make("tool_use", parser="hermess")
    with pytest.raises(ValueError, match="the parser 'fenced' calls the tool 'python' alone"):
        environments.make("tool_use", parser="fenced")
    with pytest.raises(ValueError, match="keyword of tool 'python' 'dedline'. Did you mean 'deadline'"):
        environments.make("tool_use", tools={"python": {"dedline": 1.0}})


@pytest.mark.parametrize("kind", ["tool_use", "memory_use"])
def test_tools_of_your_own_by_name(kind):
    environment = environments.make(kind, tools={"own_tools:weather": {}, "own_tools:dice": {"sides": 20}, "calculator": {}})
    assert environment.name == "arithmetic/digit+weather+dice+calculator" + "+memory" * (kind == "memory_use")
    assert [tool["function"]["name"] for tool in environment.tools] == ["weather", "dice", "calculator"]
    state, _ = base.begin(environment, environment.task.train[0], 0)
    said = base.advance(environment, state, say(call("weather", city="Bonn") + call("dice") + call("weather", city="Atlantis")
                                                + call("weather", city=1))).messages
    answers = ['{"Bonn": 1}', "20", "error: no such city", "error: argument 'city' of weather is 1; allowed is string"]
    assert [message["content"].partition("\n")[0] for message in said] == answers


@pytest.mark.parametrize("kind", ["tool_use", "memory_use"])
def test_a_parser_of_your_own_by_name(kind):
    environment = environments.make(kind, tools=["calculator", "own_tools:weather"], parser="own_tools:called")
    problem = environment.task.train[0]
    state, _ = base.begin(environment, problem, 0)
    turn = base.advance(environment, state, say("!weather Bonn and " + call("weather", city="Rome")))
    assert [message["content"].partition("\n")[0] for message in turn.messages] == ['{"Bonn": 1}']
    state, _ = base.begin(environment, problem, 0)
    assert environment.oracle(state) == problem.answer, "no call: nothing writes one for this parser"
    assert base.advance(environment, state, say(problem.answer)).reward == 1.0


def test_processes_import_tools_of_your_own():
    options = {"tools": ["own_tools:weather"], "parser": "own_tools:called"}
    with contextlib.closing(Runner("tool_use", options, seed=0, kind="processes", workers=1, deadline=60.0)) as runner:
        runner.reset({0: runner.environment.task.train[0]})
        assert runner.step({0: say("!weather Bonn")})[0].messages[0]["content"] == '{"Bonn": 1}'


@pytest.mark.parametrize("options, why", [
    ({"tools": ["own_tools:wether"]}, "Unknown function of own_tools 'wether'. Did you mean 'weather'"),
    ({"tools": ["own_tool:weather"]}, "tool 'own_tool:weather': there is no module 'own_tool' on the path"),
    ({"tools": ["own_tools:"]}, "names no function; write module:function"),
    ({"tools": ["own_tools:Weather"]}, "is no function, or an asynchronous one; the environment `methods_of` takes a class"),
    ({"tools": ["own_tools:slow"]}, "is no function, or an asynchronous one"),
    ({"tools": ["own_tools:lying"]}, "returned a str; it must return a jaxrl_llm.environments.tools.Tool"),
    ({"tools": {"own_tools:dice": {"side": 3}}}, "tool 'own_tools:dice' takes .*sides: int = 6.*unexpected keyword"),
    ({"tools": {"own_tools:weather": {"days": 3}}}, r"is called by the policy and takes no options, got \['days'\]"),
    ({"tools": ["own_tools:weather", "own_tools:other_weather"]}, "have the names .*'weather', 'weather'"),
    ({"tools": ["own_tools:weather"], "parser": "fenced"}, r"calls the tool 'python' alone, got the tools \['weather'\]"),
    ({"parser": "own_tools:caled"}, "Unknown function of own_tools 'caled'. Did you mean 'called'"),
])
def test_wrong_names_of_your_own(options, why):
    with pytest.raises(ValueError, match=why):
        environments.make("tool_use", **options)


def programs() -> environments.Environment:
    """A tool whose text has nothing to do with whether it fails."""
    tool = tools.Tool("run", "", {"type": "object", "properties": {"fails": {"type": "boolean"}}},
                      lambda fails: tools.Result("broken" if fails else "0 errors", fails))
    return of_tools(tasks.make("arithmetic", chat=True), [tool], name="programs", parser="hermes", reward=None, turns=8)


def test_facts_follow_the_tool_and_not_its_words():
    environment = programs()
    state, _ = base.begin(environment, environment.task.train[0], 0)
    for fails in (False, True):
        info = base.advance(environment, state, say(call("run", fails=fails))).info
        assert (info["tool_errors"], info["tool_failed"], info["error_words"]) == (fails, fails, not fails)


def test_a_good_call_is_not_corrected_whatever_its_result_says():
    environment = environments.make("purified", environment="test_tool_dialogues:programs")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    turns = [base.advance(environment, state, say(call("run", fails=fails))) for fails in (False, True, False)]
    assert [turn.messages[0]["content"] for turn in turns] == ["0 errors", "broken", "0 errors"]
    assert [bool(turn.rewritten) for turn in turns] == [False, False, True], "the second call is corrected, not the first"
