"""Demonstrations of very unequal lengths that end with the right number."""
import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.rewards.text import last_number


def test_demonstrations_end_right_and_lengths_have_a_heavy_tail():
    task = tasks.make("attempts", most=12, tail=1.5)
    shown = [problem.extra["solution"].split() for problem in task.train]
    for problem, numbers in zip(task.train, shown):
        assert numbers[-1] == problem.answer and problem.answer not in numbers[:-1]
        assert all(sum(a != b for a, b in zip(wrong, problem.answer, strict=True)) == 1 for wrong in numbers[:-1])
    counts = np.array(list(map(len, shown)))
    expected = np.arange(1, 13.0) ** -1.5 / (np.arange(1, 13.0) ** -1.5).sum()
    np.testing.assert_allclose(np.bincount(counts, minlength=13)[1:] / len(counts), expected, atol=0.015)
    assert max(len(problem.extra["solution"]) for problem in task.train) <= 47  # and the end fit in 48 tokens


def test_they_are_the_same_again_and_the_last_number_is_scored():
    first, again = (tasks.make("attempts", level="digit") for _ in range(2))
    assert first.train == again.train and first.heldout == again.heldout
    problem = first.train[0]
    assert last_number(problem.extra["solution"], problem.answer, problem) == 1


def test_no_attempt_is_refused():
    with pytest.raises(ValueError, match="at least 1 number"):
        tasks.make("attempts", most=0)
