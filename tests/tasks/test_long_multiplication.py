"""Written products: literal steps, every one of them right, and sides that share no product."""
import re

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.rewards.text import last_number
from jaxrl_llm.tasks.long_multiplication import steps


def test_the_steps_are_these():
    assert steps(347, 6) == "7*6+0=42;4*6+4=28;3*6+2=20;2082"
    assert steps(21, 3) == "1*3+0=3;2*3+0=6;63" and steps(9, 9) == "9*9+0=81;81"


def test_every_step_is_right_and_makes_the_digit_of_the_answer():
    task = tasks.make("long_multiplication", size=500)
    assert len(task.train) + len(task.heldout) == 500 and 70 < len(task.heldout) < 130
    for problem in (*task.train, *task.heldout):
        solution, (left, right) = problem.extra["solution"], re.findall(r"\d+", problem.prompt)
        lines = re.findall(r"(\d)\*(\d)\+(\d)=(\d+);", solution)
        assert [line[0] for line in lines] == [*reversed(left)] and {line[1] for line in lines} == {right}
        assert all(int(a) * int(b) + int(c) == int(d) for a, b, c, d in lines)
        assert [line[2] for line in lines] == ["0", *(f"{int(line[3]):02}"[0] for line in lines[:-1])]
        assert "".join(line[3][-1] for line in lines) == problem.answer[::-1][:len(left)]
        assert int(problem.answer) == int(left) * int(right) and last_number(solution, problem.answer, problem) == 1


def test_sides_are_disjoint_and_the_whole_space_by_default():
    task = tasks.make("long_multiplication", digits=2, most=4)
    prompts = [problem.prompt for problem in (*task.train, *task.heldout)]
    assert len(prompts) == len(set(prompts)) == 4 * 4 * 3 and set("".join(prompts)) == set("1234*=")
    same, other = (tasks.make("long_multiplication", size=20, seed=seed).train[0].prompt for seed in (0, 1))
    assert tasks.make("long_multiplication", size=20).train[0].prompt == same != other


def test_numbers_out_of_range_are_refused():
    for options, said in (({"digits": 9}, "give 1 to 8"), ({"most": 1}, "give 2 to 9"),
                          ({"digits": 1, "size": 73}, "give 1 to 72")):
        with pytest.raises(ValueError, match=said):
            tasks.make("long_multiplication", **options)
