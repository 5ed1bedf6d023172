"""Whether all processes of a run have the same code and the same data, checked before they exchange anything else."""
import hashlib
import itertools
from pathlib import Path

import jax
import numpy as np

import jaxrl_llm
from jaxrl_llm import parallel
from jaxrl_llm.sampling.fitting import held_out
from jaxrl_llm.sampling.given import TextSource
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.store.own_code import origins
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.loader import digest


def check_code() -> None:
    """Raises ValueError if processes have other versions of this package or of those that compute."""
    if parallel.several():
        root = Path(jaxrl_llm.__file__).parent
        parallel.check_same({"the code of jaxrl_llm": _of(*sorted(root.rglob("*.py"))), "the version of jax": jax.__version__,
                             "the version of numpy": np.__version__}, "install the same packages on all hosts")


def check_data(task: Task, source: Source, evaluated: int) -> None:
    """Raises ValueError if processes have other problems or texts, or other code of their own that makes or rewards them."""
    if parallel.several():
        files = [Path(one if isinstance(one, str) else one["file"]) for one in origins()]
        own = {f"your code in {file.name}": _of(file) for file in files if file.is_file()}
        parallel.check_same(own | digests(task, source, evaluated),
                            "give all hosts the same files, on a disk that all of them see")


def digests(task: Task, source: Source, evaluated: int) -> dict[str, str]:
    """A digest of each set of problems or texts that a run reads, by its words."""
    trained, problems = source.data.get_state()["digest"], digest(held_out(task.heldout, evaluated))
    if isinstance(source, TextSource):
        return {"the given texts": trained, "the held-out texts": digest(source.heldout), "the held-out problems": problems}
    found, beside = {"the training problems": trained, "the held-out problems": problems}, source.beside
    if beside.data is None:
        return found
    held = itertools.chain.from_iterable(beside.held_out)
    return found | {"the given texts": beside.data.get_state()["digest"], "the held-out texts": digest(held)}


def _of(*files: Path) -> str:
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()
