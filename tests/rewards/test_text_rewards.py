"""Text verifiers, number reading and length shaping against typed-in values."""

from fractions import Fraction

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards.rational import last_number, parse_rational
from jaxrl_llm.tasks.base import Problem


@pytest.mark.parametrize(("text", "value"), [
    (r"\frac12", Fraction(1, 2)), (r"\dfrac{3}{4}", Fraction(3, 4)), (".5", Fraction(1, 2)), ("2.50", Fraction(5, 2)),
    ("1,234", Fraction(1234)), ("12,34", None), ("7/0", None), ("-1,024", Fraction(-1024)), ("- 3", Fraction(-3)),
    ("\u22123", Fraction(-3)), ("5.", Fraction(5)), ("$1{,}000$", Fraction(1000)), (r"-1\frac{1}{2}", Fraction(-3, 2)),
    (r"\frac{-2}{4}", Fraction(-1, 2)), (r"\frac 1 2", Fraction(1, 2)), (r"\dfrac {3} {4}", Fraction(3, 4)),
    (r"1 \frac 1{2}", Fraction(3, 2)), ("1e3", Fraction(1000)),
    ("1E-2", Fraction(1, 100)),
    ("0,100", None), ("000,100", None), ("", None), ("x", None), ("1 2", None), ("1,00", None), ("1e999", None),
    ("2 1/2", Fraction(5, 2)), ("-2 1/2", Fraction(-5, 2)), ("3 5/2", None), ("2\u00bd", Fraction(5, 2)),
    ("\u215e", Fraction(7, 8)),
    ("1\u20442", Fraction(1, 2)), ("1 000", Fraction(1000)), ("1\u202f234.5", Fraction(2469, 2)), (r"1\,000", Fraction(1000)),
    ("1'000", Fraction(1000)), ("12,34,567", Fraction(1234567)), ("1 2 000", None), ("\u20135", Fraction(-5)),
    ("-$5", Fraction(-5)), ("2 \u00d7 10^3", Fraction(2000)), ("2\u00b710\u207b\u00b3", Fraction(1, 500)),
    (r"10^{-2}", Fraction(1, 100)), ("5\u00b2", None), ("0 000", None),
    ("100 200 300", Fraction(100200300)), (r"100\,200", Fraction(100200)), (r"0\,100", None),
    ("9" * 201, None), (r"\frac{1}{0}", None),
    ("__import__('os')", None), ("2+3", None), ("1_000", None), ("nan", None), ("inf", None), ("5 cm", None),
])
def test_parse_rational(text, value):
    assert parse_rational(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("The answer is 1,000.", 1000), ("12", 12), ("7+5=12", 12), ("it is -3", -3), ("10-3", 3), ("(4)-3", 3),
    ("= -3", -3),
    ("costs $1,234.50!", Fraction(2469, 2)), ("a half: 1/2.", Fraction(1, 2)), (r"so $\frac{3}{4}$.", Fraction(3, 4)),
    ("x2 and y3", None), ("none", None), ("", None), ("list 12,34", None), ("1.2.3", None), ("5e1000", None),
    ("7/0", None),
    ("the answer is 2 1/2 cups", Fraction(5, 2)), ("x = - 5", -5), ("x = \u2212 5", -5), ("1 000", 1000), ("10 - 3", 3),
    ("- 5 apples", 5), ("the answer \u2014 5", 5), ("(- 2 1/2)", Fraction(-5, 2)), ("it is -$1,000.50", Fraction(-2001, 2)),
    ("negative 5", -5), ("the non-negative 5", 5), ("2\u00bd cups", Fraction(5, 2)), ("3 5/2", Fraction(5, 2)),
    ("32 64 128 256 512", 512), ("25 cm^2", 25), ("25 cm\u00b2", 25), ("x^{2}", None), ("2 \\times 10^{3}", 2000),
    ("5\u20136", 6),
    ("it was 0", 0), ("12 345 people", 12345), ("in 2010 100 came", 100),
    ("answers: 100 200 300", 300), ("-100 200", 200), ("250 000 people", 250000), ("1 100 200", 1100200), ("100 045", 100045),
    ("100 200 300.5", Fraction(601, 2)), ("100\u202f200", 100200), (r"$100\,200$", 100200), ("123 " * 99 + "124", 124),
    ("3.", 3), ("50% of 8 is 4.0", 4), ("4 (four)", 4), ("12km", 12),
])
def test_last_number(text, value):
    assert last_number(text) == value


@pytest.mark.slow
def test_number_reading_takes_linear_time():
    # A quadratic pattern would need hours for these: the test would not end rather than fail by a clock.
    for unit in ("1", "1,", "1.", "-", "1/", "1 ", ",111", "\\frac", "1e", "{"):
        last_number(unit * 200_000)
    assert last_number("\\frac1" + " " * 200_000 + "x") is None


def score(name, completion, answer, **options):
    return float(rewards.combine([rewards.make(name, **options)])([completion], [answer]).total[0])


def test_exact_numeric_and_format():
    assert score("exact", " 12\n", "12") == 1.0 and score("exact", "12.0", "12") == 0.0
    assert score("exact", "", "12") == 0.0
    assert score("numeric", "12.0", "12") == 1.0 and score("numeric", "it is 12", "12") == 0.0
    pattern = r"<think>.*</think>\s*<answer>[^<]+</answer>"
    assert score("format", "<think>a\nb</think>\n<answer>3</answer>", "", pattern=pattern) == 1.0
    assert score("format", "x<think>a</think><answer>3</answer>", "", pattern=pattern) == 0.0


def test_soft_overlong_worked_example():
    lengths = [10, 16384, 16385, 18432, 20480]
    combined = rewards.combine([rewards.make("soft_overlong", max_length=20480, cache=4096)])
    result = combined(["x"] * 5, [""] * 5, lengths=lengths)
    np.testing.assert_allclose(result.total, [0, 0, -2.441406e-4, -0.5, -1], atol=1e-9)
    np.testing.assert_allclose(result.total + np.array([1, 1, -1, 1, -1]), [1, 1, -1.000244, 0.5, -2], atol=1e-6)


def test_soft_overlong_variants_differ_beyond_the_limit_and_scale():
    both = [rewards.make("soft_overlong", max_length=20, cache=5, factor=2.0, variant=v).fn for v in ("paper", "code")]
    assert [list(fn(np.array([15, 16, 20, 25]))) for fn in both] == [[0, -0.4, -2, -2], [0, -0.4, -2, -4]]


@pytest.mark.parametrize(("name", "options", "message"), [
    ("soft_overlong", {"max_length": 5, "cache": 6}, "need 0 < cache <= max_length"),
    ("soft_overlong", {"max_length": 5, "cache": 0}, "need 0 < cache <= max_length"),
    ("soft_overlong", {"max_length": 5, "cache": 1, "variant": "papers"}, "Did you mean 'paper'"),
    ("soft_overlong", {"cache": 1}, "needs the keyword 'max_length'"),
    ("last_numbr", {}, "Did you mean 'last_number'"),
    ("exact", {"wieght": 2.0}, "Did you mean 'weight'"),
    ("exact", {"weight": float("nan")}, "not finite"),
    ("boxed", {"workers": 0}, "at least one worker"),
    ("boxed", {"deadline": 0.0}, "positive deadline"),
])
def test_make_refuses(name, options, message):
    with pytest.raises(ValueError, match=message):
        rewards.make(name, **options)


@pytest.mark.parametrize(("name", "completion", "answer"), [
    ("exact", " 12\n", "12"), ("exact", " ", None), ("last_number", "so 1/2, no: 0.75.", Fraction(3, 4)),
    ("last_number", "none", None), ("numeric", "1,000", Fraction(1000)), ("numeric", "1 2", None),
    ("boxed", r"\boxed{1} \boxed{\dfrac{1}{2}}", Fraction(1, 2)), ("boxed", r"\boxed{ x^{2} }", "x^2"),
    ("boxed", r"\boxed{}", None), ("boxed", "12", None), ("reasoning_gym", "<answer> a b </answer>", "a b")])
def test_the_answer_that_a_reward_reads(name, completion, answer):
    assert rewards.make(name).extract(completion) == answer


def test_some_rewards_read_no_answer():
    assert rewards.make("format", pattern="a+").extract is None


@pytest.mark.parametrize("boxed, answer, others, value", [
    ("the Eiffel Tower", "Eiffel Tower", (), 0.8), ("tower, Eiffel!", "Eiffel Tower", (), 1), ("a a a b", "a b b", (), 4 / 7),
    ("Gustave", "Eiffel", (), 0), ("NYC", "New York", ("NYC", "The Big Apple"), 1), ("the York", "New York", ("NYC",), 0.5),
    ("", "x", (), 0), ("...", "...", (), 0), (r"\text{Paris}", "Paris", (), 1),
    (r"\textbf{the} Eiffel\ Tower", "Eiffel Tower", (), 0.8), ("Paris", r"\text{Paris}", (), 1),
    (r"\textcolor{red}{Paris}", "Paris", (), 1), (r"\color{blue}Paris", "Paris", (), 1),
])
def test_f1_of_words(boxed, answer, others, value):
    problem = Problem("?", answer, 0, extra={"answers": others})
    reward = rewards.make("token_f1")
    assert reward.fn(rf"first \boxed{{no}}, then \boxed{{{boxed}}}.", answer, problem) == pytest.approx(value)
    assert reward.fn(boxed, answer, problem) == 0 and reward.extract(boxed) is None  # no box
