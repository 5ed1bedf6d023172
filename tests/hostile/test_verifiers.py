r"""Verifiers under attack: no completion blocks the interpreter, ends a batch or passes without being the answer."""

import random
import re
import time

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import combine
from jaxrl_llm.rewards.gym import tagged_answer
from jaxrl_llm.rewards.math import boxed_answer, last_boxed, quick_verdict
from jaxrl_llm.rewards.rational import last_number, parse_rational
from jaxrl_llm.rewards.swe_rl import parse_edits
from jaxrl_llm.rewards.text import format_match

LENGTH = 200_000
BLOCK = "```\n### a\n<<<<<<< SEARCH\na\n=======\n"


def score(name, completion, answer="5", **options):
    return float(combine([rewards.make(name, **options)])([completion], [answer]).total[0])


def edits(completion):
    try:
        return parse_edits(f"<think>a</think><solution>{completion}</solution>")
    except ValueError:
        return None


@pytest.mark.parametrize(("pattern", "completion"), [
    ("(a+)+b", "a" * LENGTH), ("(a|a)*b", "a" * LENGTH), ("(a*)*(a*)*(a*)*b", "a" * LENGTH), (".*.*.*=.*", "x" * LENGTH),
    ("<think>.*</think>.*<answer>.*</answer>.*", "<think></think><answer>" * (LENGTH // 23)),
    (r"(\s*\w+\s*)*\.", "a " * (LENGTH // 2)), (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * LENGTH)])
def test_no_completion_holds_the_interpreter_in_a_pattern(pattern, completion):
    start = time.monotonic()
    assert score("format", completion, pattern=pattern) == 0.0
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("pattern", [
    "(?=a)b", "a(?!b)", "(?<=a)b", "(?<!a)b", r"(a)\1", "(?P<x>a)(?P=x)", "(?>a)", "a++", "a{1,2000}", "(", "(?(1)a|b)"])
def test_a_pattern_without_linear_time_is_refused_where_it_is_made(pattern):
    with pytest.raises(ValueError, match=r"of the reward 'format' is no regular expression of RE2: .*'isolated'"):
        rewards.make("format", pattern=pattern)


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@pytest.mark.parametrize("pattern", [
    r"\d+", r"[\d\s]+", r"\w+", r"\W\w\S", r"[^\s]+", r"[]a]+", r"[^]a]+", r"[a[]", r"[[a]", r"[a\]b]", r"\\d", r"\[\d\]",
    r"a\Z", r"[\s\S]*", r"(?i)É.", r"a$", "^a|b$", r"<t>.*?</t>\s*<a>[^<]+</a>", r"\x41", r"a{2,3}", r"(?P<x>a)|(?:b)",
    r"\.\*\]\-"])
def test_patterns_mean_what_they_mean_in_re(pattern):
    draw, expected, ours = random.Random(pattern), re.compile(pattern, re.DOTALL), format_match(pattern)
    letters = "ab1 é٣\u00a0\n\x0b\x1c\u2028_½²Ⅷ][-A.*\\d\x85<t>"
    texts = ["".join(draw.choices(letters, k=draw.randrange(5))) for _ in range(2000)]
    texts += ["<t>\n</t>\u00a0<a>x\n</a>", "aaa", "Éa", "éb"]
    assert [ours(text, "", None) for text in texts] == [float(bool(expected.fullmatch(text.strip()))) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("completion", ["\ud800", "a\udfffb", "\0", "a\0b", "\U000e0041", "\ufffe"])
def test_any_text_is_judged(completion):
    names = ("exact", "last_number", "numeric", "boxed")
    assert [score(name, text) for name in names for text in (completion, rf"\boxed{{{completion}}}")] == [0.0] * 8
    assert score("format", completion, pattern=".+") == 1.0 and score("format", completion, pattern="[a-c]+") == 0.0
    boxed = rewards.make("boxed", workers=1)
    result = combine([boxed])([rf"\boxed{{x{completion}+1}}", r"\boxed{1+x}"], ["x+1", "x+1"])
    assert result.total.tolist() == [0.0, 1.0]
    boxed.fn.close()


UNITS = (
    "1", "1,", "1.", "-", "1/", "1 ", ",111", "\\frac", "1e", "{", "}", "\\", "$", " ", "\n", "\\frac{", "\\frac{1",
    "\\frac{1}", "\\frac{1.", "{,}", "\\$", "1\\frac{1}{", "\\left", "\\!", "1 /", "\u2212", "(1", "a1", "٣", ".1", "1,111",
    "1 \\frac 1 ", "\u00a0", "\\dfrac1", "%", "\\boxed{", "\\text{", "=", "x=", "10^", "\\overline{", "<answer>", "</answer>",
    "<answer></answer>", "```", "```python\n", BLOCK, "\n<<<<<<< SEARCH\n", "```\n### a\n<<<<<<< SEARCH\n", "\n=======\n",
    "\n>>>>>>> REPLACE\n```", "\ud800", "1" + " " * 1000, "1/" + " " * 1000, "\\frac{" + " " * 1000, "\\frac{1" + " " * 1000)
READERS = {"last_number": last_number, "parse_rational": parse_rational, "last_boxed": last_boxed, "boxed_answer": boxed_answer,
           "verdict": lambda text: quick_verdict("5", text), "closed form": lambda text: quick_verdict(r"\sqrt{8}", text),
           "tagged_answer": tagged_answer, "edits": edits}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_every_text_is_read_in_linear_time(reader):
    for unit in UNITS:
        for before, after in (("", ""), ("\\boxed{", ""), ("", "x"), ("5", "}")):
            quarter, whole = (before + unit * (length // len(unit)) + after for length in (LENGTH // 4, LENGTH))
            if (short := _seconds(READERS[reader], quarter)) > 0.1:  # 16 times as long in quadratic time
                assert _seconds(READERS[reader], whole) < 8 * short, (before, unit, after)


def _seconds(function, text: str) -> float:
    """The time that the processor takes."""
    start = time.process_time()
    function(text)
    return time.process_time() - start


@pytest.mark.parametrize("length", [199, 999])
def test_what_may_be_a_number_is_read_quickly(length):
    draw = random.Random(length)
    for _ in range(500):
        text = "5" + "".join(draw.choices(UNITS[:41], k=draw.randrange(1, 4))) * length
        assert _seconds(lambda box: (quick_verdict("5", box), quick_verdict(r"\sqrt{8}", box)), text[:length]) < 2, text[:50]


def test_answers_in_tags_are_what_the_pattern_finds():
    draw, pattern = random.Random(0), re.compile("<answer>(.*?)</answer>", re.DOTALL)
    for _ in range(3000):
        text = "".join(draw.choices(["<answer>", "</answer>", "a", "\n", "<"], k=draw.randrange(9)))
        actual = pattern.findall(text)
        assert tagged_answer(text) == (actual[-1] if actual else text).strip()


def test_edits_are_what_the_pattern_finds():
    pattern = re.compile(r"```[^\n]*\n### ([^\n]*)\n<<<<<<< SEARCH\n(.*?)\n=======\n(.*?)\n>>>>>>> REPLACE\n```", re.DOTALL)
    draw = random.Random(0)
    parts = ["```", "\n", "### ", "a", "<<<<<<< SEARCH", "\n=======\n", "\n>>>>>>> REPLACE\n```", "\n<<<<<<< SEARCH\n",
             "```\n### p\n<<<<<<< SEARCH\n", "=======", "###", ">>>>>>> REPLACE"]
    actual = 0
    for _ in range(20_000):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 14)))
        assert (edits(text) or []) == pattern.findall(text)
        actual += bool(edits(text))
    assert actual > 300


@pytest.mark.slow
def test_a_long_box_costs_no_time():
    boxed = rewards.make("boxed", workers=1, deadline=30.0)
    start = time.monotonic()
    result = combine([boxed])([rf"\boxed{{{'(x+1)' * 20_000}}}", r"\boxed{1+x}"], ["x+1"] * 2)
    assert result.total.tolist() == [0.0, 1.0] and result.failures == {} and time.monotonic() - start < 25
    boxed.fn.close()


@pytest.mark.slow
def test_hard_boxes_do_not_end_a_run():
    boxed = rewards.make("boxed", workers=2, deadline=1.0)
    assert combine([boxed])([r"\boxed{1+x}"], ["x+1"]).total.tolist() == [1.0]
    hard = [rf"\boxed{{9^{{9^{{9^{{{n}}}}}}}x}}" for n in range(30, 90)]
    result = combine([boxed], deadline=3.0)(hard + [r"\boxed{1+x}"], ["x+1"] * 61)
    counts = {kind: result.failures.get(f"boxed/{kind}", 0) for kind in ("late", "timeout", "error", "crash")}
    assert result.total[:60].tolist() == [0.0] * 60 and counts["late"] > 0 and sum(counts.values()) >= 60
    boxed.fn.close()


def test_hard_boxes_of_numbers_need_no_worker():
    boxed = rewards.make("boxed", workers=1)
    result = combine([boxed])([rf"\boxed{{9^{{9^{{9^{{{n}}}}}}}}}" for n in range(240)], ["5"] * 240)
    assert result.total.tolist() == [0.0] * 240 and result.failures == {} and not boxed.fn._pool._ready
