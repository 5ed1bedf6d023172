r"""A seeded fuzz of the rewards of mathematics and text: any text is judged, and twice the text takes at most twice the steps.

`JAXRL_LLM_FUZZ=100 python -m pytest tests/hostile/test_fuzz_rewards.py` tries a hundred times as many texts, see `fuzz.py`.
"""

import random
import sys

import pytest
from fuzz import SEED, TIMES

from jaxrl_llm import rewards
from jaxrl_llm.rewards.evaluated import number_verdict, other_words, work_left
from jaxrl_llm.rewards.math import boxed_answer, last_boxed, quick_verdict
from jaxrl_llm.rewards.rational import last_number, parse_rational
from jaxrl_llm.rewards.spelling import compact, normalise
from jaxrl_llm.rewards.text import through_stop_string
from jaxrl_llm.rewards.token_f1 import words

PARTS = (
    "1", "0", "23", "1 000", "1,000", "1'000", ".", ",", " ", "\n", "\u00a0", "\u202f", "-", "\u2212", "\u2013", "+", "/",
    "\u2044", "\u00bd", "\u00b2", "\u00d710\u207b", "*10^", "e5", "%", "$", r"\$", "=", "x", "i", "K", "(", ")", "[", "]",
    "{", "}", "_", "^", "|", "!", "<", ";", "\u221a", "\u03c0", "\u2205", "\u00b0", "\\", r"\boxed", r"\boxed{", r"\boxed {",
    r"\frac", r"\frac{1}{", r"\dfrac12", r"\sqrt{", r"\text{", r"\mathrm{cm}", r"\left(", r"\right)", r"\,", r"\!", r"\ ",
    r"{,}", r"\pmod", r"\textcolor{red}{", r"\color{", r"\overline{3}", r"\approx ", r"\cdot ", " or ", " thousands",
    " negative ", r"\pi", "#### ", "<answer>", "</answer>", "\ud800", "\0", "\u0663", "\uff15", "word ")
ANSWERS = ("5", "-1/2", r"2\sqrt{2}", r"\text{odd}", "x+1", r"\pm 2", "(1,2)", "50\\%", r"n \equiv 1 \pmod 4", "1010_2")
READERS = {"last_number": last_number, "parse_rational": parse_rational, "last_boxed": last_boxed, "boxed_answer": boxed_answer,
           "normalise": normalise, "compact": lambda text: compact(normalise(text)), "words": words,
           "cut": lambda text: through_stop_string(text, ("</answer>", "\n\n")),
           **{f"verdict {answer}": (lambda text, answer=answer: quick_verdict(answer, text)) for answer in ANSWERS}}


def test_any_text_is_judged():
    draw = random.Random(SEED)
    verdicts = {name: 0 for name in READERS}
    for _ in range(400 * TIMES):
        text = "".join(draw.choices(PARTS, k=draw.randrange(1, 14)))
        for name, reader in READERS.items():
            verdicts[name] += reader(text) not in (None, False)
        for answer in ANSWERS[:4]:
            number_verdict(answer, text), work_left(answer, text), other_words(answer, text)
    assert all(verdicts[name] for name in ("last_number", "parse_rational", "last_boxed", "boxed_answer", "words"))


def test_a_number_is_the_same_in_every_way_to_write_it():
    draw = random.Random(f"{SEED} ways")
    for _ in range(500 * TIMES):
        number, sign = draw.randrange(1000, 10**9), draw.choice(("", "-", "\u2212", "\u2013", "- "))
        rows = len(str(number)) % 3 == 0  # groups that could each be a number, if a space parts them
        spaces = () if rows else (" ", "\u00a0")
        digits = f"{number:,}".replace(",", draw.choice((",", "\u202f", "'", "", "{,}", r"\,", *spaces)))
        value = -number if sign else number
        assert parse_rational(sign + digits) == last_number(f"so x = {sign}{digits}.") == value, (sign, digits)
        assert quick_verdict(str(value), sign + digits) is True and quick_verdict(str(value + 1), sign + digits) is False


def steps(function, text: str) -> int:
    """Lines of this package that run while the function reads the text."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(text)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("reader", READERS)
def test_twice_the_text_takes_twice_the_steps(reader):
    draw = random.Random(f"{SEED} {reader}")
    for _ in range(12 * TIMES):
        unit, head = "".join(draw.choices(PARTS, k=draw.randrange(1, 4))), draw.choice(("", r"\boxed{", r"\boxed "))
        once, twice = (steps(READERS[reader], head + unit * count) for count in (150, 300))
        assert twice <= 2.2 * once + 100, (head, unit)


@pytest.mark.parametrize("name", ["exact", "last_number", "numeric", "token_f1"])
def test_scores_of_any_text_are_numbers(name):
    draw, reward = random.Random(f"{SEED} {name}"), rewards.combine([rewards.make(name)])

    class Problem:
        extra: dict = {}

    texts = ["".join(draw.choices(PARTS, k=draw.randrange(0, 30))) for _ in range(500 * TIMES)]
    scores = reward(texts, ["5"] * len(texts), [Problem()] * len(texts))
    assert scores.failures == {} and ((scores.total >= 0) & (scores.total <= 1)).all()
