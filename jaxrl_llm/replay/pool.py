"""Groups of completions that independent runs share through a folder, as text (SAPO, arXiv 2509.08721).

A node publishes a file for each of its batches, `NODE-STEP.json`, written under another name and then moved into place:

    {"format": "jaxrl_llm pool 1", "node": "a", "step": 7,
     "groups": [{"problem": "9f86d081884c7d65", "completions": ["12", "13"]}]}

`problem` is the digest of the prompt and the answer, see `digest`. Readers find the problem by it in their own task and score
completions with their own reward: they trust nothing that others write except the completions. Other files in the folder are
ignored and counted. Models, tokenizers and speeds of the nodes may differ.
"""
import dataclasses
import hashlib
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools import key_values
from jaxrl_llm.tools.registry import Conflict

FORMAT = "jaxrl_llm pool 1"
NODE = re.compile(r"[A-Za-z0-9_.]{1,64}")
_FILE = re.compile(r"([A-Za-z0-9_.]{1,64})-(\d{1,12})\.json")
_MOST_BYTES = 2**24    # of a file; larger files are not read
_MOST_FILES = 4096     # the newest files of a folder are read
_MOST_TEXT = 2**20     # characters of a completion


class Group(NamedTuple):
    """Completions of a problem of the reader's task, from a node at one of its steps."""

    problem: int
    completions: tuple[str, ...]
    node: str
    step: int


def digest(problem: Problem) -> str:
    """16 hexadecimal digits of SHA-256 over the prompt and the answer, as JSON."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
    return hashlib.sha256(json.dumps([prompt, problem.answer], sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass
class Pool:
    """A folder that this run shares as `node`.

    Files older than `max_age` seconds are ignored, and removed if they are the node's own. `problems`: the number in the
    reader's task by digest, see `of_task`. Raises ValueError for a name that no file can have.
    """

    folder: Path
    node: str
    problems: Mapping[str, int]
    max_age: float

    def __post_init__(self):
        if not NODE.fullmatch(self.node):
            raise ValueError(f"config.pool.node={self.node!r} names files; give 1 to 64 letters, digits, underscores and "
                             "points")
        self.folder.mkdir(parents=True, exist_ok=True)

    def publish(self, step: int, groups: Sequence[tuple[Problem, Sequence[str]]]) -> None:
        """Shares groups of a step; readers never see a partial file. Removes files of this node that are too old."""
        content = {"format": FORMAT, "node": self.node, "step": step, "groups": [
            {"problem": digest(problem), "completions": list(texts)} for problem, texts in groups]}
        own = self.folder / f"{self.node}-{step}.json"
        part = self.folder / f".{own.name}.{os.getpid()}"
        part.write_text(json.dumps(content), encoding="utf-8")
        os.replace(part, own)
        for path, age in self._files():
            if age > self.max_age and path.name.startswith(f"{self.node}-"):
                path.unlink(missing_ok=True)

    def read(self, group: int) -> tuple[list[Group], dict[str, int]]:
        """Groups of `group` completions that other nodes share, by node and step, and counts of ignored ones by reason."""
        groups, left = list[Group](), Counter[str]()
        files = sorted(self._files(), key=lambda entry: entry[1])[:_MOST_FILES]
        for path, age in files:
            name = _FILE.fullmatch(path.name)
            if name is None or name[1] == self.node:
                left["name"] += name is None and not path.name.startswith(".")
            elif age > self.max_age:
                left["old"] += 1
            else:
                self._of_file(path, name[1], int(name[2]), group, groups, left)
        return sorted(groups, key=lambda one: (one.node, one.step)), {name: count for name, count in left.items() if count}

    def _files(self) -> list[tuple[Path, float]]:
        """The entries of the folder with their age in seconds; files can vanish at any moment."""
        entries = []
        for path in self.folder.iterdir():
            try:
                entries.append((path, time.time() - path.lstat().st_mtime))
            except OSError:
                continue
        return entries

    def _of_file(self, path: Path, node: str, step: int, group: int, groups: list[Group], left: Counter) -> None:
        """Adds the groups of a file, or counts the reason why there are none."""
        content = _content(path)
        if content is None or content.get("format") != FORMAT or not isinstance(content.get("groups"), list):
            left["garbage"] += 1
            return
        for one in content["groups"]:
            texts = one.get("completions") if isinstance(one, dict) else None
            if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in texts):
                left["garbage"] += 1
            elif not isinstance(one.get("problem"), str) or one["problem"] not in self.problems:
                left["unknown"] += 1
            elif len(texts) != group:
                left["size"] += 1
            else:
                groups.append(Group(self.problems[one["problem"]], tuple(map(_well_formed, texts)), node, step))


def of_task(problems: Sequence[Problem]) -> dict[str, int]:
    """The numbers of training problems by digest; equal problems have the first number."""
    known: dict[str, int] = {}
    for number in range(len(problems)):
        known.setdefault(digest(problems[number]), number)
    return known


def _well_formed(text: str) -> str:
    """The text without unpaired surrogates, which JSON can contain and no tokenizer reads."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _content(path: Path) -> dict | None:
    """The object of a JSON file; None if it is not one, too large, or not a plain file; reading never blocks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MOST_BYTES:
                return None
            content = json.loads(file.read(_MOST_BYTES + 1))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


_ALONE = {
    "config.environment": "samples in an environment", "config.budget.utility": "has a budget",
    "replay": "replays rollouts of its own", "begins": "shows solutions", "needs.prior": "expects something of prompts",
    "sizes": "samples prompts unequally", "measured": "reads {1} of the sampler"}
CONFLICTS = tuple(
    Conflict(("config.pool.path", name), f"config.pool.path={{0}} shares groups as texts, and method {{method!r}} {what}",
             "leave it empty, or take another method, for example swarm_sapo") for name, what in _ALONE.items())


def keys(c: ConfigDict) -> None:
    """Groups of other runs."""
    c.pool = ConfigDict()              # groups of completions that independent runs share, as text
    c.pool.path = ""                   # folder of the pool, the same for all nodes; empty: nothing is shared
    c.pool.node = ""                   # unique name of this node; empty: the host's name and the seed
    c.pool.groups = 0                  # J, largest number of prompts per step with groups of other nodes; 0: half of per_step
    c.pool.max_age = 3600.0            # seconds after which a shared file is ignored


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value that cannot work."""
    yield from key_values.at_least(config, 0, "pool.groups")
    yield from key_values.seconds(config, "pool.max_age")
    if config.pool.path and not 0 < config.pool.groups < config.prompts.per_step:
        yield (f"config.pool.groups={config.pool.groups} of the prompts.per_step={config.prompts.per_step} come from the pool; "
               "give 1 or more, and leave one to this run")
