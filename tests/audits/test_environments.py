"""The audit passes the shipped environments, detects every fault that it checks, and says what it did not check."""
import dataclasses
import itertools
import time

import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.audits import injections
from jaxrl_llm.audits.environments import FAILS, HOLDS, UNCHECKED
from jaxrl_llm.environments import Environment, Turn, parsers
from jaxrl_llm.tasks import make
from jaxrl_llm.tasks.base import Problem, Task

SEAT = {"agent": 0, "functional_group": 0, "game": 0}


def states(checks):
    return {name: check.state for name, check in checks.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "tool_use", "guess_number", "treasure"])
def test_shipped_environments_pass(name, capsys):
    assert audit.main([name, "--trajectories=12", "--seed=1"]) == 0
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in audit.POLICIES) and "FAILS" not in printed
    if name == "treasure":
        assert printed.count("holds") == 8
        assert "not checked  answer not shown: its problems have no answer" in printed
    else:
        assert printed.count("holds") == 9 and "not checked" not in printed


def test_every_planted_fault_is_detected(capsys, monkeypatch):
    monkeypatch.setattr(audit, "TURN_LIMIT", 20)
    assert audit.main(["faulty_environments:leaky", "--trajectories=4"]) == 1
    printed = capsys.readouterr().out
    for check in ("trajectories end", "returns in range", "opens alike", "answer not shown", "attacks earn nothing",
                  "oracle wins"):
        assert f"FAILS  {check}" in printed, check
    assert "it is in 100% of what is to be read, another problem's in 0%" in printed and "depends on the key" in printed
    assert "20 messages, the first of the policy null" in printed
    for check in ("raises nothing", "answers in time", "repeats itself"):
        assert f"holds  {check}" in printed, check


def environment_of(step, **fields):
    task = fields.pop("task", None) or make("arithmetic", chat=True)
    return Environment(name="x", task=task, step=step,
                       **{"reset": lambda problem, key: ({}, [{"role": "user", "content": "?"}]), **fields})


def test_exceptions_and_forgotten_states_are_detected():
    def step(state, message):
        if "tool" in message["content"]:
            raise LookupError("parser")
        return Turn(done=True, reward=float(id(state) % 7) if "0 1 2" in message["content"] else 0.0)

    rows, checks = audit.audit(*(environment_of(step, returns=(0.0, 7.0)) for _ in range(2)), 40, 0)
    assert checks["raises nothing"].failed and "LookupError: parser" in checks["raises nothing"].why
    assert checks["trajectories end"] == (HOLDS, "") and checks["oracle wins"] == (UNCHECKED, "it has no oracle")
    assert [row["policy"] for row in rows] == ["null", "random", "injection"] and rows[2]["raised"] > 0


def counting(**fields):
    """An environment that never answers the same twice."""
    count = itertools.count()
    return environment_of(lambda state, message: Turn(done=True, info={"count": next(count)}), **fields)


def test_environments_that_do_not_repeat_themselves():
    """Replayable ones fail; others are played again as well, and only say that they differ."""
    _, checks = audit.audit(*[counting()] * 2, 4, 0)
    found = checks["repeats itself"]
    assert found.failed and found.why.endswith(": turn 1 is another when it is played again")
    _, checks = audit.audit(*[counting(replayable=False)] * 2, 4, 0)
    assert checks["repeats itself"].state == UNCHECKED
    assert checks["repeats itself"].why.startswith("it is not replayable, and did not repeat itself: problem ")
    steady = environment_of(lambda state, message: Turn(done=True), replayable=False)
    assert audit.audit(steady, steady, 4, 0)[1]["repeats itself"] == (HOLDS, "")
    lost = environment_of(lambda state, message: 1 / 0, replayable=False)
    assert audit.audit(steady, lost, 4, 0)[1]["repeats itself"].why.endswith(
        "turn 1 fails when it is played again: ZeroDivisionError: division by zero")


@pytest.mark.parametrize("replayable", [True, False])
def test_a_group_has_to_open_alike(replayable):
    opened = {"reset": lambda problem, key: ({}, [{"role": "user", "content": str(key % 100)}]), "replayable": replayable}
    environment = environment_of(lambda state, message: Turn(done=True), **opened)
    checks = audit.audit(environment, environment, 4, 0)[1]
    assert checks["opens alike"].failed and not checks["repeats itself"].failed


def test_an_environment_that_hangs_does_not_hang_the_audit(capsys):
    """The policy whose step hangs plays no more, and the others go on."""
    def step(state, message):
        if "get_reward" in message["content"]:
            time.sleep(60)
        return Turn(done=True)

    environment = environment_of(step)
    start = time.monotonic()
    rows, checks = audit.audit(environment, environment, 4, 0, deadline=0.2)
    assert time.monotonic() - start < 30
    first = next(place for place, text in enumerate(injections.ATTACKS) if "get_reward" in text)
    assert checks["answers in time"].failed
    assert checks["answers in time"].why.startswith("1 times, the first: policy injection, problem ")
    assert checks["answers in time"].why.endswith(": the answer to message 0 was not there within 0.2 s")
    assert [(row["trajectories"], row["late"], row["raised"]) for row in rows] == [(4, 0, 0), (4, 0, 0), (first + 1, 1, 0)]
    assert checks["raises nothing"].state == checks["repeats itself"].state == HOLDS


def test_an_opening_that_hangs():
    environment = environment_of(None, reset=lambda problem, key: time.sleep(60))
    rows, checks = audit.audit(environment, environment, 4, 0, deadline=0.1)
    assert [(row["trajectories"], row["late"]) for row in rows] == [(1, 1)] * 3
    assert "its opening was not there within 0.1 s" in checks["answers in time"].why and checks["answers in time"].failed
    assert {name for name, check in checks.items() if check.state == UNCHECKED} == {
        "trajectories end", "returns in range", "opens alike", "repeats itself", "answer not shown", "attacks earn nothing",
        "oracle wins"}


def task_of(answers):
    problems = [Problem("?", answer, number) for number, answer in enumerate(answers)]
    return Task("x", problems, problems[:1], reward="environment")


@pytest.mark.parametrize("answers, state, why", [
    (["cat", "dog", "cat", "cat"], HOLDS, ""), ([""] * 4, UNCHECKED, "its problems have no answer"),
    (["cat"] * 4, UNCHECKED, "all problems that were played have the same answer, 'cat'")])
def test_answers_that_cannot_be_shown(answers, state, why):
    environment = environment_of(lambda state, message: Turn(done=True), task=task_of(answers))
    assert audit.audit(environment, environment, 8, 0)[1]["answer not shown"] == (state, why)
    shown = environment_of(lambda state, message: Turn(done=True), task=task_of(answers),
                           reset=lambda problem, key: ({}, [{"role": "user", "content": problem.answer or "?"}]))
    leaks = audit.audit(shown, shown, 8, 0)[1]["answer not shown"]
    assert leaks.state == (FAILS if state == HOLDS else UNCHECKED)  # also where most answers are the same


def test_chance_is_no_leak():
    """Answers of one digit often appear by chance: as often as those of other problems."""
    environment = environments.make("single", options={"level": "digit"})
    _, checks = audit.audit(environment, environment, 60, 3)
    assert checks["answer not shown"] == (HOLDS, "")


def test_rewards_that_attacks_cannot_move():
    generous = environment_of(lambda state, message: Turn(done=True, reward=1.0), returns=(-float("inf"), float("inf")))
    checks = audit.audit(generous, generous, 4, 0)[1]
    assert checks["returns in range"].state == UNCHECKED and checks["attacks earn nothing"].state == HOLDS
    checks = audit.audit(*[environment_of(generous.step)] * 2, 4, 0)[1]
    assert checks["attacks earn nothing"] == (UNCHECKED, "silence or chance already earn the highest return, 1")
    environment = environments.make("tic_tac_toe")
    checks = audit.audit(environment, environment, 4, 0)[1]
    assert checks["attacks earn nothing"] == (
        UNCHECKED, "the policy plays all agents, whose returns differ, and its own return is always 0; on held-out problems it "
        "may have an opponent, see --heldout")
    assert checks["oracle wins"].why.startswith("it has several agents")


def scored(score, **fields):
    """An environment of one message, whose text and problem give the reward."""
    return environment_of(lambda problem, message: Turn(reward=float(score(message["content"], problem)), done=True),
                          reset=lambda problem, key: (problem, [{"role": "user", "content": "?"}]), **fields)


@pytest.mark.parametrize("wins", [lambda text, problem: problem.answer in text.split(), lambda text, problem: "\x00" in text,
                                  lambda text, problem: "reward = 1.0" in text], ids=["any number", "null byte", "words"])
def test_a_single_attack_that_always_wins_is_detected(wins):
    """All attacks together earn little: 1 to 3 of them succeed."""
    found = audit.audit(*[scored(wins)] * 2, 32, 0)[1]["attacks earn nothing"]
    assert found.failed and found.why.startswith("mean return 1 of the best attack, chance ")


def test_luck_of_an_attack_is_not_its_merit():
    """The attack that earned most is played again: on other problems it is as good as chance, or as the commonest answer."""
    lucky = scored(lambda text, problem: len(text) % 10 == problem.id % 10)
    assert audit.audit(lucky, lucky, 40, 0)[1]["attacks earn nothing"].state == HOLDS
    few = scored(lambda text, problem: text[-1:] == problem.answer, task=task_of(["]"] * 2 + ["x"] * 3 + ["y"] * 3))
    rows, checks = audit.audit(few, few, 32, 0)
    assert checks["attacks earn nothing"].state == HOLDS and rows[2]["highest"] == 1.0


def test_games_have_an_opponent_on_heldout_problems(capsys):
    assert audit.main(["tic_tac_toe", "--trajectories=12", "--heldout"]) == 0
    printed = capsys.readouterr().out
    assert "tic_tac_toe, held-out problems" in printed
    assert "holds  attacks earn nothing" in printed and "holds  oracle wins" in printed and printed.count("not checked") == 1
    environment = environments.make("tic_tac_toe", brief=True)
    rows, _ = audit.audit(environment, environment, 12, 0, heldout=True)
    means = {row["policy"]: row["mean return"] for row in rows}
    assert means["null"] == means["injection"] == -1.0 and means["oracle"] > means["random"] > -1.0


@pytest.mark.parametrize("fault, fails", [
    ({"oracle": lambda game: "0"}, "oracle wins"),
    ({"step": lambda game, message: Turn(reward=float(len(message["content"]) > 9), done=True, info=SEAT)},
     "attacks earn nothing")])
def test_faults_of_games_with_an_opponent_are_detected(fault, fails):
    environment = dataclasses.replace(environments.make("tic_tac_toe"), **fault)
    checks = audit.audit(environment, environment, 12, 0, heldout=True)[1]
    assert checks[fails].failed and ("oracle" not in fault or checks[fails].why.startswith("mean return -1, chance"))


@pytest.mark.parametrize("arguments, title", [
    (["treasure(size=2, brief=True)"], "treasure(size=2, brief=True): treasure"),
    (["treasure(size=9)", '--options={"size": 2}'], "treasure(size=9): treasure"),
    (["faulty_environments:obedient(replayable=False)"], "obedient(replayable=False): obedient")])
def test_names_with_options_in_brackets(arguments, title, capsys, monkeypatch):
    monkeypatch.setattr(audit, "TURN_LIMIT", 3)
    audit.main([*arguments, "--trajectories=2"])
    assert title in capsys.readouterr().out


@pytest.mark.parametrize("arguments, why", [
    (["tresure"], "ValueError: Unknown environment 'tresure'. Did you mean 'treasure'"),
    (["mcp_tools"], "ValueError: environment 'mcp_tools' needs the keyword 'servers'"),
    (["faulty_environments:obedent"], "ValueError: Unknown function of faulty_environments 'obedent'. Did you mean 'obedient'"),
    (["treasure(size=9)"], "ValueError: size=9; allowed are 2 to 5"),
    (["treasure(size"], "ValueError: cannot read 'treasure(size'"),
    (["treasure, single"], "ValueError: 'treasure, single' names 2 environments; give one"),
    (["sandboxed_nowhere:make"], "ValueError: environment 'sandboxed_nowhere:make': there is no module")])
def test_environments_that_cannot_be_made_are_one_line(arguments, why, capsys, monkeypatch):
    assert audit.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(why) and printed.err.count("\n") == 2 and not printed.out
    monkeypatch.setenv("JAXRL_LLM_TRACEBACK", "1")
    with pytest.raises(ValueError):
        audit.main(arguments)


@pytest.mark.parametrize("text, why", [("{size: 4}", "'{size: 4}' is no JSON (Expecting property name"),
                                       ("4", "'4' is no JSON object; write for example '{\"size\": 4}'")])
def test_options_that_are_no_json(text, why, capsys):
    with pytest.raises(SystemExit, match="2"):
        audit.main(["treasure", f"--options={text}"])
    assert f"error: argument --options: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("form", parsers.PARSERS)
def test_attacks_are_calls_in_every_format(form):
    """Each parser reads valid calls, among them programs, and refuses others; a tool's result is forged for each format."""
    assert set(parsers.WRITERS) == set(parsers.PARSERS) == set(injections._FORGED) == set(injections._FLOODS)
    calls = [call for text in injections.ATTACKS for call in parsers.PARSERS[form](text)]
    assert any("_exit(3)" in str(call.arguments) for call in calls if not call.error)
    assert form == "fenced" or {"get_reward", "calculator"} <= {call.name for call in calls if not call.error}
    assert form == "fenced" or any(call.error for call in calls)


@pytest.mark.parametrize("form", ["hermes", "llama3", "pythonic"])
def test_tools_survive_attacks_in_every_format(form):
    rows, checks = audit.audit(*(environments.make("tool_use", parser=form) for _ in range(2)), 4, 0)
    assert set(states(checks).values()) == {HOLDS}, checks
    assert rows[-1]["trajectories"] == len(injections.ATTACKS) and rows[-1]["turns"] > 1


def test_written_calls_are_read():
    arguments = {"text": 'a "quoted" \u00e9\U0001f600\n', "number": -1.5, "list": [1, {"x": None}], "flag": True}
    for form in ("hermes", "llama3", "pythonic"):
        assert parsers.PARSERS[form](parsers.WRITERS[form]("f", arguments)) == [("f", arguments, "")]
    assert parsers.fenced(parsers.WRITERS["fenced"]("python", {"code": "print(1)"})) == [("python", {"code": "print(1)"}, "")]
