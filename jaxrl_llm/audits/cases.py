"""A case of the self-test, and the table of who judges cases of which kind wrongly."""
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A completion, the reference answer and the `extra` of its problem, whether it is right, and the `kind` of mistake."""

    kind: str
    completion: str
    answer: str
    right: bool
    extra: Mapping[str, Any] = {}


Errors = tuple[list[Case], list[Case]]  # accepted though wrong, rejected though right
Judge = Callable[[Sequence[Case]], list[bool]]  # whether each case is accepted; ImportError where its package is absent


def wrong(cases: Sequence[Case], verdicts: Sequence[bool]) -> Errors:
    """The cases that are accepted though wrong, and those that are rejected though right."""
    pairs = [(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict != case.right]
    return [case for case, verdict in pairs if verdict], [case for case, verdict in pairs if not verdict]


def judged(cases: Sequence[Case], judges: Mapping[str, Judge]) -> dict[str, Errors | None]:
    """The errors of each judge; None for a judge whose package is absent."""
    return {name: _errors(cases, judge) for name, judge in judges.items()}


def table(cases: Sequence[Case], errors: Mapping[str, Errors | None]) -> str:
    """A table in Markdown: for each kind and judge, "wrong ones accepted / right ones rejected"."""
    kinds = list(dict.fromkeys(case.kind for case in cases))
    lines = ["| kind | cases | of them right | " + " | ".join(errors) + " |", "|---|---|---|" + "---|" * len(errors)]
    for kind in [*kinds, "all"]:
        rows = _of(kind, cases)
        cells = ["absent" if sides is None else " / ".join(str(len(_of(kind, side))) for side in sides)
                 for sides in errors.values()]
        lines.append(f"| {kind} | {len(rows)} | {sum(case.right for case in rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _of(kind: str, cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if kind in (case.kind, "all")]


def _errors(cases: Sequence[Case], judge: Judge) -> Errors | None:
    try:
        return wrong(cases, judge(cases))
    except ImportError:
        return None
