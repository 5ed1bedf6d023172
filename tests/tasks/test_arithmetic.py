"""Generated arithmetic: every answer right, both sides disjoint, the same split on every machine."""

import re
import sys
import types
from collections import Counter

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks.arithmetic import LEVELS, Expression


def by_hand(text):
    """An independent reading of `a op b op c`: split at + and - outside products."""
    total = 0
    for sign, product in re.findall(r"([+-]?)(\d+(?:\*\d+)*)", text):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total


@pytest.mark.slow
@pytest.mark.parametrize("level", [*LEVELS, "mixed"])
def test_every_problem_is_right_and_the_sides_are_disjoint(level):
    task = tasks.make("arithmetic", level=level, size=100 if level != "mixed" else None)
    everything = [*task.train, *task.heldout]
    assert all(by_hand(p.prompt.removesuffix("=")) == int(p.answer) for p in everything)
    prompts = [p.prompt for p in everything]
    assert len(set(prompts)) == len(prompts)
    assert [p.id for p in everything] == list(range(len(everything)))


def test_one_digit_addition_is_all_hundred_problems():
    task = tasks.make("arithmetic", level="digit")
    assert (len(task.train), len(task.heldout)) == (82, 18)
    assert {p.prompt for p in [*task.train, *task.heldout]} == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    # Literal values: the split must never change, or old checkpoints would be evaluated on their training problems.
    assert [p.prompt for p in task.heldout] == [
        "0+0=", "0+2=", "0+3=", "1+3=", "2+0=", "3+0=", "3+1=", "3+5=", "3+8=", "5+3=", "5+8=", "6+8=", "6+9=", "8+3=",
        "8+5=", "8+6=", "8+8=", "9+6="]


def test_levels_keep_to_their_digits():
    problems = [*(task := tasks.make("arithmetic", level="nozero3")).train, *task.heldout]
    assert len(problems) == 64**2 and {len(p.answer) for p in problems} == {3}
    assert {digit for p in problems for digit in p.prompt} == set("1234+=")
    for place in range(3):  # the sum of two digits from 1 to 4: no answer is rarer than 1 in 16
        counts = Counter(p.answer[place] for p in problems)
        assert set(counts) == set("2345678") and min(counts.values()) == len(problems) // 16


def test_mirror_images_fall_on_one_side():
    task = tasks.make("arithmetic", level="add2")
    swapped = {re.sub(r"(\d+)\+(\d+)", r"\2+\1", p.prompt) for p in task.heldout}
    assert swapped == {p.prompt for p in task.heldout}


def test_split_is_the_same_in_every_task_that_has_the_problem():
    heldout = {p.prompt for p in tasks.make("arithmetic", level="digit").heldout}
    mixed = tasks.make("arithmetic", level="mixed")
    assert {p.prompt for p in mixed.heldout if p.level == "digit"} == heldout
    assert not heldout & {p.prompt for p in mixed.train}


def test_chat_wording():
    problem = tasks.make("arithmetic", level="digit", chat=True).train[0]
    assert problem.prompt == ({"role": "user", "content": "What is 0 + 1? Answer with just the number."},)
    assert problem.answer == "1"
    assert tasks.text_of(problem) == "What is 0 + 1? Answer with just the number."


def test_precedence_and_sign():
    assert Expression("chain3", (2, 3, 4), ("-", "*")).value() == -10
    assert Expression("chain3", (2, 3, 4), ("*", "-")).value() == 2
    assert Expression("sub2", (10, 99), ("-",)).value() == -89
    assert Expression("chain3", (2, 3, 4), ("-", "*")).text(" ") == "2 - 3 * 4"


def test_drawn_problems_depend_on_the_seed_only():
    first, again, other = (tasks.make("arithmetic", level="sum4", size=50, seed=s) for s in (1, 1, 2))
    assert [p.prompt for p in first.train] == [p.prompt for p in again.train]
    assert [p.prompt for p in first.train] != [p.prompt for p in other.train]


def test_sources_are_sequences():
    train = tasks.make("arithmetic").train
    assert train[-1] == train[81]
    with pytest.raises(IndexError, match="problem 82 of a source of 82"):
        train[82]


@pytest.mark.parametrize(("options", "message"), [
    ({"level": "add4"}, "Did you mean 'add3'"),
    ({"levle": "digit"}, "Did you mean 'level'"),
    ({"size": 101}, "size=101 problems asked of level 'digit', which has 100"),
    ({"size": 0}, "give 1 to 100"),
    ({"heldout_fraction": 0.0}, "no held-out problems"),
    ({"heldout_fraction": 1.0}, "no training problems"),
])
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        tasks.make("arithmetic", **options)


def test_unknown_task_names_the_nearest_and_all():
    allowed = ("arithmetic, attempts, dataset, edits, grounding, jsonl, long_multiplication, reasoning_gym, segments, styles, "
               "word_problems")
    with pytest.raises(ValueError, match=f"Did you mean 'arithmetic'.*Allowed: {allowed}"):
        tasks.make("arithmetics")


def test_levels_can_be_joined_and_the_smaller_ones_stay_whole():
    task = tasks.make("arithmetic", level="digit+add2", size=500)
    everything = [*task.train, *task.heldout]
    levels = [p.level for p in everything]
    assert (levels.count("digit"), levels.count("add2")) == (100, 500)
    assert {p.prompt for p in task.heldout if p.level == "digit"} == {
        p.prompt for p in tasks.make("arithmetic", level="digit").heldout}
    with pytest.raises(ValueError, match="add22.*add2"):
        tasks.make("arithmetic", level="digit+add22")


def test_a_task_that_a_function_of_yours_returns(monkeypatch):
    module = types.ModuleType("own_tasks")
    one = tasks.Problem("1+1=", "2", 0)
    module.sums = lambda top=3: tasks.Task("sums", [one] * top, [one], "exact")
    module.nothing = lambda: None
    monkeypatch.setitem(sys.modules, "own_tasks", module)
    assert len(tasks.make("own_tasks:sums", top=5).train) == 5
    with pytest.raises(ValueError, match="own_tasks:nothing returned a NoneType; it must return"):
        tasks.make("own_tasks:nothing")


@pytest.mark.parametrize("target, options, message", (
    ("sums_heer:sums", {}, "task 'sums_heer:sums': there is no module 'sums_heer' on the path; .*PYTHONPATH=FOLDER"),
    ("sums_here.deeper:sums", {}, r"there is no module 'sums_here\.deeper' on the path"),
    ("sums_here:sum", {}, "Unknown function of sums_here 'sum'. Did you mean 'sums'"),
    ("sums_here:size", {}, "Unknown function of sums_here 'size'"),
    ("sums_here:sums", {"topp": 5}, r"task 'sums_here:sums' takes \(top=3\): got an unexpected keyword argument 'topp'"),
    ("sums_here:", {}, "task 'sums_here:' names no function; write module:function"),
    ("./sums_here:sums", {}, "write module:function"),
))
def test_functions_that_cannot_be_found_or_called(tmp_path, monkeypatch, target, options, message):
    (tmp_path / "sums_here.py").write_text("size = 3\n\n\ndef sums(top=3):\n    raise KeyError(top)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        tasks.make(target, **options)


def test_errors_inside_a_function_of_yours_stay_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "faulty_tasks.py").write_text("def sums(top=3):\n    return {}[top]\n")
    (tmp_path / "lacking_tasks.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError):
        tasks.make("faulty_tasks:sums")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        tasks.make("lacking_tasks:sums")
