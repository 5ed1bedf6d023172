"""Scaling fits of recipes, each one run or several seeds: ceilings and efficiencies, what extrapolates, and the entropy law."""
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.compare.figures import save_figure
from jaxrl_llm.compare.ledger import Run, read_run
from jaxrl_llm.compare.page import table
from jaxrl_llm.compare.plan import UNITS
from jaxrl_llm.compare.report import METRIC
from jaxrl_llm.evaluation import scaling
from jaxrl_llm.figures import COLORS

EARLY = 0.15  # of the evaluations: what the entropy law is fitted to before it predicts the rest


def runs_of(folder: Path) -> list[Run]:
    """The run in `folder`, or those in its subfolders; FileNotFoundError without any."""
    files = [folder / "metrics.jsonl", *sorted(folder.glob("*/metrics.jsonl"))]
    found = [run for run in (read_run(file.parent) for file in files) if run is not None]
    if not found:
        raise FileNotFoundError(f"{folder} holds no run: metrics.jsonl is missing, in it and in its subfolders")
    return found


def points(run: Run, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Spending and held-out score of a run's evaluations after the first."""
    made = np.isfinite(run.metrics[METRIC]) & (run.spent[unit] > 0)
    return run.spent[unit][made], run.metrics[METRIC][made]


def fit_recipe(runs: Sequence[Run], unit: str, resamples: int = 100) -> dict[str, Any]:
    """The fits of one recipe as JSON values; `problem` instead of a law that could not be fitted."""
    curves = [points(run, unit) for run in runs]
    start = float(np.mean([run.metrics[METRIC][0] for run in runs]))
    compute, reward = (np.concatenate(column) for column in zip(*curves))
    found: dict[str, Any] = {"runs": len(runs), "points": len(compute), "start": start}
    try:
        fitted = scaling.fit_sigmoid(compute, reward, start)
        found["sigmoid"] = fitted._asdict() | {"intervals": scaling.sigmoid_intervals(curves, start, resamples=resamples)}
    except ValueError as error:
        found["problem"] = str(error)
        return found | {"entropy": fit_entropy(runs)}
    try:
        found["extrapolation"] = scaling.extrapolation(compute, reward, start)
    except ValueError:  # too little in the first half
        found["extrapolation"] = {}
    return found | {"entropy": fit_entropy(runs)}


def fit_entropy(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The entropy law of all evaluations, and how well the first ones predict the others; None where it cannot be fitted."""
    pairs = []
    for run in runs:
        reward = run.metrics[METRIC]
        entropy = run.metrics.get("entropy", np.full(len(reward), np.nan))
        made = np.isfinite(reward) & np.isfinite(entropy)
        pairs.append((entropy[made], reward[made]))
    entropy, reward = (np.concatenate(column) for column in zip(*pairs))
    try:
        law = scaling.fit_entropy_law(entropy, reward)
    except ValueError:
        return None
    found = law._asdict() | {"points": len(entropy), "entropies": entropy.tolist(), "rewards": reward.tolist()}
    early = [(h[:max(int(EARLY * len(h)), 2)], r[:max(int(EARLY * len(h)), 2)]) for h, r in pairs]
    first = [np.concatenate(column) for column in zip(*early)]
    try:
        rest = [np.concatenate(column) for column in zip(*[(h[len(e[0]):], r[len(e[0]):]) for (h, r), e in zip(pairs, early)])]
        error = scaling.fit_entropy_law(*first).predict(rest[0]) - rest[1]
        found["early_rmse"] = float(np.sqrt(np.mean(error**2)))
    except ValueError:
        found["early_rmse"] = None
    return found


def markdown(fits: Mapping[str, dict[str, Any]], unit: str, command: str) -> str:
    """The fits as tables."""
    rows, problems, entropy = [], [], []
    for name, found in fits.items():
        if "problem" in found:
            problems.append(f"- {name}: {found['problem']}.")
        else:
            s, i, e = found["sigmoid"], found["sigmoid"]["intervals"], found["extrapolation"]
            def show(key, form):
                return f"{s[key]:{form}} [{i[key][0]:{form}}, {i[key][1]:{form}}]"
            rows.append([name, str(found["runs"]), show("ceiling", ".1%"), show("rate", ".2f"), show("middle", ".3g"),
                         *[f"{100 * e[law]:.1f}" if e else "" for law in ("sigmoid", "power", "logarithm")]])
        if found["entropy"]:
            h = found["entropy"]
            early = "" if h["early_rmse"] is None else f"{100 * h['early_rmse']:.1f}"
            entropy.append([name, *[f"{h[k]:.3f} +- {h[f'{k}_error']:.3f}" for k in ("a", "b", "ceiling")],
                            f"{100 * h['rmse']:.1f}", early])
    heads = ["recipe", "runs", "ceiling A", "rate B", f"middle, {UNITS[unit]}", "sigmoid", "power law", "logarithm"]
    text = ["# Scaling fits", "`R(C) = start + (A - start) / (1 + (C_mid / C)^B)` on held-out score, with 95% bootstrap "
            "intervals: over runs where there are three or more, else over residuals only. The last three columns: error in "
            "points on the second half of the compute of laws fitted to the first half.", table(heads, rows), *problems,
            "![fits](scaling.png)"]
    if entropy:
        heads = ["recipe", "a", "b", "ceiling b - a", "error, points", f"error of the first {EARLY:.0%} on the rest, points"]
        text += ["## Entropy law", "`R = -a exp(H) + b` over the evaluations, with standard errors.", table(heads, entropy)]
    return "\n\n".join([*text, f"```bash\n{command}\n```"]) + "\n"


def draw(fits: Mapping[str, dict[str, Any]], recipes: Mapping[str, Sequence[Run]], unit: str, path: Path) -> Path:
    """Evaluations with their sigmoids against compute, and against entropy with the entropy law."""
    def paint(axes):
        for color, (name, found) in zip(COLORS * 10, fits.items()):
            curves = [points(run, unit) for run in recipes[name]]
            for x, y in curves:
                axes[0].plot(x, y, ".", color=color, alpha=0.5)
            x = np.geomspace(min(c[0].min() for c in curves), 2 * max(c[0].max() for c in curves), 200)
            if "sigmoid" in found:
                keys = ("start", "ceiling", "rate", "middle")
                axes[0].plot(x, scaling.Sigmoid(*[found["sigmoid"][k] for k in keys]).predict(x), color=color, label=name)
            law = found["entropy"]
            if law:
                h = np.linspace(0, max(law["entropies"]), 100)
                axes[1].plot(law["entropies"], law["rewards"], ".", color=color, alpha=0.5)
                axes[1].plot(h, law["b"] - law["a"] * np.exp(h), color=color, label=name)
        axes[0].set_xscale("log")
        axes[0].set_xlabel(UNITS[unit])
        axes[1].set_xlabel("policy entropy, nats per token")
        for panel, title in zip(axes, ("Sigmoid of compute", "Entropy law")):
            panel.set_ylabel("held-out score")
            panel.set_title(title)
            if panel.get_legend_handles_labels()[0]:
                panel.legend()

    return save_figure(path, (11, 4.2), 1, 2, paint)
