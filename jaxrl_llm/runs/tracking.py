"""The metrics of a run on Weights & Biases, beside the files of its folder."""
import contextlib
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ID_FILE = "wandb_id"


@contextlib.contextmanager
def tracked(project: str, workdir: Path, config: Mapping[str, Any], resume: bool
            ) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """`log(step, metrics)` into a run of this project, the same run if a folder is resumed; "" is no project.

    The package decides the destination: WANDB_API_KEY and WANDB_ENTITY, or WANDB_MODE=offline for the folder alone.
    Raises ValueError if the package is missing.
    """
    if not project:
        yield lambda step, metrics: None
        return
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"config.wandb={project!r} needs a package: pip install 'jaxrl_llm[wandb]'; or leave the key "
                         "empty") from error
    known = workdir / ID_FILE
    if not (resume and known.is_file()):
        known.write_text(uuid.uuid4().hex)
    run = wandb.init(project=project, name=workdir.name, id=known.read_text(), resume="allow", dir=workdir, config=dict(config))
    run.define_metric("*", step_metric="step")  # a resumed run logs some steps again, which its own counter forbids
    code = 1
    try:
        yield lambda step, metrics: run.log({"step": step, **metrics})
        code = 0
    finally:
        try:
            run.finish(exit_code=code)
        except Exception as error:  # the run's own files are complete, and another error may already be raised
            warnings.warn(f"Weights & Biases did not get the end of the run: {error}", RuntimeWarning, stacklevel=3)
