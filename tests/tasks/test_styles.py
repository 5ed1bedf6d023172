"""Two styles of demonstration in known shares, both right."""
import re

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.rewards.text import last_number


def test_the_share_is_kept_and_both_styles_are_right():
    task = tasks.make("styles", worked=0.3)
    shown = [problem.extra.get("solution", problem.answer) for problem in task.train]
    worked = np.array([bool(re.fullmatch(r"\d( \d)* \d+", text)) for text in shown])
    assert worked.mean() == pytest.approx(0.3, abs=0.01)
    assert all(text == ("{} {} {} {}".format(*p.answer, p.answer) if w else p.answer)
               for p, text, w in zip(task.train, shown, worked))
    assert all(last_number(text, p.answer, p) == 1 for p, text in zip(task.train[:200], shown))
    assert task.reward == "last_number" and tasks.make("styles", worked=0.3).heldout == task.heldout


@pytest.mark.parametrize("share, expected", [(0, 0), (1, 1)])
def test_one_style_alone(share, expected):
    task = tasks.make("styles", level="digit", worked=share)
    assert np.mean(["solution" in problem.extra for problem in task.train]) == expected


def test_a_share_beyond_one_is_refused():
    with pytest.raises(ValueError, match="worked=1.5"):
        tasks.make("styles", worked=1.5)
