"""Small repositories with one wrong line, made from a seed, and patches of them: SWE-RL's kind of task (arXiv 2502.18449)."""
import random

from jaxrl_llm.tasks.base import Problem, Task, disjoint_task, task, text_of

MODULES = ("area", "cost", "speed", "score", "tax", "age")
RULES = ("Think between <think> and </think>. Then write the edits between <solution> and </solution>, each as a block:\n"
         "```python\n### path\n<<<<<<< SEARCH\nold lines\n=======\nnew lines\n>>>>>>> REPLACE\n```\n")
EDIT = "```python\n### {path}\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"


@task
def edits(*, files: int = 2, size: int = 2000, heldout: int = 200, seed: int = 0, brief: bool = False) -> Task:
    """Repositories of some `files` with a function each, and an issue that says what one of them should return.

    The reward `swe_rl` compares patches. `extra["files"]` are the contents by path, `extra["new_files"]` those after the true
    patch, and the fact `repository` is the number of files. The answer is a completion with the true patch. `brief`
    prompts, for small models, omit the rules of the format. Raises ValueError for an unsupported number of files, or more
    problems than there are.
    """
    if not 1 <= files <= len(MODULES):
        raise ValueError(f"files={files}; allowed are 1 to {len(MODULES)}")
    several = _problems(random.Random(f"{seed} {files}"), files, size + heldout, brief)

    def build(place: int, number: int) -> Problem:
        one = several[place]
        return Problem(one.prompt, one.answer, number, extra=one.extra)

    task = disjoint_task("edits", list(range(size)), list(range(size, size + heldout)), build, reward="swe_rl")
    return Task(task.name, task.train, task.heldout, task.reward, facts=("repository",))


def _problems(chance: random.Random, files: int, wanted: int, brief: bool) -> list[Problem]:
    """`wanted` different problems."""
    made: dict[str, Problem] = {}
    for _ in range(20 * (wanted + 100)):
        if len(made) == wanted:
            return list(made.values())
        problem = _problem(chance, files, brief)
        made.setdefault(text_of(problem), problem)
    raise ValueError(f"edits(files={files}): {wanted} problems are asked for, and there are {len(made)}; ask for fewer, or "
                     "take more files")


def _problem(chance: random.Random, files: int, brief: bool) -> Problem:
    contents, lines = {}, {}
    for name in chance.sample(MODULES, files):
        lines[name] = f"    return x {chance.choice('+-*')} {chance.randint(2, 9)}"
        contents[f"{name}.py"] = f"def {name}(x):\n{lines[name]}\n"
    wrong = chance.choice(list(lines))
    path, old, right = f"{wrong}.py", lines[wrong], lines[wrong]
    while right == old:
        right = f"    return x {chance.choice('+-*')} {chance.randint(2, 9)}"
    shown = "".join(f"### {name}\n{content}" for name, content in contents.items())
    issue = f"{wrong}(x) should be {right.removeprefix('    return ')}.\n"
    answer = f"<think>{wrong}</think>\n<solution>\n{EDIT.format(path=path, old=old, new=right)}</solution>"
    return Problem(f"{shown}{issue}{'' if brief else RULES}", answer, 0, extra={
        "files": contents, "new_files": {path: contents[path].replace(old, right)}, "repository": files})
