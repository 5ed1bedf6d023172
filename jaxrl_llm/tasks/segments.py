"""Plain text as a task: its next segment, or one in the middle, is predicted after some thought (RLPT, arXiv 2509.19249)."""
import glob
import re
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.rewards.segments import BEGIN, END
from jaxrl_llm.tasks import jsonl
from jaxrl_llm.tasks.base import Problem, Task, disjoint_task, task
from jaxrl_llm.tools.files import expanded
from jaxrl_llm.tools.registry import one_of

MASK = "<mask>"  # in place of a segment
WORDS = {
    "next": "Read the text and predict what comes next.",
    "middle": f"Read the text and predict what stands in place of {MASK}."}
RULES = f" Think first, then write the prediction alone between {BEGIN} and {END}.\n\n"
MIDDLE = "middle"  # the fact of a problem: 1 for a segment in the middle, 0 for the next one
_SENTENCE = re.compile(r"(?:[^.!?\n]|[.!?](?![\"')\]]*\s))*(?:[.!?]+[\"')\]]*|\n|$)\s*")


class Item(NamedTuple):
    """A segment to predict: the text `before` it, the text `after` it ("" for the next one) and the `reference`."""

    before: str
    after: str
    reference: str


@task
def segments(*, path: str, kind: str = "both", context: int = 8, ahead: int = 4, heldout_fraction: float = 0.1,
             separator: str = "", brief: bool = False) -> Task:
    """Segments of the text files at `path`, a file or a pattern of files, which may be compressed.

    A segment is a sentence, or a line without an end of a sentence; a file is a document, or several with a line of `separator`
    between them. `kind`: the "next" segment behind at most `context` ones, whose reference is it and the `ahead` - 1 ones
    behind it; the "middle" one between such a context and the segment behind it; or "both" for each segment but the first and
    the last of a document. The fact `middle` says which. The last `heldout_fraction` of each document is held out: no trained
    item has words of it, unless the text repeats itself. `brief` prompts, for small models, are the text alone, and the whole
    completion is the prediction.

    Raises FileNotFoundError, and ValueError for an unknown kind, numbers out of range, a file that is not UTF-8, and documents
    of which none has three segments on each side.
    """
    one_of("kind of segments", kind, ("both", *WORDS))
    if context < 1 or ahead < 1 or not 0 < heldout_fraction < 1:
        raise ValueError(f"context={context}, ahead={ahead}, heldout_fraction={heldout_fraction}; give 1 segment or more "
                         "of the first two, and a share between 0 and 1")
    sides: tuple[dict[str, Item], dict[str, Item]] = ({}, {})
    kinds = tuple(WORDS) if kind == "both" else (kind,)
    for document in (one for file in _files(path) for one in documents(file, separator)):
        for side, some in zip(sides, items(segments_of(document), heldout_fraction, kinds, context, ahead)):
            side.update({_words(item, brief): item for item in some})
    train = list(sides[0].items())
    heldout = [(words, item) for words, item in sides[1].items() if words not in sides[0]]
    if not train or not heldout:
        raise ValueError(f"the documents of {path} make {len(train)} training and {len(heldout)} held-out items; give text "
                         f"with at least three sentences before its last {heldout_fraction:g} and two in it, or raise "
                         "heldout_fraction")

    def build(one: tuple[str, Item], number: int) -> Problem:
        words, item = one
        prompt = words if brief else ({"role": "user", "content": words},)
        return Problem(prompt, item.reference.strip(), number, extra={MIDDLE: int(bool(item.after))})

    made = disjoint_task("segments", train, heldout, build, "segment_prefix(tags=False)" if brief else "segment_prefix")
    return Task(made.name, made.train, made.heldout, made.reward, facts=(MIDDLE,))


def segments_of(document: str) -> list[str]:
    """The segments of a document with the white space behind them: joined they are the document, from its first word on."""
    return [match[0] for match in _SENTENCE.finditer(document.lstrip()) if match[0].strip()]


def items(parts: list[str], heldout_fraction: float, kinds: tuple[str, ...], context: int, ahead: int
          ) -> tuple[list[Item], list[Item]]:
    """`(train, held out)`: the items of one document, of which the held-out ones predict segments of its last fraction."""
    cut = len(parts) - max(round(heldout_fraction * len(parts)), 2)

    def made(first: int, end: int) -> list[Item]:
        """The items of the segments `first` to `end - 2`, of a text that ends before segment `end`."""
        found = []
        for place in range(max(first, 1), end - 1):
            before = "".join(parts[max(place - context, 0):place])
            found += [Item(before, "", "".join(parts[place:min(place + ahead, end)]))] if "next" in kinds else []
            found += [Item(before, parts[place + 1], parts[place])] if "middle" in kinds else []
        return found

    return made(1, cut), made(cut, len(parts))


def documents(file: str, separator: str) -> list[str]:
    """The documents of a file; ValueError with its name for bytes that are not UTF-8."""
    try:
        with jsonl.opened(file) as stream:
            text = stream.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error}; convert it first") from error
    if not separator:
        return [text]
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip() == separator:
            parts.append([])
        else:
            parts[-1].append(line)
    return ["\n".join(part) for part in parts]


def _files(path: str) -> list[str]:
    """The files at a path or of a pattern, in their order; FileNotFoundError if there are none."""
    whole = str(expanded(path))
    matched = [whole] if Path(whole).is_file() else sorted(glob.glob(whole, recursive=True))
    found = [file for file in matched if Path(file).is_file()]
    if not found:
        raise FileNotFoundError(f"config.task segments(path={path!r}): there is no such file; give a text file, or a pattern "
                                "such as 'books/*.txt'")
    return found


def _words(item: Item, brief: bool) -> str:
    """The words of a prompt."""
    text = f"{item.before}{MASK} {item.after}" if item.after else item.before
    return text if brief else WORDS[MIDDLE if item.after else "next"] + RULES + text
