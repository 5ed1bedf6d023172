r"""A table of right and wrong answers in tricky forms, and what each verifier makes of them.

`python -m jaxrl_llm.rewards.self_test` prints, for each verifier, how many wrong answers it accepts (false positives)
and how many right ones it rejects (false negatives), and which. Some are meant: `exact` rejects every other spelling.
"""

from typing import NamedTuple

from jaxrl_llm import rewards
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

WRAPPERS = {"exact": "{}", "numeric": "{}", "last_number": "The answer is {}.", "boxed": "So \\boxed{{{}}}"}


class Report(NamedTuple):
    """Cases tried, and the (completion, reference) pairs judged wrongly."""

    cases: int
    false_positives: list[tuple[str, str]]
    false_negatives: list[tuple[str, str]]


def cases_of(verifier: str) -> list[tuple[str, str, bool]]:
    """The table in the form the verifier reads; numeric verifiers get the rows with a numeric reference only."""
    rows = [(WRAPPERS[verifier].format(form), answer, right) for form, answer, right in FORMS]
    if verifier in ("last_number", "boxed"):  # what a box verifier is asked is always in a box
        rows += [row for row in COMPLETIONS if verifier == "last_number" or not row[2] or "\\boxed" in row[0]]
    if verifier in ("last_number", "numeric"):
        rows = [row for row in rows if parse_rational(row[1]) is not None]
    return rows


def report(verifier: str, **options) -> Report:
    """What the verifier gets wrong on the table."""
    rows = cases_of(verifier)
    scores = rewards.combine([rewards.make(verifier, **options)])([row[0] for row in rows], [row[1] for row in rows])
    wrong = [(row, score) for row, score in zip(rows, scores.total) if (score == 1) != row[2]]
    return Report(len(rows), [row[:2] for row, score in wrong if score == 1],
                  [row[:2] for row, score in wrong if score != 1])


def main() -> None:
    for verifier in WRAPPERS:
        result = report(verifier)
        print(f"{verifier}: {result.cases} cases, {len(result.false_positives)} false positives, "
              f"{len(result.false_negatives)} false negatives")
        for kind, pairs in (("accepts wrong", result.false_positives), ("rejects right", result.false_negatives)):
            for completion, answer in pairs:
                print(f"  {kind}: {completion!r} for {answer!r}")


if __name__ == "__main__":
    main()
