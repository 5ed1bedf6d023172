"""SWE-RL: how similar the patch of an answer is to the true one, without running anything (arXiv 2502.18449)."""
import difflib
from collections.abc import Iterator, Mapping

from jaxrl_llm.rewards import needs
from jaxrl_llm.rewards.base import BatchOutput
from jaxrl_llm.rewards.isolated import Isolated

FORMAT_ERROR = -1.0
MAX_CONTENT = 1 << 20  # characters of an edited file
_TAGS = ("<think>", "</think>", "<solution>", "</solution>")
_SEARCH, _MIDDLE, _END = "\n<<<<<<< SEARCH\n", "\n=======\n", "\n>>>>>>> REPLACE\n```"


def parse_edits(completion: str) -> list[tuple[str, str, str]]:
    """(path, search, replace) of every edit in the solution; ValueError when the answer does not have the required form.

    Each of <think>, </think>, <solution>, </solution> occurs once, the thought is not empty, and the solution holds
    fenced blocks of a line `### path`, then SEARCH, ======= and REPLACE markers.
    """
    for tag in _TAGS:
        if completion.count(tag) != 1:
            raise ValueError(f"{tag} must occur exactly once")
    thought, solution = (completion.partition(start)[2].partition(end)[0] for start, end in (_TAGS[:2], _TAGS[2:]))
    edits = list(_blocks(solution))
    if not thought.strip() or not edits:
        raise ValueError("the thought is empty" if edits else "no search/replace block")
    return edits


def _blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """(path, search, replace) of the fenced blocks of a text, each read once from left to right."""
    position = begin = 0  # of the rest of the text, and of where a SEARCH is looked for in it
    while (search := text.find(_SEARCH, begin)) >= 0:
        header = text.rfind("\n", position, search)  # of the line `### path`, after the line of the fence
        fence = text.rfind("\n", position, header) + 1 if header >= 0 else -1
        begin = search + len(_SEARCH) - 1
        if header < 0 or "```" not in text[max(fence, position):header] or not text.startswith("### ", header + 1):
            continue
        middle = text.find(_MIDDLE, begin + 1)
        end = text.find(_END, middle + len(_MIDDLE)) if middle >= 0 else -1
        if end < 0:
            return  # nor does any later block have an end
        yield text[header + len("\n### "):search], text[begin + 1:middle], text[middle + len(_MIDDLE):end]
        position = begin = end + len(_END)


def apply_edits(files: Mapping[str, str], edits: list[tuple[str, str, str]]) -> dict[str, str]:
    """New contents of the edited files; ValueError for an edit that cannot be applied.

    Text is found at the start of a line only, so that indentation has to match, and replaced wherever it occurs. An empty
    search fills a file that is new or empty. An edit is refused if it changes nothing, if its search is not there, or if the
    file becomes longer than `MAX_CONTENT`.
    """
    changed: dict[str, str] = {}
    for path, old, new in edits:
        content = "\n" + changed.get(path, files.get(path, ""))
        places = content.count("\n" + old) if old or content == "\n" else 0
        if old == new or not places:
            raise ValueError(f"{path}: the search text is not in the file, or equals its replacement")
        if len(content) - 1 + places * (len(new) - len(old)) > MAX_CONTENT:
            raise ValueError(f"{path}: the file has more than {MAX_CONTENT} characters after the edit")
        changed[path] = content.replace("\n" + old, "\n" + new)[1:]
    return changed


def diffs(files: Mapping[str, str], changed: Mapping[str, str]) -> dict[str, str]:
    """Unified diff (3 lines of context, no file header) of each file that differs."""
    result = {}
    for path, content in changed.items():
        lines = difflib.unified_diff(files.get(path, "").splitlines(), content.splitlines(), lineterm="")
        if body := "\n".join(list(lines)[2:]):
            result[path] = body
    return result


def patch_similarity(predicted: Mapping[str, str], true: Mapping[str, str]) -> float:
    """Mean over the files of either patch of `2 M / (characters of both)`, M the matching characters; 0 for one-sided.

    1 when both patches are empty. Not symmetric: the predicted diff comes first. Quadratic time in the worst case.
    """
    paths = predicted.keys() | true.keys()
    ratios = [difflib.SequenceMatcher(None, predicted[path], true[path], autojunk=False).ratio()
              for path in predicted.keys() & true.keys()]
    return sum(ratios) / len(paths) if paths else 1.0


def swe_rl_reward(completion: str, answer: str, problem) -> float:
    """`patch_similarity` in [0, 1], or -1 for an answer that does not have the required form or cannot be applied.

    `problem.extra["files"]` maps paths to the old contents, `problem.extra["new_files"]` to the true new ones. It takes long
    for long patches: `rewards.make("swe_rl")` runs it in processes with a deadline.
    """
    files = problem.extra["files"]
    try:
        changed = apply_edits(files, parse_edits(completion))
    except ValueError:
        return FORMAT_ERROR
    return patch_similarity(diffs(files, changed), diffs(files, problem.extra["new_files"]))


class Patches(Isolated):
    """Batch reward: `swe_rl_reward` in worker processes. Time-outs, crashes and errors score -1 and are counted.

    Raises ValueError for problems without `files` and `new_files`.
    """

    def __init__(self, workers: int | None, deadline: float):
        super().__init__(f"{__name__}:swe_rl_reward", workers, deadline, failed=FORMAT_ERROR)

    def __call__(self, completions, answers, problems, until: float | None = None, fail_fast: bool = False) -> BatchOutput:
        for problem in problems:
            needs.repositories(problem)
        return super().__call__(completions, answers, problems, until, fail_fast)
