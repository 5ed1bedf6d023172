r"""How a dialogue with tools ends: void turns, answers that programs print, the last turn, and checks of answers."""
import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.environments.tools import Call
from jaxrl_llm.rewards.math import last_boxed

CHECK = ("You have given an answer. Pause and think again. If the task is done, check the answer, revise it if needed, and "
         "give the final answer; if not, continue with the task.")
LAST = "This is the last turn: give the final answer now."
_ANSWER = re.compile(r"<answer>.*?</answer>", re.DOTALL)


class Endings(NamedTuple):
    r"""Rules beside the usual one, by which a message without calls ends the dialogue.

    checks: answers that the policy reads `CHECK` after, before an answer ends the dialogue (TTI, arXiv 2506.07976).
    void: a turn that `is_void` ends the dialogue (SimpleTIR, arXiv 2509.02479).
    printed: a `\boxed{}` ends the dialogue as its answer, beside a call and in what a call returns (SimpleTIR).
    asks: the policy reads `LAST` before the last turn, of the environment or of the run (SimpleTIR).
    """

    checks: int = 0
    void: bool = False
    printed: bool = False
    asks: bool = False


def check(endings: Endings, turns: int) -> None:
    """Raises ValueError for more checks than a dialogue of so many turns has room for."""
    if not 0 <= endings.checks < turns:
        raise ValueError(f"checks={endings.checks} of answers in a dialogue of turns={turns}; give 0 to {turns - 1}")


def is_void(text: str, calls: Sequence[Call]) -> bool:
    r"""Whether a message of the policy has neither a readable call nor a closed `\boxed{}` or `<answer></answer>`.

    A message is void that has malformed calls alone, or an answer that a verifier reads without a box.
    """
    return all(call.error for call in calls) and last_boxed(text) is None and _ANSWER.search(text) is None
