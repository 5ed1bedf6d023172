r"""Mathematical answers: the last \boxed{}, compared as text, as rationals, and by math-verify in worker processes."""

import re
import threading
from fractions import Fraction

import numpy as np

from jaxrl_llm.rewards.base import BatchOutput, RewardError
from jaxrl_llm.rewards.evaluated import number_verdict, ungrouped, work_left
from jaxrl_llm.rewards.pool import WorkerPool
from jaxrl_llm.rewards.rational import parse_rational

CANARIES = (("x^2+2x+1", "(x+1)^2", True), ("x+1", "x+2", False), (r"\{1,2\}", r"\{2,1\}", True))
MAX_GIVEN = 1000  # characters
_PATIENCE = 3  # how often the canaries are judged before a late one counts as a wrong judgement
_SPACING = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\{,\}")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or None when there is none or its braces do not close.

    Braces are counted from the box's own; `\{` and `\}` are not counted. An unclosed last box never falls back to an
    earlier one.
    """
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = position = start + len(r"\boxed{")
    depth = 1
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[begin:position].strip()
        position += 1
    return None


def normalise(text: str) -> str:
    r"""Layout only: dollars and a final full stop, `\left \right`, thin spaces, `\dfrac`, runs of white space."""
    text = _SPACING.sub(lambda match: "," if match.group() == "{,}" else "", text.replace(r"\$", ""))
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return " ".join(text.split()).lstrip("$ ").rstrip("$ .")


def quick_verdict(answer: str, given: str, strict: bool = True) -> bool | None:
    """Equal as text, or (un)equal as two numbers; None when only a symbolic check can tell.

    `strict`: if the answer is a number or another constant, an expression that is not worked out yet is wrong (see
    `jaxrl_llm.rewards.evaluated`). Two numbers with a space between them (1 000) are not a number; the symbolic checker would
    multiply them. A text too long to be an answer is wrong: the symbolic checker would not return.
    """
    answer, given = normalise(answer), normalise(given)
    if answer in (given, ungrouped(answer, given)):
        return True
    if not given or len(given) > MAX_GIVEN or (re.search(r"\d\s+\d", given) and "frac" not in given):
        return False
    if strict:
        verdict = number_verdict(answer, given)
        return False if verdict is None and work_left(answer, given) else verdict
    numbers = parse_rational(answer), parse_rational(given)
    return None if None in numbers else numbers[0] == numbers[1]


def boxed_answer(completion: str) -> Fraction | str | None:
    r"""The last `\boxed{}` as an exact rational, else as normalised text; None without one.

    Expressions that are equal only for a symbolic checker count as different answers.
    """
    answer = normalise(last_boxed(completion) or "")
    return None if not answer else answer if (number := parse_rational(answer)) is None else number


class Boxed:
    r"""Batch reward: 1 when the last `\boxed{}` of a completion equals the answer.

    Order: `quick_verdict`, then math-verify, each distinct pair once. Time-outs, crashes and errors of the
    symbolic check score 0 and are counted. Before the first symbolic check the canaries must be judged right;
    otherwise a RewardError is raised, whatever `on_error`.
    """

    def __init__(self, workers: int | None, deadline: float, strict: bool):
        self._strict = strict
        self._pool = WorkerPool("jaxrl_llm.rewards.symbolic:symbolic_equal", workers, deadline, restricted=True)
        self._tested = False
        self._lock = threading.Lock()

    def __call__(self, completions, answers, problems, until: float | None = None) -> BatchOutput:
        pairs = [(answer, last_boxed(completion)) for completion, answer in zip(completions, answers)]
        verdicts = {pair: False if pair[1] is None else quick_verdict(*pair, self._strict) for pair in dict.fromkeys(pairs)}
        open_pairs = [pair for pair, verdict in verdicts.items() if verdict is None]
        counts = {"no_answer": sum(given is None for _, given in pairs), "timeout": 0, "crash": 0, "error": 0,
                  "late": 0}
        if open_pairs:
            self._check_canaries(until)
        asked = [(answer, ungrouped(answer, given)) for answer, given in open_pairs]
        for pair, outcome in zip(open_pairs, self._pool.map(asked, until)):
            verdicts[pair] = outcome.value is True
            if outcome.status != "ok":
                counts[outcome.status] += pairs.count(pair)
        return BatchOutput(np.array([verdicts[pair] for pair in pairs], np.float32), counts)

    def close(self) -> None:
        self._pool.close()

    def _check_canaries(self, until: float | None) -> None:
        with self._lock:
            if self._tested:
                return
            for _ in range(_PATIENCE):  # a busy machine or a first import does not mean a broken checker
                outcomes = self._pool.map([(answer, given) for answer, given, _ in CANARIES], until)
                if all(outcome.status != "timeout" for outcome in outcomes):
                    break
            if any(outcome.status == "late" for outcome in outcomes):
                return  # the batch is over, and so is its judgement
            for (answer, given, expected), outcome in zip(CANARIES, outcomes):
                if outcome.value is not expected:
                    raise RewardError(f"the symbolic checker judged {given!r} against {answer!r} as {outcome}, "
                                      f"expected {expected}; check the installation of math-verify, and whether the "
                                      "deadline leaves it time on this machine")
            self._tested = True
