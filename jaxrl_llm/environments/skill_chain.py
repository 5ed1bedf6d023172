"""Two similar tasks in sequence; the second can use functions written for the first (SAGE, arXiv 2512.17102)."""
import ast
import dataclasses
import functools
import random
import re
from collections.abc import Callable, Hashable, Mapping

from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.parsers import fenced
from jaxrl_llm.environments.python_tool import python
from jaxrl_llm.environments.single import reader, scorer
from jaxrl_llm.environments.tools import Tool, pace, run
from jaxrl_llm.tasks.base import Problem, Task, disjoint_task

RULES = ("There are two tasks. Programs that you write in a ```python block are run, and you read what they print. Functions "
         "that you define for the first task can be called in the second one. Then give the number alone.")
LIBRARY = 20  # skills that are kept, the latest ones
WORDS = ("wug", "dax", "blick", "fep", "tove", "zib", "mip", "gorp")
_LINE = re.compile(r"\r\n|\r|\n")  # as Python's parser counts lines
FACTS = {"agent": "turn", "functional_group": "turn", "skill_used": "count"}


@dataclasses.dataclass
class Chain:
    """A problem, the current task (0, 1), its messages so far, and scores.

    `library`: sources of functions by name; `programs`: programs of the current task.
    """

    problem: Problem
    task: int = 0
    turns: int = 0
    scores: tuple[float, ...] = ()
    library: dict[str, str] = dataclasses.field(default_factory=dict)
    programs: list[str] = dataclasses.field(default_factory=list)


@environment
def skill_chain(*, size: int = 1000, heldout: int = 200, turns: int = 4, seed: int = 0, deadline: float = 5.0,
                memory_mb: int = 512, unsafe: bool = False) -> Environment:
    """Pairs of questions about one made-up function of numbers, for programs in ```python blocks.

    Top-level functions of the programs of the first task are shown before the second one, and its programs can call them. A
    message without a program is the answer; a task has at most `turns` messages. The return is the mean of both scores. The
    rewards of the tasks, `returns` in the info, add a bonus, see `skill_rewards`: the turns of task k belong to `agent` k.
    The fact `skill_used` is 1 if the second answer is given and its programs used a skill. Raises ValueError for fewer than
    two turns, SandboxError if programs cannot run.
    """
    if turns < 2:
        raise ValueError(f"turns={turns}; give at least 2, for a program and an answer")
    tool = python(deadline=deadline, memory_mb=memory_mb, unsafe=unsafe)
    step = functools.partial(_step, tool=tool, score=scorer("last_number"), read=reader("last_number"), limit=turns)
    return Environment(
        name="skill_chain", task=_pairs(size, heldout, seed), reset=_reset, step=step, facts=FACTS, **pace([tool]),
        oracle=_ideal, choices=lambda state: ["7", "```python\nprint(7)\n```", "```python\ndef wug(x):\n    return x\n```"])


def skill_rewards(first: float, second: float, used: bool) -> tuple[float, float]:
    """`R1 = r1 + [r1 = r2 = 1 and used]`, `R2 = r2 + [r2 = 1 and used]`: a useful skill earns a bonus in both tasks."""
    return first + float(first == second == 1 and used), second + float(second == 1 and used)


def skills(program: str) -> dict[str, str]:
    """The sources of the top-level functions of a program by name; empty if it is not valid Python."""
    lines, found = _LINE.split(program), {}
    for node in _parsed(program):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1:node.end_lineno])  # nothing else is on these lines
    return found


def uses(programs: list[str], library: Mapping[str, str]) -> bool:
    """Whether these programs call a function of the library that they do not define."""
    nodes = [node for program in programs for top in _parsed(program) for node in ast.walk(top)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool((called - {node.name for node in nodes if isinstance(node, ast.FunctionDef)}) & library.keys())


def _parsed(program: str) -> list[ast.stmt]:
    try:
        return ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a policy's text: nested too deep, a null byte
        return []


def _pairs(size: int, heldout: int, seed: int) -> Task:
    """Problems whose `extra` has both questions (`asked`), their `answers`, the function (`word`, `law`) and its `calls`."""
    chance, laws = random.Random(f"{seed} skills"), dict[tuple, None]()
    while len(laws) < size + heldout:
        numbers = chance.sample(range(10, 100), 3)
        laws[chance.choice(WORDS), chance.randint(2, 19), chance.randint(1, 99), *numbers] = None

    def build(pair: tuple, number: int) -> Problem:
        word, slope, shift, x, y, z = pair
        fx, fy, fz = (slope * value + shift for value in (x, y, z))
        first = f"The {word} of x is {slope} times x plus {shift}. What is the {word} of {x}?"
        second = f"What is the {word} of {y} plus the {word} of {z}? The {word} of x is {slope} times x plus {shift}."
        return Problem(({"role": "user", "content": f"{RULES}\n\n{first}"},), str(fx), number, extra={
            "asked": [first, second], "answers": [str(fx), str(fy + fz)], "word": word, "law": f"{slope} * x + {shift}",
            "calls": [f"{word}({x})", f"{word}({y}) + {word}({z})"]})

    pairs = list(laws)
    return disjoint_task("skill_chain", pairs[:size], pairs[size:], build, reward="environment")


def _reset(problem: Problem, key: int) -> tuple[Chain, list[Message]]:
    return Chain(problem), list(problem.prompt)  # type: ignore[arg-type]


def _ideal(state: Chain) -> str:
    """A program with a function for the first task, one that calls it for the second, and the answers."""
    extra = state.problem.extra
    if state.turns:
        return extra["answers"][state.task]
    defined = "" if state.task else f"def {extra['word']}(x):\n    return {extra['law']}\n"
    return f"```python\n{defined}print({extra['calls'][state.task]})\n```"


def _step(state: Chain, message: Message, *, tool: Tool, score: Callable[[str, Problem], float],
          read: Callable[[str], Hashable | None], limit: int) -> Turn:
    text, now, state.turns = message["content"], state.task, state.turns + 1
    calls = fenced(text)
    state.programs += [call.arguments["code"] for call in calls]
    if calls and state.turns < limit:
        before = "".join(f"{source}\n" for source in state.library.values())
        said = "\n".join(run([tool], call._replace(arguments={"code": before + call.arguments["code"]})).text for call in calls)
        return Turn([{"role": "user", "content": said}], info=_info(state, now))
    got = score(text, Problem("", state.problem.extra["answers"][now], 0)) if not calls and read(text) is not None else 0.0
    state.scores = (*state.scores, got)
    if now == 1:
        return Turn(reward=got / 2, done=True, info=_info(state, now))
    _learn(state)
    shown = "\n".join(state.library.values()) or "none"
    return Turn([{"role": "user", "content": f"Functions that you can call:\n{shown}\n\n{state.problem.extra['asked'][1]}"}],
                got / 2, info=_info(state, now))


def _learn(state: Chain) -> None:
    """Begins the second task with the functions of the first one."""
    for program in state.programs:
        for name, source in skills(program).items():
            state.library.pop(name, None)
            state.library[name] = source
    state.library = dict(list(state.library.items())[-LIBRARY:])
    state.task, state.turns, state.programs = 1, 0, []


def _info(state: Chain, task: int) -> dict:
    """The facts of a turn of a task, and the rewards of both tasks as far as they are known."""
    first, second = (*state.scores, 0.0, 0.0)[:2]
    used = len(state.scores) == 2 and uses(state.programs, state.library)
    return {"agent": task, "functional_group": task, "skill_used": int(used),
            "returns": list(skill_rewards(first, second, used))}
