"""Whether all processes of a run have the same code and the same data, checked before they exchange anything else."""
import hashlib
from pathlib import Path

import jax
import numpy as np

import jaxrl_llm
from jaxrl_llm import parallel
from jaxrl_llm.sampling.fitting import held_out
from jaxrl_llm.store.own_code import origins
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.loader import Batches, digest


def check_code() -> None:
    """Raises ValueError if processes have other versions of this package or of those that compute."""
    if parallel.several():
        root = Path(jaxrl_llm.__file__).parent
        parallel.check_same({"the code of jaxrl_llm": _of(*sorted(root.rglob("*.py"))), "the version of jax": jax.__version__,
                             "the version of numpy": np.__version__}, "install the same packages on all hosts")


def check_data(task: Task, data: Batches, evaluated: int) -> None:
    """Raises ValueError if processes have other problems, or other code of their own that makes or rewards them."""
    if parallel.several():
        files = [Path(one if isinstance(one, str) else one["file"]) for one in origins()]
        own = {f"your code in {file.name}": _of(file) for file in files if file.is_file()}
        parallel.check_same(own | {"the training problems": data.get_state()["digest"],
                                   "the held-out problems": digest(held_out(task.heldout, evaluated))},
                            "give all hosts the same files, on a disk that all of them see")


def _of(*files: Path) -> str:
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()
