"""The report at the end of a run: a before/after table, and the files of the run."""
import os
import sys
from pathlib import PurePath

from rich.console import Console
from rich.table import Table

from jaxrl_llm.evaluation.rates import Rate
from jaxrl_llm.sampling.heldout import Evaluation


def print_table(evaluations: dict) -> None:
    """Prints held-out results side by side, one column per evaluation."""
    table = Table(title="Held-out problems")
    table.add_column("")
    for name in evaluations:
        table.add_column(name, justify="right")
    rows = {
        "problems x completions": lambda e: f"{len(e.forest.problems)} x {len(e.forest.ends) // len(e.forest.problems)}",
        "score (95% interval)": lambda e: _rate(e.score, e),
        "solved (95% interval)": lambda e: _rate(e.solved, e),
        "solved by one of the group": lambda e: f"{e.any_solved:.1%}",
        "completion length, tokens": lambda e: f"{e.length:.1f}",
        "cut at the limit": lambda e: f"{e.truncated:.1%}",
    }
    for label, show in rows.items():
        table.add_row(label, *[show(e) for e in evaluations.values()])
    for task in next(iter(evaluations.values())).by_task:
        parts = [evaluation.by_task[task] for evaluation in evaluations.values()]
        table.add_row(f"score of {task}", *[_rate(part.score, part) for part in parts])
    Console().print(table)


def _rate(rate: Rate, evaluation: Evaluation) -> str:
    """The rate with its interval over problems; a single problem says nothing of others."""
    return f"{rate.mean:.1%}" + (f" ({rate.low:.1%} to {rate.high:.1%})" if len(evaluation.forest.problems) > 1 else "")


def print_report(evaluations: dict, workdir: PurePath) -> None:
    """Prints the report at the end of a run; a closed output does not make the run a failure."""
    try:
        _print_report(evaluations, workdir)
        sys.stdout.flush()
    except (OSError, SystemExit):  # rich turns a broken pipe into an exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the buffer would fail again at exit


def _print_report(evaluations: dict, workdir: PurePath) -> None:
    """Prints held-out results before and after, and the contents of the run folder."""
    if not evaluations:
        print("no held-out problems were sampled: eval.problems is 0, or the run was already finished; raise --config.steps to "
              "continue it")
        return
    print_table({f"{when} training" if when in ("before", "after") else when: one for when, one in evaluations.items()})
    if evaluations.keys() - {"before", "after"}:
        print("each column is of the held-out problems and the limits of its own phase; eval.sets are the same in all phases")
    Console().print(f"Curves: {workdir}/curves.png   samples: {workdir}/samples/   metrics: {workdir}/metrics.jsonl\n"
                    f"TensorBoard: tensorboard --logdir {workdir}", highlight=False, soft_wrap=True)
