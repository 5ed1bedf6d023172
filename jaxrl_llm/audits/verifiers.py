r"""A table of right and wrong answers in tricky forms, and how each verifier judges them.

`python -m jaxrl_llm.audits.verifiers` prints, for each verifier, how many wrong answers it accepts (false positives)
and how many right ones it rejects (false negatives), and which. Some are intended: `exact` rejects every other spelling.
Then come further cases by kind, beside the rules of math-verify, verl (where installed) and LiveCodeBench. The exit code is 1
where a verifier of this package judges one of these wrongly.
With `--compare` it prints the two counts of `boxed`, math-verify and the graders of verl, where installed, on one table.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm import rewards
from jaxrl_llm.audits import answer_cases, program_attacks, program_cases
from jaxrl_llm.audits.cases import judged, table
from jaxrl_llm.rewards import graders
from jaxrl_llm.rewards.rational import parse_rational

# (what the policy gave as its answer, reference, is it right?)
FORMS = (
    ("5", "5", True),
    ("6", "5", False),
    (" 5 ", "5", True),
    ("5.0", "5", True),
    ("005", "5", True),
    ("+5", "5", True),
    ("-5", "5", False),
    ("-5", "-5", True),
    ("\u22125", "-5", True),
    ("5", "-5", False),
    ("12 34", "408", False),
    (r"\frac 1 2", "1/2", True),
    ("12/-4", "-3", True),
    ("15", "5", False),
    ("5.5", "5", False),
    ("1,000", "1000", True),
    ("1000", "1,000", True),
    ("1,234,567", "1234567", True),
    ("1{,}000", "1000", True),
    ("1.000", "1000", False),
    ("12,34", "1234", False),
    ("12,34", "34", False),
    ("1 000", "0", False),
    ("0.50", "1/2", True),
    (".5", "1/2", True),
    ("1/2", "0.5", True),
    ("2/4", "1/2", True),
    ("1/2", "2", False),
    ("1/2", "1", False),
    (r"\frac{1}{2}", "1/2", True),
    (r"\dfrac{3}{4}", "0.75", True),
    (r"\frac12", "1/2", True),
    (r"-\frac{1}{2}", "-0.5", True),
    (r"\frac{1}{2}", "2", False),
    (r"\frac{-1}{2}", "-1/2", True),
    (r"1\frac{1}{2}", "1.5", True),
    ("0.3333", "1/3", False),
    ("7/0", "0", False),
    ("50%", "50", True),
    (r"50\%", "0.5", True),
    ("50%", "5", False),
    ("$5", "5", True),
    (r"\$5.00", "5", True),
    ("5 cm", "5", True),
    (r"5\text{ cm}", "5", True),
    ("5 cm^2", "5", True),
    ("x = 5", "5", True),
    ("10^\\circ", "10", True),
    ("1e3", "1000", True),
    ("1e3", "3", False),
    ("2*10^3", "2000", True),
    (r"2 \cdot 10^{3}", "2000", True),
    ("2+3", "3", False),
    ("7-5", "-5", False),
    ("five", "5", False),
    ("", "5", False),
    ("5 or 6", "6", False),
    (r"2\sqrt{2}", r"\sqrt{8}", True),
    (r"\sqrt{2}", "2", False),
    ("(x+1)^2", "x^2+2x+1", True),
    ("x+1", "x+2", False),
    ("(1,2)", "(1, 2)", True),
    ("(2,1)", "(1,2)", False),
    ("1,2", "(1,2)", False),
    (r"\{1,2\}", r"\{2,1\}", True),
    ("2,1,3", "1,2,3", False),
    ("[0,1]", "(0,1]", False),
    (r"\left(0,1\right]", "(0,1]", True),
    (r"\text{Paris}", "Paris", True),
    ("A", "B", False),
    ("a", "A", False),
    ("3.14", r"\pi", False),
    (r"\frac{\pi}{2}", r"\pi/2", True),
    ("9^{9^{9^{9}}}", "5", False),
)

# (whole completion, reference, is it right?)
COMPLETIONS = (
    (r"The sum is 12, so \boxed{12}.", "12", True),
    (r"\boxed{3} is wrong, it is \boxed{4}", "4", True),
    (r"\boxed{3} is wrong, it is \boxed{4}", "3", False),
    (r"first \boxed{3} then \boxed{4", "3", False),
    (r"so \boxed{\frac{1}{2}}", "0.5", True),
    (r"\boxed{1} \boxed{2} \boxed{}", "2", False),
    ("The answer is 5.", "5", True),
    ("The answer is not 5", "5", False),
    ("It is 3, not 5", "5", False),
    ("5 apples in 2 baskets", "5", False),
    ("7 + 5 = 12", "12", True),
    ("12 = 7 + 5", "12", True),
    ("12-5", "-5", False),
    ("**1,024**", "1024", True),
    ("#### -1,024", "-1024", True),
    ("It costs $18.", "18", True),
    ("The variable x2", "2", False),
    ("1 2 3 4 5 6 7 8 9", "9", False),
    ("no number at all", "5", False),
)

# Answers to questions about numbers that state the number, or only the question again; for the verifiers of boxes.
WORK = (
    ("123+456", "579", False),
    ("579", "579", True),
    ("123+456=579", "579", True),
    ("123+456=578", "579", False),
    ("123+456", "123+456", True),
    ("1000-421", "579", False),
    (r"7\cdot 8", "56", False),
    (r"7 \times 8", "56", False),
    ("7*8", "56", False),
    ("(7)(8)", "56", False),
    (r"7 \cdot 8 = 56", "56", True),
    (r"112 \div 2", "56", False),
    (r"\frac{112}{2}", "56", True),
    ("112/2", "56", True),
    (r"\frac{7 \cdot 16}{2}", "56", False),
    (r"\frac{100+12}{2}", "56", False),
    (r"\frac{1}{2}+\frac{1}{3}", "5/6", False),
    (r"\frac{5}{6}", "5/6", True),
    (r"\frac{10}{12}", "5/6", True),
    (r"1-\frac{1}{6}", "5/6", False),
    (r"\frac{1.25}{1.5}", "5/6", True),
    (r"0.8\overline{3}", "5/6", True),
    (r"0.8\bar{3}", "5/6", True),
    ("0.8333", "5/6", False),
    ("2^{10}", "1024", False),
    ("2^10", "1024", False),
    (r"4^5", "1024", False),
    (r"1.024 \times 10^3", "1024", True),
    (r"1.024 \cdot 10^{3}", "1024", True),
    ("10^3", "1000", True),
    (r"10^{-2}", "0.01", True),
    (r"5 \times 10^{-1}", "1/2", True),
    (r"10^{3} + 24", "1024", False),
    (r"\sqrt{25}", "5", False),
    (r"\sqrt[3]{125}", "5", False),
    (r"\sqrt{9+16}", "5", False),
    (r"\sum_{i=1}^{10} i", "55", False),
    (r"\sum_{i=1}^{10} i = 55", "55", True),
    (r"1+2+\dots+10", "55", False),
    (r"\frac{10 \cdot 11}{2}", "55", False),
    (r"\prod_{i=1}^{5} i", "120", False),
    ("5!", "120", False),
    (r"5 \cdot 4!", "120", False),
    (r"\binom{10}{3}", "120", False),
    ("120", r"\binom{10}{3}", True),
    (r"\int_0^3 x^2 dx", "9", False),
    (r"\int_0^3 x^2\,dx = 9", "9", True),
    (r"\lim_{x \to 3} x^2", "9", False),
    (r"\lim_{x\to 0}\frac{\sin x}{x}", "1", False),
    (r"\frac{d}{dx} 9x", "9", False),
    (r"\sin^2 x + \cos^2 x", "1", False),
    (r"\sin\frac{\pi}{2}", "1", False),
    (r"\log_2 8", "3", False),
    (r"\ln e^3", "3", False),
    ("e^0", "1", False),
    (r"\gcd(12, 18)", "6", False),
    (r"\lfloor 5.7 \rfloor", "5", False),
    ("|-5|", "5", False),
    ("--5", "5", False),
    ("(5)", "5", True),
    (r"\left(5\right)", "5", True),
    (r"\mathbf{5}", "5", True),
    (r"\text{5}", "5", True),
    ("6=5", "5", False),
    ("5=6", "5", False),
    ("2+3=5", "5", True),
    ("5=2+3", "5", True),
    ("x=y=5", "5", True),
    ("x_1 = 5", "5", True),
    ("f(2) = 5", "5", True),
    (r"\angle ABC = 50^\circ", "50", True),
    ("x=6=5", "5", False),
    ("x=6, y=5", "5", False),
    (r"x=6 \text{ or } x=5", "5", False),
    (r"x \neq 5", "5", False),
    ("x != 5", "5", False),
    ("x < 5", "5", False),
    (r"x \geq 5", "5", False),
    (r"x \approx 5", "5", False),
    (r"\pm 5", "5", False),
    ("[5,5]", "5", False),
    ("(5,5)", "5", False),
    ("5,5", "5", False),
    ("5, 6", "5", False),
    ("5;6", "5", False),
    ("5_6", "5", False),
    ("10_5", "5", False),
    ("5x", "5", False),
    ("5 x", "5", False),
    ("0x+5", "5", False),
    ("5+0", "5", False),
    ("5+0i", "5", False),
    (r"5 \cdot 1", "5", False),
    ("5 million", "5", False),
    ("5 squared", "5", False),
    (r"5\text{ or }6", "5", False),
    ("5 apples", "5", True),
    (r"5\text{ m/s}", "5", True),
    ("5 km/h", "5", True),
    (r"5\,\mathrm{cm}^2", "5", True),
    (r"5\%", "0.05", True),
    (r"0.5\%", r"50\%", False),
    ("0.5", r"50\%", True),
    (r"\text{five}", "5", False),
    ("1{,}024", "1024", True),
    (r"1\,024", "1024", True),
    (r"\sqrt{4+4}", r"2\sqrt{2}", False),
    (r"\sqrt{2 \cdot 4}", r"2\sqrt{2}", False),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"(1+1)\sqrt{2}", r"2\sqrt{2}", False),
    (r"\int_0^{2} \sqrt{2} dx", r"2\sqrt{2}", False),
    (r"\frac{4}{\sqrt{2}}", r"2\sqrt{2}", True),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt{5}+1}{2}", True),
    (r"\frac{1}{2}+\frac{\sqrt{5}}{2}", r"\frac{1+\sqrt{5}}{2}", True),
    (r"\frac{3-2+\sqrt{5}}{2}", r"\frac{1+\sqrt{5}}{2}", False),
    (r"\pi/4", r"\frac{\pi}{4}", True),
    (r"\int_0^1 \frac{1}{1+x^2} dx", r"\frac{\pi}{4}", False),
    (r"0.25\pi", r"\frac{\pi}{4}", True),
    (r"\frac{2\pi}{4+4}", r"\frac{\pi}{4}", False),
    ("4+3i", "3+4i", False),
    ("4i+3", "3+4i", True),
    ("3 + (2+2)i", "3+4i", False),
    (r"3\ln 2", r"\ln 8", True),
    (r"\ln(2 \cdot 4)", r"\ln 8", False),
)

WRAPPERS = {"exact": "{}", "numeric": "{}", "last_number": "The answer is {}.", "boxed": "So \\boxed{{{}}}"}


class Report(NamedTuple):
    """Cases tried, and the (completion, reference) pairs judged wrongly."""

    cases: int
    false_positives: list[tuple[str, str]]
    false_negatives: list[tuple[str, str]]


def cases_of(verifier: str) -> list[tuple[str, str, bool]]:
    """The table in the form the verifier reads; numeric verifiers get the rows with a numeric reference only."""
    forms = FORMS + (WORK if verifier == "boxed" else ())
    rows = [(WRAPPERS[verifier].format(form), answer, right) for form, answer, right in forms]
    if verifier in ("last_number", "boxed"):  # what a box verifier is asked is always in a box
        rows += [row for row in COMPLETIONS if verifier == "last_number" or not row[2] or "\\boxed" in row[0]]
    if verifier in ("last_number", "numeric"):
        rows = [row for row in rows if parse_rational(row[1]) is not None]
    return rows


def judge(rows: list[tuple[str, str, bool]], accepted: Sequence[bool]) -> Report:
    """The report on these verdicts."""
    wrong = [(row[:2], verdict) for row, verdict in zip(rows, accepted) if verdict != row[2]]
    return Report(len(rows), [pair for pair, verdict in wrong if verdict], [pair for pair, verdict in wrong if not verdict])


def report(verifier: str, **options) -> Report:
    """The errors of the verifier on the table."""
    rows = cases_of(verifier)
    combined = rewards.combine([rewards.make(verifier, **options)])
    return judge(rows, combined([row[0] for row in rows], [row[1] for row in rows]).total == 1)


def compare() -> None:
    """Prints the errors of `boxed` and of other graders on the same boxes, as a table in Markdown."""
    rows = cases_of("boxed")
    print("| grader | cases | of them right | accepts wrong | rejects right |\n|---|---|---|---|---|")
    for name in ("boxed", "boxed, strict=False", *graders.GRADERS):
        try:
            result = (report("boxed", strict=name == "boxed") if name.startswith("boxed")
                      else judge(rows, graders.verdicts(name, [row[:2] for row in rows])))
        except ImportError as error:
            print(f"| {name} | not compared: {error} | | | |")
            continue
        print(f"| {name} | {result.cases} | {sum(row[2] for row in rows)} | {len(result.false_positives)} | "
              f"{len(result.false_negatives)} |")


def print_kinds() -> int:
    """Prints who judges further cases wrongly, by kind; returns how often the verifier in the first column of each table does.

    A verifier that cannot run here counts as wrong on all of its cases.
    """
    print("\nFurther cases by kind. Each cell: wrong ones accepted / right ones rejected; the first column is this package's.")
    total = mistakes = 0
    for cases, judges in ((answer_cases.ANSWER_CASES, answer_cases.ANSWER_JUDGES),
                          (answer_cases.NUMBER_CASES, answer_cases.NUMBER_JUDGES),
                          (answer_cases.STOP_CASES, answer_cases.STOP_JUDGES),
                          (program_cases.PROGRAM_CASES, program_cases.PROGRAM_JUDGES)):
        errors = judged(cases, judges)
        print(f"\n{table(cases, errors)}", flush=True)
        name, ours = next(iter(errors.items()))
        for verdict, side in zip(("accepts wrong", "rejects right"), ours or ()):
            for case in side:
                print(f"  {name} {verdict}: {case.completion!r} for {case.answer!r}")
        total, mistakes = total + len(cases), mistakes + (len(cases) if ours is None else sum(map(len, ours)))
    print(f"\n{total - mistakes} of {total} further cases are judged rightly by `boxed`, `last_number`, `format` and `code`.")
    return mistakes


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.audits.verifiers", description="What each verifier gets wrong.")
    parser.add_argument("--compare", action="store_true", help="the boxed verifier beside other graders, as a table")
    parser.add_argument("--attacks", action="store_true", help="hostile completions and programs, and what came of each")
    chosen = parser.parse_args(arguments)
    if chosen.compare:
        compare()
    elif chosen.attacks:
        return 0 if program_attacks.report() else 1
    else:
        print_errors()
        return 1 if print_kinds() else 0
    return 0


def print_errors() -> None:
    """Prints which rows of the table each verifier judges wrongly."""
    print("Each verifier on tricky answers. A false positive is a wrong answer that it accepts, a false negative a right one\n"
          "that it rejects. `exact`, `numeric` and `last_number` read no units or expressions by design;\n"
          "docs/guides/reward.md says what `boxed` gets wrong.\n")
    for verifier in WRAPPERS:
        result = report(verifier)
        print(f"{verifier}: {result.cases} cases, {len(result.false_positives)} false positives, "
              f"{len(result.false_negatives)} false negatives")
        for kind, pairs in (("accepts wrong", result.false_positives), ("rejects right", result.false_negatives)):
            for completion, answer in pairs:
                print(f"  {kind}: {completion!r} for {answer!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
