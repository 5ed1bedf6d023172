"""Word problems: answers computed again from the numbers of the text, and held-out templates that training never uses."""
import re

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.rewards.text import last_number
from jaxrl_llm.tasks.word_problems import NAMES, THINGS

ANSWERS = {  # a piece of the template: what its numbers make, in the order of the text
    "buys # more. How": lambda a, b: a + b, "gives # of": lambda a, b: a - b, "boxes with": lambda a, b: a * b,
    "shares #": lambda a, b: a / b, "collected": lambda a, b: a + b, "needs #": lambda a, b: a - b,
    "each car": lambda a, b: a * b, "into bags": lambda a, b: a / b, "then loses": lambda a, b, c: a + b - c,
    "packs with": lambda a, b, c: a * b + c, "notebook": lambda a, b, c: a * c + b, "more than": lambda a, b: 2 * a + b,
    "pages every": lambda a, b, c: c - a * b, "gave away": lambda a, b, c: (a - b) / c,
    "rows of": lambda a, b, c: a * b - c, "an hour": lambda a, b, c: a * b - c}
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "/": lambda a, b: a / b, "times": lambda a, b: a * b}


def question(problem):
    return problem.prompt[-1]["content"]


def skeleton(text):
    """The text without names, things and numbers: the template."""
    return re.sub("|".join((r"\d+", *NAMES, *THINGS)), "#", text)


@pytest.mark.parametrize("level, templates", [("one", 4), ("two", 4), ("both", 8)])
def test_held_out_templates_are_never_trained_on(level, templates):
    task = tasks.make("word_problems", level=level, size=400, heldout=160, shots=2)
    trained, held = ({skeleton(question(problem)) for problem in side} for side in (task.train, task.heldout))
    assert len(trained) == len(held) == templates and not trained & held
    assert len({question(problem) for problem in (*task.train, *task.heldout)}) == 560
    assert {problem.level for problem in task.train} == ({"one", "two"} if level == "both" else {level})


def test_answers_are_those_of_the_numbers_in_the_text():
    task, seen = tasks.make("word_problems"), set()
    for problem in (*task.train, *task.heldout):
        text = re.sub(r"\d+", "#", question(problem))
        (piece,) = [piece for piece in ANSWERS if piece in text]
        seen.add(piece)
        numbers = map(int, re.findall(r"\d+", question(problem)))
        assert ANSWERS[piece](*numbers) == int(problem.answer) > 0, question(problem)
    assert seen == ANSWERS.keys()


def test_explanations_calculate_right_and_end_with_the_answer():
    for problem in tasks.make("word_problems", size=800).train:
        text = problem.extra["solution"]
        assert last_number(text, problem.answer, problem) == 1 and text.endswith(f"The answer is {problem.answer}.")
        steps = re.findall(r"(\d+) (\+|-|/|times) (\d+) (?:=|is) (\d+)", text)
        assert steps and all(SIGNS[sign](int(a), int(b)) == int(c) for a, sign, b, c in steps), text
        for a, b, tens, ones in re.findall(r"tens of (\d+) and (\d+) make (\d+) and the ones make (\d+)", text):
            assert int(tens) == int(a) // 10 * 10 + int(b) // 10 * 10 and int(tens) + int(ones) == int(a) + int(b)


def test_worked_examples_are_the_same_in_front_of_all_and_never_asked():
    task = tasks.make("word_problems", shots=2, size=300, heldout=20)
    fronts = {tuple(turn["content"] for turn in problem.prompt[:-1]) for problem in (*task.train, *task.heldout)}
    assert len(fronts) == 1 and [turn["role"] for turn in task.train[0].prompt] == ["user", "assistant"] * 2 + ["user"]
    (front,) = fronts
    assert not {front[0], front[2]} & {question(problem) for problem in task.train}


def test_the_same_seed_makes_the_same_problems_and_too_many_are_refused():
    first, again, other = (tasks.make("word_problems", size=50, heldout=20, seed=seed) for seed in (0, 0, 1))
    assert [*first.train] == [*again.train] != [*other.train] and first.heldout[0].id == 50
    small = tasks.make("word_problems", most=9, size=200).train
    numbers = {int(n) for problem in small for n in re.findall(r"\d+", question(problem))}
    assert numbers == {*range(2, 10)}
    with pytest.raises(ValueError, match="most=3.: give at least 4"):
        tasks.make("word_problems", most=3)
    with pytest.raises(ValueError, match="ask for fewer"):
        tasks.make("word_problems", level="one", size=3000)
    with pytest.raises(ValueError, match="Did you mean 'both'"):
        tasks.make("word_problems", level="bot")
