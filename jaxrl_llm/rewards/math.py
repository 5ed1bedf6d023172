r"""Mathematical answers: the last \boxed{}, compared as text, as rationals, and by math-verify in worker processes."""
import itertools
import re
import threading
from fractions import Fraction

import numpy as np

from jaxrl_llm.rewards.base import BatchOutput, RewardError
from jaxrl_llm.rewards.evaluated import doubted, number_verdict, other_label, other_words, read, ungrouped, work_left
from jaxrl_llm.rewards.pool import WorkerPool
from jaxrl_llm.rewards.rational import FRAC, parse_rational
from jaxrl_llm.rewards.spelling import compact, normalise
from jaxrl_llm.rewards.surroundings import bare, stated

CANARIES = (("x^2+2x+1", "(x+1)^2", True), ("x+1", "x+2", False), (r"\{1,2\}", r"\{2,1\}", True))
MAX_GIVEN = 1000  # characters
_PATIENCE = 3  # how often the canaries are judged before a late one counts as a wrong judgement
_BOX = re.compile(r"\\boxed(?![A-Za-z])\s*")
_BARE = re.compile(rf"[-+\u2212]?\s?(?:{FRAC}|\d+(?:[.,]\d+)*|\.\d+)|\\[A-Za-z]+|[A-Za-z](?![A-Za-z])")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, `\boxed {...}` or `\boxed 5`; None without one, or if its braces do not close.

    Braces are counted from the box's own; `\{` and `\}` are not counted. An unclosed last box never falls back to an
    earlier one; a `\boxed` that nothing follows which could be in a box is no box.
    """
    end = len(text)
    while (end := text.rfind(r"\boxed", 0, end)) >= 0:
        if (box := _BOX.match(text, end)) is None:
            continue
        if text[box.end():box.end() + 1] == "{":
            close = _closing(text, box.end())
            return None if close is None else text[box.end() + 1:close].strip()
        if bare := _BARE.match(text, box.end()):
            return _with_arguments(text, bare).strip()
    return None


def _with_arguments(text: str, bare: re.Match) -> str:
    """The match and, behind a command, its arguments in braces."""
    end = bare.end()
    while bare.group().startswith("\\") and text[end:end + 1] == "{" and (close := _closing(text, end)):
        end = close + 1
    return text[bare.start():end]


def _closing(text: str, opening: int) -> int | None:
    """Where the brace at `opening` is closed; None if it is not."""
    depth, position = 0, opening
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position
        position += 1
    return None


def spelled(answer: str, given: str) -> tuple[str, str]:
    """The reference and a box in one spelling; of a sentence its formula, unless the box repeats the reference's sentence."""
    formula = stated(answer)
    if formula == answer or answer not in given:
        answer = formula
        given = given if len(given) > MAX_GIVEN or doubted(given) else stated(given)
    return normalise(answer), normalise(given)


def quick_verdict(answer: str, given: str, strict: bool = True) -> bool | None:
    """Equal as text, or (un)equal as two numbers; None when only a symbolic check can tell.

    `strict`: if the answer is a number or another constant, an expression that is not worked out yet is wrong (see
    `jaxrl_llm.rewards.evaluated`), as are words that doubt the answer or change its value. Digits with a space between them
    that are not one number (12 34) are wrong; the symbolic checker would multiply them. A text too long to be an answer is
    wrong: the symbolic checker would not return.
    """
    answer, given = spelled(answer, given)
    right, boxed = compact(answer), compact(given)
    if right == boxed or (boxed[:1] != "(" and right == compact(ungrouped(answer, given))):  # (12,144) is a pair
        return True
    if not given or len(given) > MAX_GIVEN:
        return False
    if re.search(r"\d\s+\d", given) and "frac" not in given and not read(given.rpartition("=")[2]):
        return False
    if strict:
        if (verdict := number_verdict(answer, given)) is not None:
            return verdict
        if other_words(answer, given) or other_label(answer, given) or work_left(answer, given):
            return False
        return True if right in map(compact, bare(given)) else None
    numbers = parse_rational(answer), parse_rational(given)
    return None if None in numbers else numbers[0] == numbers[1]


def boxed_answer(completion: str) -> Fraction | str | None:
    r"""The last `\boxed{}` as an exact rational, else as normalised text; None without one.

    Expressions that are equal only for a symbolic checker count as different answers.
    """
    answer = normalise(last_boxed(completion) or "")
    return None if not answer else compact(answer) if (number := parse_rational(answer)) is None else number


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
        counts = {"no_answer": sum(given is None for _, given in pairs), "timeout": 0, "crash": 0, "error": 0, "late": 0}
        if open_pairs:
            self._check_canaries(until)
        asked = [(answer, ungrouped(answer, given), self._strict) for answer, given in itertools.starmap(spelled, open_pairs)]
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
