"""The two records every task is made of: a problem with a checkable answer, and a task with two disjoint sources."""
import dataclasses
import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.tools import registry

Messages = tuple[dict[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt and its reference answer.

    `prompt` is raw text (a `str`, fed to the policy as it is) or chat messages (a tuple of `{"role", "content"}` dicts,
    to be rendered by a chat template). `id` is the position of the problem in its task: training problems are
    `0 .. len(train) - 1`, held-out ones follow, so ids index per-prompt tables and never collide. A problem that a topology
    made has an id below 0 and is in no table. `task` is the number of its task in a run of several tasks. `place` says in words
    where it was read, such as a file and a line.
    """

    prompt: str | Messages
    answer: str
    id: int
    level: str = ""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    task: int = 0
    place: str = dataclasses.field(default="", compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class ProblemSource(Sequence):
    """Random-access problems: `source[i] == build(items[i], first_id + i)`, made when asked for."""

    items: Sequence
    build: Callable[[Any, int], Problem]
    first_id: int = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"problem {index} of a source of {len(self)}")
        return self.build(self.items[position], self.first_id + position)


@dataclasses.dataclass(frozen=True)
class Task:
    """`train` and `heldout` never share a problem; `reward` names the verifier that fits (see `jaxrl_llm.rewards`).

    `parts`: the tasks that it is a mixture of, see `mixture`; empty for a single task. `facts`: names of numbers that every
    `Problem.extra` holds, for methods that read them as entries f32[P] of `Rollouts.extras`.
    """

    name: str
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    reward: str
    parts: "tuple[Part, ...]" = ()
    facts: tuple[str, ...] = ()


TASKS = registry.PartTable("task", Task)
task = TASKS.enter


class Part(NamedTuple):
    """One of several tasks, with its `label`; `weight`: its share of every batch, relative to the other weights."""

    label: str
    task: Task
    weight: float = 1.0


def text_of(problem: Problem) -> str:
    """The words of a prompt, whatever its form: the raw text, or the messages' contents joined by newlines."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n".join(message["content"] for message in problem.prompt)


def front_of(problems: Iterable[Problem]) -> int:
    """The number of messages that all problems of a task begin with, such as a system message; never the last of a prompt."""
    first: Messages | None = None
    count = 0
    for problem in problems:
        if isinstance(problem.prompt, str):
            return 0
        first, count = (problem.prompt, len(problem.prompt)) if first is None else (first, count)
        count = min(count, len(problem.prompt) - 1)
        while first[:count] != problem.prompt[:count]:
            count -= 1
        if count == 0:
            return 0
    return count


def fronts_of(parts: Iterable[Part]) -> list[int]:
    """`front_of` all problems of each task."""
    return [front_of(itertools.chain(part.task.train, part.task.heldout)) for part in parts]


def check_each(problems: Iterable[Problem], check: Callable[[Problem], object]) -> None:
    """Checks every problem; raises ValueError with the place of the first that fails."""
    for problem in problems:
        try:
            check(problem)
        except ValueError as error:
            place = problem.place or f"problem {problem.id}"
            raise ValueError(f"{place}: {error}. Correct it, or remove it from the data") from error


def question_of(problem: Problem, front: int = 0) -> str:
    """What a problem asks, equal for prompts that differ in case and white space alone.

    The first `front` messages are left out, see `front_of`: a system message or worked examples do not make a problem another
    one. Problems that a seed tells apart (`seeded`) ask for their seeds.
    """
    prompt = problem.prompt
    words = prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt[front:])
    seed = f" {problem.extra['seed']}" if problem.extra.keys() == {"seed"} and not problem.answer else ""
    return " ".join(words.split()).casefold() + seed


def disjoint_task(name: str, train: list, heldout: list, build: Callable[[Any, int], Problem], reward: str) -> Task:
    """The task of two lists of raw items, ids running through both; ValueError when a side has nothing in it."""
    for side, items in (("training", train), ("held-out", heldout)):
        if not items:
            raise ValueError(f"task {name!r} has no {side} problems ({len(train)} training, {len(heldout)} held-out); "
                             "use more problems or another held-out share")
    return Task(name, ProblemSource(train, build), ProblemSource(heldout, build, len(train)), reward)


def seeded(name: str, words: str, train: int, heldout: int) -> Task:
    """Problems given by seeds (`extra["seed"]`), from which something else makes them; all have the prompt `words`."""
    def build(seed: int, number: int) -> Problem:
        return Problem(({"role": "user", "content": words},), "", number, extra={"seed": seed})

    return disjoint_task(name, list(range(train)), list(range(train, train + heldout)), build, reward="environment")


def optional(package: str, extra: str = "tasks", user: str = "") -> Any:
    """Imports and returns a package; if it is missing, ValueError names its user and the extra that installs it.

    `user`: a word for what needs the package, by default a task or an environment, as the extra says.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and lacks something itself
            raise
        user = user or ("task" if extra in ("tasks", "data") else "environment")
        raise ValueError(f"this {user} needs the package {package.replace('_', '-')}, "
                         f"which is not installed: pip install 'jaxrl_llm[{extra}]'") from error


def split_position(key: str) -> float:
    """A number in [0, 1) fixed by the problem's words alone; below the held-out fraction a problem is held out."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
