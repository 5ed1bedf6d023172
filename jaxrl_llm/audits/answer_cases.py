r"""Boxes whose spelling, words, chains or operations decide, with the right verdict derived by hand, and who judges them.

"constants": values or words that differ, and rounded decimals. "spellings": one answer in several spellings. "numbers": one
number in the forms that people type, for `last_number`, too. "words and chains": units, words that change a value, chains of
equations, hedges. "sentences and lists": what surrounds an answer, and lists that math-verify cannot read.
"restated": the question instead of its answer, beside closed forms that are answers.
"""
from collections.abc import Iterator, Sequence

from jaxrl_llm import rewards
from jaxrl_llm.audits.cases import Case, Judge
from jaxrl_llm.rewards import graders
from jaxrl_llm.rewards.text import through_stop_string

# kind: {answer: (right boxes, wrong boxes)}
_BOXES: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "constants": {
        r"\frac{1}{2^{99}}": (("2^{-99}",), (r"\frac{1}{2^{98}}", "0.0", r"\frac{2}{2^{99}}")),
        r"\frac{1}{2004!}": ((), (r"\frac{1}{2006!}",)),
        "e^{-50}": ((r"\frac{1}{e^{50}}",), ("e^{-51}",)),
        r"(\frac{1}{2^{99}}, 1)": ((), (r"(\frac{1}{2^{98}}, 1)",)),
        r"1+\frac{1}{2^{99}}": ((), (r"1+\frac{1}{2^{98}}",)),
        r"n \equiv 1 \pmod 4": ((r"n\equiv 1 \pmod{4}", r"n \equiv 1 (\text{mod } 4)"), (r"n \equiv 3 \pmod 4",)),
        r"x \text{ is odd}": ((), ("x", r"x \text{ is even}")),
        r"1, 3, 5, \ldots": ((), ("1, 3, 5", r"1, 3, 7, \ldots")),
        r"3 \text{ red}, 2 \text{ blue}": ((), (r"3 \text{ blue}, 2 \text{ red}",)),
        "1010_2": (("1010_{2}",), ("1010_3",)),
        r"\sqrt{2}": (("1.414214", r"\sqrt{2} \approx 1.414"), ("1.41", r"\sqrt{2} \approx 1.5"))},
    "spellings": {
        r"6\sqrt{3}": (("6√3", r"6 \sqrt 3", "6√(3)"), ("6√2",)),
        r"\emptyset": ((r"\varnothing", "∅"), ("0",)),
        "12": ((r"\textcolor{red}{12}", r"{\color{red}12}", "12_{10}", r"12\ \mathrm{m\,s^{-1}}",
                r"12\,\text{m}\cdot\text{s}^{-1}"), ("12_{3}", r"\textcolor{red}{13}", r"12^{-1}")),
        r"2\pi": (("2π", r"2\,\pi"), ("2π^2",)),
        r"x \leq 3": (("x ≤ 3", r"x \le 3"), ("x < 3", "x ≥ 3")),
        "3+4i": (("3 + 4 i",), ("3 - 4 i",))},
    "numbers": {
        "5/2": (("2 1/2", "2½", r"2\frac{1}{2}", r"2\tfrac12"), ("1/2", "3 1/2", "2 1/3")),
        "1/2": (("½", "1⁄2"), ("2 1/2", "2½")),
        "-5": (("- 5", "–5", "−5", r"-\$5"), ("5", "+5")),
        "1000": (("1 000", "1\u202f000", r"1\,000", "1'000", "1,000"), ("1 00", "0", "1", "1.000")),
        "1234567": (("12,34,567", "1 234 567"), ("1234", "567")),
        "2000": (("2 × 10^3", "2·10³"), ("2", "3", "10^3"))},
    "words and chains": {
        "5": ((r"5\text{ third graders}", r"5\text{ two-digit numbers}", "5 apples", r"5\text{ K}", "2+3 = 5"),
              (r"5\text{ thousands}", "5 dozens", r"5\text{ tenths}", "5K", r"5\text{ point two}", r"5 \text{ but maybe } 6",
               "5 vs 6", r"5\text{ below zero}", r"5\text{ hundredths}")),
        r"\sqrt{3}": ((r"x = \sqrt{3}", r"\frac{3}{\sqrt{3}} = \sqrt{3}"),
                      (r"\sqrt{2} = \sqrt{3}", r"\sqrt{3} \text{ or } \sqrt{2}", r"\sqrt{2} \approx \sqrt{3}",
                       r"\sqrt{3}\text{ (or }\sqrt{2}")),
        "x+1": (("y = x+1", "f(x) = x+1"), ("y=x+2=x+1", "x+1, x+2")),
        "C": (("x = C",), ("A=B=C", "B = C")),
        r"2\pi": ((r"2\pi \text{ cm}", r"C = 2\pi r = 2\pi", r"2\pi \approx 6.28"),
                  (r"2\pi \text{ thousands}", r"2\pi \text{ vs } 3\pi", r"3\pi \text{ but maybe } 2\pi", r"2\pi \approx 3\pi")),
        "y=2x+1": (("y = 1+2x",), (r"y=2x-1 \lor y=2x+1", r"y=2x-1\text{, or }y=2x+1"))},
    "sentences and lists": {
        "5": (("The answer is $5$.", "x = 5 = x = 5"),
              ("The answer is not $5$.", "The square of $5$", "The answer is $2+3$.", "The answer is $5$ or $6$.", "Is it $5$?",
               "It is 6, that is $5$")),
        r"x \neq 3": ((r"We find that $x \neq 3$.", r"x \ne 3 = x \neq 3"),
                     (r"We find that $x \neq 4$.", r"It is false that $x \neq 3$.", r"We find that $x \neq 3$ or $x \neq 4$.")),
        r"(-6, 10)": ((r"The solution is \( x \in (-6, 10) \). The final answer is \((-6, 10)\). I hope it is correct.",),
                      (r"The solution is \((-6, 10)\). The final answer is \((-6, 11)\).",)),
        "x = 11": (("x = 11 = x = 11",), ("x = 7 = 11", "x = 11 = x = 7")),
        "|AB| = 1": (("|AB|=1 = |AB|=1",), ("|AB|=1 = |AB|=2",)),
        "E": (("E = E", "x = E"), ("F = E = F", "E = F = E")),
        "Paris": ((r"\text{Paris} = \text{Paris}", "c_1 = Paris", r"\text{Answer} = \text{Paris}"),
                  ("London = Paris", r"\text{London} = \text{Paris}", "Paris = London", "New York = Paris",
                   "Paris = London = Paris", r"\text{London} \equiv \text{Paris}")),
        r"\text{Yes}": (("Yes", "x = Yes"), ("No = Yes", r"\text{No} = \text{Yes}")),
        "x": (("x",), (r"x \text{ is prime}",)),
        r"n \equiv 1 \pmod{4}": ((r"\text{Answer: }n \equiv 1 \pmod{4}", r"\left(n \equiv 1 \pmod{4}\right)",
                                 r"{n \equiv 1 \pmod 4}", r"x = n \equiv 1 \pmod{4}"),
                                (r"(n \equiv 3 \pmod{4})", r"x = n \equiv 3 \pmod{4}")),
        r"x = \frac{1}{2}, x = \frac{-1 \pm \sqrt{13}}{4}": (
            (r"\frac{1}{2}, \frac{-1 \pm \sqrt{13}}{4}", r"0.5, \frac{-1 + \sqrt{13}}{4}, \frac{-1 - \sqrt{13}}{4}"),
            (r"\frac{1}{2}, \frac{-1 \pm \sqrt{17}}{4}", r"\frac{1}{2}", r"\frac{1}{2}, \frac{-1 + \sqrt{13}}{4}")),
        r"x = 2k\pi, k \in \mathbb{Z}": ((r"x = 2\pi k, k \in \mathbb{Z}",),
                                       (r"x = 3\pi k, k \in \mathbb{Z}", r"x = 2\pi k, k \in \mathbb{N}", r"x = 2k\pi"))},
    "restated": {
        r"2\pi": ((r"\frac{4\pi}{2}", r"\pi+\pi = 2\pi", r"\pi \cdot 2"), (r"\pi+\pi", r"3\pi-\pi", r"2(3\pi-2\pi)")),
        r"10\pi": ((r"2\pi r = 2\pi\cdot 5 = 10\pi",), (r"2\pi\cdot 5", r"4\pi+6\pi", r"2\pi(5)")),
        "4+6i": (("6i+4",), ("(1+2i)+(3+4i)", "4+(2+4)i")),
        "2i": ((), ("(1+i)^2", "(1+i)(1+i)")),
        r"5\sqrt{3}": ((r"\sqrt{75}", r"\frac{15}{\sqrt{3}}"),
                       (r"\sqrt{12}+\sqrt{27}", r"2\sqrt{3}+3\sqrt{3}", r"\sqrt{3}\cdot\sqrt{25}")),
        r"\frac{\sqrt{3}}{2}": ((r"\frac{1}{2}\sqrt{3}", r"\sqrt{\frac{3}{4}}"),
                                (r"\sin 60^\circ", r"\frac{\sqrt{3}}{4}+\frac{\sqrt{3}}{4}")),
        r"\frac{1+\sqrt{5}}{2}": ((r"\frac{1}{2}+\frac{\sqrt{5}}{2}", r"\frac{2}{\sqrt{5}-1}"), (r"\frac{3+\sqrt{5}}{2}-1",)),
        r"36\pi": ((r"\frac{4}{3}\pi r^3 = 36\pi",), (r"\frac{4}{3}\pi \cdot 27", r"6^2\pi")),
        r"(2,\pi)": ((), (r"(\sqrt{4},\pi)", r"(2,\frac{\pi}{2}+\frac{\pi}{2})")),
        r"\ln 8": ((r"3\ln 2",), (r"\ln(2\cdot 4)",))}}
STOP_CASES = tuple(Case("stop strings", text, "", right, {"pattern": pattern, "stop": stop}) for pattern, stop, text, right in (
    ("<answer>.*</answer>", "</answer>", "<answer>5</answer> junk", True),
    ("<answer>.*</answer>", "</answer>", "<answer>5", False),
    ("<think>.*</think>.*", "</think>", "<think>a</think> b", True),
    (r"\d+;", ";", "12;13", True),
    (r"\d+;", ";", "12", False),
    ("```python.*```", "\n```", "```python\n1\n```\nmore", True)))


def _cases() -> Iterator[Case]:
    for kind, answers in _BOXES.items():
        for answer, sides in answers.items():
            for right, boxes in zip((True, False), sides):
                yield from (Case(kind, rf"So \boxed{{{box}}}", answer, right) for box in boxes)


ANSWER_CASES = tuple(_cases())


def _by(name: str, **options) -> Judge:
    def judge(cases: Sequence[Case]) -> list[bool]:
        reward = rewards.combine([rewards.make(name, **options)])
        return (reward([case.completion for case in cases], [case.answer for case in cases]).total == 1).tolist()
    return judge


def _grader(name: str) -> Judge:
    return lambda cases: graders.verdicts(name, [(case.completion, case.answer) for case in cases])


def _formats(cut) -> Judge:
    return lambda cases: [bool(rewards.make("format", pattern=case.extra["pattern"]).fn(
        cut(case.completion, case.extra["stop"]), "", None)) for case in cases]


ANSWER_JUDGES = {"boxed": _by("boxed", deadline=20.0), **{name: _grader(name) for name in graders.GRADERS}}
NUMBER_CASES = tuple(case for case in ANSWER_CASES if case.kind == "numbers")
NUMBER_JUDGES = {"last_number": _by("last_number"), **{name: _grader(name) for name in graders.GRADERS}}
STOP_JUDGES = {"format, through the stop string": _formats(lambda text, stop: through_stop_string(text, (stop,))),
               "format, without the stop string": _formats(lambda text, stop: text.partition(stop)[0])}
