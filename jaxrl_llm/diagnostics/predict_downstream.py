"""Which score of a run's checkpoints follows compute: log-probs of right answers, or scores derived from them."""
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.compare.ledger import read_run
from jaxrl_llm.compare.plan import UNITS
from jaxrl_llm.diagnostics.base import Diagnostic, Result, diagnostic, single
from jaxrl_llm.diagnostics.rows import candidates, sampled
from jaxrl_llm.evaluation import predict_downstream as downstream
from jaxrl_llm.runs.trained import trained
from jaxrl_llm.store.workdir import checkpoint_steps
from jaxrl_llm.tools.figures import COLORS
from jaxrl_llm.tools.registry import one_of

_LEAST = 5  # checkpoints for meaningful correlations


@diagnostic
def predict_downstream(*, problems: int = 64, wrong: int = 3, unit: str = "tokens", seed: int = 0) -> Diagnostic:
    """Correlation with compute along the chain log p, p, p among choices, Brier score, accuracy (arXiv 2406.04391).

    The checkpoints of one run are the models; keep them with `--config.checkpoint.keep=100`. The choices of a held-out problem
    are its right answer and the wrong completions that the first checkpoint gives most often.

    Args:
      problems: held-out problems; those without a wrong completion are dropped.
      wrong: maximum number of wrong choices.
      unit: unit of compute: tokens, flops, seconds or steps.
    """
    one_of("unit", unit, UNITS)

    def measure(folders: Sequence[Path]) -> Result:
        folder = single(folders)
        steps = [step for step in checkpoint_steps(folder / "checkpoints") if step > 0]
        if len(steps) < _LEAST:
            raise ValueError(f"{folder} has {len(steps)} checkpoints, correlations need {_LEAST}; run with "
                             "--config.checkpoint.keep=100")
        ledger = read_run(folder, (unit,))
        assert ledger is not None  # a run with checkpoints has metrics
        compute = np.interp(steps, ledger.metrics["step"], ledger.spent[unit])
        logprobs, items = candidate_logprobs(folder, steps, problems, wrong, seed)
        return {"run": str(folder), "steps": steps, "compute": compute.tolist(), "unit": unit,
                **chain_of(logprobs, compute), "problems": items}

    return Diagnostic(measure, draw, panels=3, width=14)


def candidate_logprobs(folder: Path, steps: Sequence[int], problems: int, wrong: int, seed: int) -> tuple[np.ndarray, int]:
    """Log-probs f64[M, I, C] of the choices under each checkpoint, the right one first; and I.

    Raises ValueError: the first checkpoint makes no mistake.
    """
    first = trained(folder, steps[0])
    forest, rollouts = sampled(first, problems, seed)
    tokenizer, owner = first.source.stream.tokenizer, forest.prompt[forest.ends]
    solved, texts, kept = forest.solved, [], []
    for p, problem in enumerate(forest.problems):
        mine = forest.ends[owner == p]
        mistakes = Counter(forest.texts[i] for i in mine if not solved[i]).most_common(wrong)
        if mistakes:
            kept.append(p)
            choices = [problem.extra.get("solution", problem.answer), *[text for text, _ in mistakes]]
            texts.append([[*tokenizer.encode(text), tokenizer.eos_id] for text in choices])
    if not kept:
        raise ValueError(f"checkpoint {steps[0]} of {folder} solves all {problems} problems: there is no wrong choice")
    shown = candidates(np.asarray(rollouts.prompt_tokens)[kept], np.asarray(rollouts.prompt_mask)[kept], texts)
    logprobs_of = jax.jit(lambda params, lora: first.policy.logprobs(params, lora, shown)[0])
    logprobs = []
    for step in steps:
        run = first if step == first.step else trained(folder, step)
        each = np.where(shown.mask, np.asarray(logprobs_of(run.params, run.lora), np.float64), 0.0).sum(-1)
        logprobs.append(np.where(shown.valid, each, -np.inf))
    return np.array(logprobs), len(kept)


def chain_of(logprobs: np.ndarray, compute: np.ndarray) -> Result:
    """Correlations of each stage with compute, from log-probs f64[M, I, C] whose first choice is right."""
    right = np.zeros(logprobs.shape[1], int)
    scores = downstream.chain(logprobs, right)
    thresholds = np.linspace(-1, 1, 81)
    stages, rows = {}, []
    for name, values in scores.items():
        each = {kind: downstream.correlations(values, compute, kind) for kind in downstream.CORRELATIONS}
        defined = ~np.isnan(each["pearson"])
        medians = {kind: float(np.median(x[defined])) if defined.any() else float("nan") for kind, x in each.items()}
        rows.append({"score": name, **medians, "undefined": float(1 - defined.mean())})
        stages[name] = {"mean": values.mean(axis=1).tolist(), "pearson": each["pearson"].tolist(), **{
            "survival": downstream.survival(each["pearson"], thresholds).tolist()}}
    together = downstream.co_variation(logprobs, right)
    together = together[~np.isnan(together)]
    facts = {"problems": logprobs.shape[1], "checkpoints": len(logprobs),
             "median correlation of right and wrong mass": float(np.median(together)) if len(together) else float("nan"),
             "positive": float((together > 0).mean()) if len(together) else float("nan")}
    final = -1
    return {"stages": stages, "thresholds": thresholds.tolist(), "facts": facts,
            "right": scores["log p"][final].tolist(), "wrong": downstream.incorrect_mass(logprobs, right)[final].tolist(),
            "tables": {"Correlation of a problem's score with log compute, median": rows, "Right and wrong choices": [facts]}}


def draw(results, axes) -> None:
    """Survival of the correlations along the chain, mean scores against compute, right against wrong mass."""
    for color, (name, stage) in zip(COLORS, results["stages"].items()):
        survival = np.array(stage["survival"], float)
        if np.isfinite(survival).any():
            axes[0].plot(results["thresholds"], survival, color=color, label=name)
        mean = np.array(stage["mean"])
        span = np.ptp(mean) or 1.0
        axes[1].plot(results["compute"], (mean - mean.min()) / span, "o-", markersize=3, color=color)
    axes[0].set_xlabel("Pearson correlation with log compute")
    axes[0].set_ylabel("share of problems with at least this")
    axes[0].set_title("Along the chain")
    axes[0].legend(loc="lower left")
    axes[1].set_xscale("log")
    axes[1].set_xlabel(UNITS[results["unit"]])
    axes[1].set_title("Mean score, from its lowest to its highest")
    axes[2].scatter(results["right"], results["wrong"], s=12, color=COLORS[0])
    axes[2].locator_params(axis="x", nbins=4)  # small numbers have long labels
    axes[2].set_xlabel("log p of the right choice")
    axes[2].set_ylabel("log mass of the wrong ones")
    axes[2].set_title("Problems, last checkpoint")
