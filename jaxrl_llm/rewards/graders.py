"""Verdicts of other code bases on the same answers: math-verify and the graders of verl, each in a killable process."""
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence

from jaxrl_llm.rewards.pool import WorkerPool

GRADERS = ("math-verify", "verl math_dapo", "verl prime_math", "verl math_reward")


@functools.cache
def verl_folder() -> str:
    """Where verl is installed; ImportError when it is not."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("verl is not installed, see setup.py")
    return spec.submodule_search_locations[0]


def verl_module(name: str):
    """`verl.utils.reward_score.NAME`, without running verl's own `__init__`, which needs all that verl trains with."""
    folder = verl_folder()
    for package in ("verl", "verl.utils", "verl.utils.reward_score"):
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [folder + package[len("verl"):].replace(".", "/")]
    return importlib.import_module(f"verl.utils.reward_score.{name}")


def grade(grader: str, completion: str, answer: str) -> bool:
    r"""Whether the grader accepts a completion that ends in a box. Called in worker processes."""
    if grader == "math-verify":
        from math_verify import parse, verify
        return bool(verify(parse(rf"\boxed{{{answer}}}"), parse(completion)))
    module = verl_module(grader.removeprefix("verl "))
    verdict = module.compute_score(completion, answer)
    if isinstance(verdict, dict):
        return bool(verdict["acc"])
    return bool(verdict[0] if isinstance(verdict, tuple) else verdict)


def verdicts(grader: str, rows: Sequence[tuple[str, str]]) -> list[bool]:
    """The verdict on each (completion, answer); False where there is none. ImportError for a grader that is not installed."""
    pool = WorkerPool("jaxrl_llm.rewards.graders:grade", deadline=20.0)
    try:
        first, *_ = pool.map([(grader, r"\boxed{1}", "1")])
        if first.status == "error" and first.message.startswith(("ImportError", "ModuleNotFoundError")):
            raise ImportError(first.message)
        return [outcome.value is True for outcome in pool.map([(grader, *row) for row in rows])]
    finally:
        pool.close()
