"""The formats of completions in the course of runs: which one wins, its accuracy, and the remaining variety."""
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.diagnostics.base import Diagnostic, Result, diagnostic
from jaxrl_llm.evaluation import echo_chamber as echo
from jaxrl_llm.evaluation.pass_at_k import pass_at_k
from jaxrl_llm.evaluation.rates import bootstrap_mean
from jaxrl_llm.show.runs import short_names
from jaxrl_llm.store.lines import read_metrics
from jaxrl_llm.tools import files
from jaxrl_llm.tools.figures import COLORS

_DASHES = ("-", "--", ":", "-.")


@diagnostic
def echo_chamber(*, formats: Sequence[str]) -> Diagnostic:
    """Which format of pretraining a run amplifies: shares, accuracy and variety at each evaluation (arXiv 2504.07912).

    Reads the pages of held-out completions that runs keep, so nothing is sampled. Several runs, for example with other weights
    of the KL penalty, are drawn over each other.

    Args:
      formats: `"name=regular expression"` each; a completion belongs to the first one that matches it as a whole.
    """
    def measure(folders: Sequence[Path]) -> Result:
        names = [*[one.partition("=")[0].strip() for one in formats], echo.OTHER]
        runs = {name: course(folder, formats, names) for folder, name in zip(folders, short_names(folders))}
        rows = [{"run": name, "step": int(steps["step"]), **{f"{n} share": s for n, s in zip(names, steps["shares"])},
                 **{f"{n} right": a for n, a in zip(names, steps["accuracy"])}, "entropy": steps["entropy"],
                 "pass@1": steps["pass_at_1"], f"pass@{steps['group']}": steps["pass_at_group"],
                 "distinct right texts": steps["distinct"]} for name, run in runs.items() for steps in (run[0], run[-1])]
        return {"names": names, "runs": runs, "tables": {"First and last evaluation": rows}}

    return Diagnostic(measure, draw, panels=3, width=14)


def course(folder: Path, formats: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
    """The numbers of every evaluation of a run that kept its page; ValueError if none did."""
    metrics = read_metrics(folder)
    made = np.isfinite(metrics.get("eval/score", np.zeros(0)))
    evaluations = []
    for step in metrics["step"][made].astype(int).tolist():
        file = folder / "samples" / f"step_{step:06d}.jsonl"
        if file.exists():
            evaluations.append({"step": step, **numbers(file, formats, names)})
    if not evaluations:
        raise ValueError(f"{folder} holds no page of held-out completions (samples/step_*.jsonl): give a run with evaluations")
    return evaluations


def numbers(file: Path, formats: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Shares, accuracy and variety of the completions of a page."""
    rows = [json.loads(line) for line in files.lines(file.parent, file.name)]
    group = 1 + max(row["completion_index"] for row in rows)
    correct = np.array([row["solved"] for row in rows]).reshape(-1, group)
    texts = [[row["completion"] for row in rows[i:i + group]] for i in range(0, len(rows), group)]
    kinds = np.array([[names.index(echo.format_of(text, formats)) for text in row] for row in texts])
    share, right = echo.shares(kinds, len(names)), correct.sum(axis=1)
    return {"group": group, "shares": share.tolist(), "accuracy": echo.accuracy(correct, kinds, len(names)).tolist(),
            "entropy": echo.mixture_entropy(share), "pass_at_1": bootstrap_mean(correct).mean,
            "pass_at_group": float(pass_at_k(group, right, group).mean()),
            "distinct": len(echo.distinct_correct(correct, texts)) / len(texts)}


def draw(results, axes) -> None:
    """Shares, accuracy and entropy against steps; a colour for each format, dashes for each run."""
    for dashes, (name, steps) in zip(_DASHES * len(results["runs"]), results["runs"].items()):
        x = [one["step"] for one in steps]
        shares, right = (np.array([one[key] for one in steps], float) for key in ("shares", "accuracy"))
        for color, kind, share, accuracy in zip(COLORS, results["names"], shares.T, right.T):
            if share.any():
                axes[0].plot(x, share, dashes, color=color, label=f"{kind}, {name}")
                axes[1].plot(x, accuracy, dashes, color=color)
        axes[1].plot(x, [one["pass_at_1"] for one in steps], dashes, color="0.3", linewidth=1)
        axes[2].plot(x, [one["entropy"] for one in steps], dashes, color=COLORS[0], label=f"entropy of formats, {name}")
        axes[2].plot(x, [one["distinct"] for one in steps], dashes, color=COLORS[1], label=f"distinct right texts, {name}")
    for panel, title in zip(axes, ("Share of each format", "Accuracy of each format (grey: all)", "Variety")):
        panel.set_xlabel("step")
        panel.set_title(title)
    axes[0].set_ylim(-0.02, 1.02)
    axes[1].set_ylim(-0.02, 1.02)
    axes[0].legend()
    axes[2].legend()
