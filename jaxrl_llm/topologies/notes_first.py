"""The policy takes notes, answers from them, and learns the shortest good answer (SOPHIA, arXiv 2507.16814)."""
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.forest import Forest, trim
from jaxrl_llm.tools.ranges import SHARE, Range
from jaxrl_llm.topologies.acts import Begin
from jaxrl_llm.topologies.base import Plan, Topology, asked, group_sizes, topology
from jaxrl_llm.topologies.wording import TASK_ALONE, WHOLE, Encode, fitting, template_of, worded

NOTES = "Take notes on the problem, without an answer.\n\n{prompt}"
ANSWER = "{prompt}\n\nNotes: {notes}\n\nAnswer from the notes.\n\n{prompt}"


class Selected(NamedTuple):
    """`rates` f64[P, K], the share of right answers from each note; `chosen` bool[P, K, N], the answers to learn."""

    rates: np.ndarray
    chosen: np.ndarray


def selected(right: np.ndarray, length: np.ndarray, valid: np.ndarray, alpha: float) -> Selected:
    """The shortest right answer of each problem from a note whose share of right ones is above `alpha`; ties: the first.

    `right`, `valid` bool[P, K, N], `length` i[P, K, N] of N answers from K notes.
    """
    rates = np.sum(right & valid, axis=2) / np.maximum(valid.sum(2), 1)
    able = right & valid & (rates > alpha)[..., None]
    flat = np.where(able, length, np.iinfo(np.int64).max).reshape(len(able), -1)
    first = np.arange(flat.shape[1]) == flat.argmin(1)[:, None]
    return Selected(rates, first.reshape(able.shape) & able)


@topology(takes={"encode": "encode"}, conflicts=(TASK_ALONE, WHOLE),
          ranges={"answers": Range(1), "alpha": SHARE, "reads": Range(1)})
def notes_first(prompts: int, *, group: int, encode: Encode, answers: int = 4, alpha: float = 0.5, notes: str = NOTES,
                answer: str = ANSWER, reads: int = 1024) -> Topology:
    """`prompts` problems with `group` notes each, and `answers` answers from each note, of which one at most has reward 1.

    The reward of a note is the share of right answers from it. Of the answers from notes with more than `alpha`, the shortest
    right one has reward 1, and all others 0. Answers lie under the plain prompt, with the role ELSEWHERE; notes are left out.
    The policy reads the templates `notes` and `answer`; a prompt that has more than `reads` tokens in `notes` gets no notes,
    and notes with which it has more than `reads` in `answer` get no answer.
    Metrics: `notes/reward`, the mean share of right answers; `notes/good`, the share of notes above `alpha`. The numbers are
    ours: those of the paper could not be read.
    """
    notes, answer, told = template_of(notes, "prompt"), template_of(answer, "notes", "prompt"), dict[str, float]()

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        if not asked(forest).any():
            asks = [(row, fitting(encode, worded(problem, notes), reads)) for row, problem in enumerate(forest.problems)]
            return Plan(acts=tuple(Begin(row, group, reads=ids) for row, ids in asks if ids))
        if (group_sizes(forest) > group).any():
            return Plan()
        found = [(row, fitting(encode, worded(forest.problems[row], answer, notes=forest.texts[end]), reads))
                 for end in forest.ends.tolist() for row in [int(forest.prompt[end])]]
        return Plan(acts=tuple(Begin(row, answers, reads=ids) for row, ids in found if ids))

    def finish(forest):
        place = _places(forest)
        forest = trim(forest, place >= group)
        ends, place = forest.ends, place[place >= group] - group
        cells = forest.prompt[ends], place // answers, place % answers
        shape = (len(forest.problems), group, answers)
        right, valid, length = np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape, np.int64)
        right[cells], valid[cells], length[cells] = forest.solved[ends], True, forest.length[ends]
        rates, chosen = selected(right, length, valid, alpha)
        rewards, there = forest.rewards.copy(), valid.any(2)
        rewards[ends] = chosen[cells]
        told.clear()
        if there.any():
            told.update({"notes/reward": float(rates[there].mean()), "notes/good": float((rates[there] > alpha).mean())})
        return forest.with_columns(rewards=rewards)

    return Topology(plan, lambda forest: group_sizes(forest) > 0, group * (1 + answers), lambda forest: dict(told), finish,
                    reads=reads)


def _places(forest: Forest) -> np.ndarray:
    """i64[R], the number of each trajectory within its prompt, in the order of `ends`."""
    owner = forest.prompt[forest.ends]
    return np.arange(len(owner)) - np.searchsorted(owner, owner)
