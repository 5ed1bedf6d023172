"""Held-out score against policy entropy: the law that ties them, and what its first part predicts of the rest."""
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.compare.ledger import RunMetrics
from jaxrl_llm.compare.report import METRIC
from jaxrl_llm.diagnostics.base import Diagnostic, Result, diagnostic
from jaxrl_llm.diagnostics.recipes import recipes_of
from jaxrl_llm.evaluation import scaling
from jaxrl_llm.tools.figures import COLORS


@diagnostic
def entropy_law(*, early: float = 0.15) -> Diagnostic:
    """What entropy buys: `R = -a exp(H) + b` over the evaluations of recipes, with its ceiling `b - a` (arXiv 2505.22617).

    Each folder is a recipe: a run, or a folder of runs that differ in their seed. Errors are standard errors of independent
    residuals.

    Args:
      early: share of the evaluations that a second fit sees; its error on the others is reported.
    """
    if not 0 < early < 1:
        raise ValueError(f"early={early}: give a share of the evaluations, above 0 and below 1")

    def measure(folders: Sequence[Path]) -> Result:
        laws = {name: fit(runs, early) for name, runs in recipes_of(folders).items()}
        rows = [row(name, law) for name, law in laws.items()]
        title = f"Entropy law with standard errors; errors in points, also of the first {early:.0%} on the rest"
        return {"recipes": laws, "tables": {title: rows}}

    return Diagnostic(measure, draw)


def fit(runs: Sequence[RunMetrics], early: float = 0.15) -> Result:
    """The law of all evaluations of a recipe, and how well the first ones predict the others; `problem` where there is none."""
    pairs = []
    for run in runs:
        reward = run.metrics[METRIC]
        entropy = run.metrics.get("entropy", np.full(len(reward), np.nan))
        made = np.isfinite(reward) & np.isfinite(entropy)
        pairs.append((entropy[made], reward[made]))
    entropy, reward = (np.concatenate(column) for column in zip(*pairs))
    result: Result = {"runs": len(runs), "entropies": entropy.tolist(), "scores": reward.tolist(), "problem": ""}
    try:
        result["law"] = scaling.fit_entropy_law(entropy, reward)._asdict()
    except ValueError as error:
        return result | {"problem": str(error)}
    cuts = [max(int(early * len(h)), 2) for h, _ in pairs]
    first = [np.concatenate(column) for column in zip(*[(h[:n], r[:n]) for (h, r), n in zip(pairs, cuts)])]
    rest = [np.concatenate(column) for column in zip(*[(h[n:], r[n:]) for (h, r), n in zip(pairs, cuts)])]
    try:
        error = scaling.fit_entropy_law(*first).predict(rest[0]) - rest[1]
        result["early_rmse"] = float(np.sqrt(np.mean(error**2))) if len(error) else None
    except ValueError:  # too few points, or all at one entropy
        result["early_rmse"] = None
    return result


def row(name: str, result: Result) -> dict[str, str | int]:
    """A recipe's row of the table."""
    law, early = result.get("law"), result.get("early_rmse")
    def show(key):
        return f"{law[key]:.3f} +- {law[f'{key}_error']:.3f}" if law else ""
    return {"recipe": name, "runs": result["runs"], "a": show("a") or result["problem"], "b": show("b"),
            "ceiling": show("ceiling"), "error": f"{100 * law['rmse']:.1f}" if law else "",
            "error of the first": "" if early is None else f"{100 * early:.1f}"}


def draw(results, axes) -> None:
    """Evaluations and laws against entropy, down to none."""
    for color, (name, recipe) in zip(COLORS * 10, results["recipes"].items()):
        axes[0].plot(recipe["entropies"], recipe["scores"], ".", color=color, alpha=0.5)
        if "law" in recipe:
            law, h = recipe["law"], np.linspace(0, max(recipe["entropies"]), 100)
            axes[0].plot(h, law["b"] - law["a"] * np.exp(h), color=color, label=f"{name}: ceiling {law['ceiling']:.1%}")
    axes[0].set_xlabel("policy entropy, nats per token")
    axes[0].set_ylabel("held-out score")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend()
