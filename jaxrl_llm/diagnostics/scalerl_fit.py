"""Held-out score against compute: the sigmoid of each recipe with intervals, and how far it extrapolates."""
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.compare.ledger import RunMetrics
from jaxrl_llm.compare.plan import UNITS
from jaxrl_llm.compare.report import METRIC
from jaxrl_llm.diagnostics.base import Diagnostic, Result, diagnostic
from jaxrl_llm.diagnostics.recipes import recipes_of
from jaxrl_llm.evaluation import scaling
from jaxrl_llm.tools.figures import COLORS
from jaxrl_llm.tools.registry import one_of


@diagnostic
def scalerl_fit(*, unit: str = "flops", resamples: int = 100, skip: float = 0.0) -> Diagnostic:
    """Ceiling and efficiency of recipes, by a sigmoid of compute (arXiv 2510.13786).

    `R(C) = start + (A - start) / (1 + (C_mid / C)^B)`, see `evaluation.scaling`.

    Each folder is a recipe: a run, or a folder of runs that differ in their seed. Intervals resample runs if there are three
    or more, else residuals only, which says nothing about another seed. A curve that does not rise is reported, not fitted.

    Args:
      unit: unit of compute: tokens, flops, seconds or steps.
      resamples: bootstrap draws behind an interval.
      skip: the share of each run's compute whose evaluations are left out: beginnings follow no sigmoid. The paper leaves out
        about the first epoch.

    Raises ValueError: an unknown unit, or a share outside [0, 1).
    """
    one_of("unit", unit, UNITS)
    if not 0 <= skip < 1:
        raise ValueError(f"skip={skip} is a share of a run's compute; give 0 to below 1, for example 0.1")

    def measure(folders: Sequence[Path]) -> Result:
        fits = {name: fit(runs, unit, resamples, skip) for name, runs in recipes_of(folders, (unit,)).items()}
        rows = [row(name, result) for name, result in fits.items()]
        title = f"Sigmoids of {UNITS[unit]} with 95% intervals; error on the second half of laws fitted to the first, points"
        return {"unit": unit, "recipes": fits, "tables": {title: rows}}

    return Diagnostic(measure, draw)


def points(run: RunMetrics, unit: str, skip: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Spending and held-out score of a run's evaluations after the first `skip` of its compute, without the first."""
    made = np.isfinite(run.metrics[METRIC]) & (run.spent[unit] > 0) & (run.spent[unit] >= skip * run.spent[unit].max())
    return run.spent[unit][made], run.metrics[METRIC][made]


def fit(runs: Sequence[RunMetrics], unit: str, resamples: int = 100, skip: float = 0.0) -> Result:
    """The fit of one recipe, or a `problem` instead if there is none."""
    curves = [points(run, unit, skip) for run in runs]
    start = float(np.mean([run.metrics[METRIC][0] for run in runs]))
    compute, reward = (np.concatenate(column) for column in zip(*curves))
    result: Result = {"runs": len(runs), "start": start, "compute": compute.tolist(), "scores": reward.tolist(), "problem": ""}
    try:
        fitted = scaling.fit_sigmoid(compute, reward, start)
        result["sigmoid"] = fitted._asdict() | {"intervals": scaling.sigmoid_intervals(curves, start, resamples=resamples)}
    except ValueError as error:
        return result | {"problem": str(error)}
    try:
        result["extrapolation"] = scaling.extrapolation(compute, reward, start)
    except ValueError:  # too little in the first half
        result["extrapolation"] = {}
    return result


def row(name: str, result: Result) -> dict[str, str | int]:
    """A recipe's row of the table."""
    def show(key, form):
        if "sigmoid" not in result:
            return ""
        low, high = result["sigmoid"]["intervals"][key]
        return f"{result['sigmoid'][key]:{form}} ({low:{form}} to {high:{form}})"
    errors = result.get("extrapolation") or {}
    return {"recipe": name, "runs": result["runs"], "ceiling A": show("ceiling", ".1%") or result["problem"],
            "rate B": show("rate", ".2f"), "middle": show("middle", ".3g"),
            **{law: f"{100 * errors[law]:.1f}" if errors else "" for law in ("sigmoid", "power", "logarithm")}}


def draw(results, axes) -> None:
    """Evaluations and sigmoids against compute."""
    for color, (name, recipe) in zip(COLORS * 10, results["recipes"].items()):
        x = np.geomspace(min(recipe["compute"]), 2 * max(recipe["compute"]), 200)
        axes[0].plot(recipe["compute"], recipe["scores"], ".", color=color, alpha=0.5)
        if "sigmoid" in recipe:
            law = scaling.Sigmoid(*[recipe["sigmoid"][key] for key in ("start", "ceiling", "rate", "middle")])
            axes[0].plot(x, law.predict(x), color=color, label=f"{name}: ceiling {law.ceiling:.1%}")
            axes[0].axhline(law.ceiling, color=color, linewidth=0.8, linestyle=":")
    axes[0].set_xscale("log")
    axes[0].set_xlabel(UNITS[results["unit"]])
    axes[0].set_ylabel("held-out score")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend()
