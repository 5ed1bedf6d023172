"""The record of a run in phases: which have begun, and after which step."""
import json
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.store.lines import naming, replace_text
from jaxrl_llm.tools import files

FILE_NAME = "phases.json"


class Begun(NamedTuple):
    """A phase that has begun: its `name`, and the number of steps of the whole run before its first one."""

    name: str
    start: int


def read_begun(folder: Path) -> list[Begun]:
    """The phases of the run in `folder` that have begun, in their order; none for a run without phases.

    Raises ValueError for a file that no run has written.
    """
    content = files.read_object(folder, FILE_NAME)
    try:
        return [Begun(str(one["name"]), int(one["start"])) for one in (content or {"phases": []})["phases"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / FILE_NAME} is no record of phases ({error!r}); restore it, or choose another --workdir"
                         ) from error


def write_begun(folder: Path, begun: list[Begun]) -> None:
    """Replaces the record in one step."""
    with naming(f"write {folder / FILE_NAME}"):
        replace_text(folder / FILE_NAME, json.dumps({"phases": [one._asdict() for one in begun]}, indent=1) + "\n")


def up_to(begun: list[Begun], step: int) -> list[Begun]:
    """The phases up to the one that made this step of the run; the first one made step 0."""
    return [one for number, one in enumerate(begun) if not number or one.start < step]
