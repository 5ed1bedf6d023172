"""The end of a run for people: a before/after table, where to look, and the trained model as a Hugging Face directory."""
import os
import sys
from pathlib import Path

import jax
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from jaxrl_llm.models.lora import merge
from jaxrl_llm.models.weights.export import save_hf
from jaxrl_llm.training import setup
from jaxrl_llm.training.checkpoints import Checkpoints


def print_table(evaluations: dict) -> None:
    """Held-out results side by side, one column per evaluation."""
    table = Table(title="Held-out problems")
    table.add_column("")
    for name in evaluations:
        table.add_column(name, justify="right")
    rows = {
        "problems x completions": lambda e: f"{len(e.forest.problems)} x {len(e.forest.ends) // len(e.forest.problems)}",
        "accuracy (95% interval)": lambda e: f"{e.accuracy.mean:.1%} ({e.accuracy.low:.1%} to {e.accuracy.high:.1%})",
        "one of the group right": lambda e: f"{e.any_right:.1%}",
        "completion length, tokens": lambda e: f"{e.length:.1f}",
        "cut at the limit": lambda e: f"{e.truncated:.1%}",
    }
    for label, show in rows.items():
        table.add_row(label, *[show(e) for e in evaluations.values()])
    Console().print(table)


def print_report(evaluations: dict, workdir: Path) -> None:
    """The end of a training run, as far as somebody reads it: an output that is closed does not make the run a failure."""
    try:
        _print_report(evaluations, workdir)
        sys.stdout.flush()
    except (OSError, SystemExit):  # rich makes an exit of a broken pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer would fail again at the end


def _print_report(evaluations: dict, workdir: Path) -> None:
    """Held-out results before and after, and what lies where in the run folder."""
    if not evaluations:
        print("this run was already finished; raise --config.steps to go on")
        return
    print_table({f"{when} training": found for when, found in evaluations.items()})
    Console().print(f"Curves: {workdir}/curves.png   samples: {workdir}/samples/   metrics: {workdir}/metrics.jsonl\n"
                    f"TensorBoard: tensorboard --logdir {workdir}", highlight=False, soft_wrap=True)


def export(config: ConfigDict, workdir: Path, directory: str) -> None:
    """Writes the newest checkpoint's weights (adapters merged in) and its tokenizer as a Hugging Face directory."""
    run, params = setup.build(config)
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        state = checkpoints.restore(setup.initial_state(run, params)).state
    params = state.params if state.lora is None else merge(state.params, state.lora)
    source = setup.tokenizer_source(config)
    save_hf(directory, run.learner.policy.model.config, jax.device_get(params), source)
    if source is None:
        run.source.sampler.tokenizer.save(Path(directory))
    print(f"wrote {directory}")
