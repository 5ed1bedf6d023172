"""Ties of the reward among the completions of a problem, and how a small further reward would break them."""
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.diagnostics.base import Diagnostic, Result, diagnostic, single
from jaxrl_llm.diagnostics.rows import sampled
from jaxrl_llm.evaluation import policy_cliff as cliff
from jaxrl_llm.evaluation.echo_chamber import OTHER, format_of
from jaxrl_llm.runs.trained import trained
from jaxrl_llm.tools.figures import COLORS


@diagnostic
def policy_cliff(*, problems: int = 64, tolerance: float = cliff.EXACT, deltas: Sequence[float] = (1e-3, 1e-2, 1e-1),
                 temperatures: Sequence[float] = (1e-3, 1e-2, 1e-1), formats: Sequence[str] = (), seed: int = 0) -> Diagnostic:
    """How much of the policy the reward leaves undetermined: ties between classes of completions (arXiv 2507.20150).

    The completions of a held-out problem are the actions of a one-step decision. The further reward is `delta x length /
    sampling.max_tokens`, added and subtracted. Classes are the `formats`, `"name=regular expression"` each, or without any
    short and long, up to the median length and above.

    Args:
      problems: held-out problems, a group of completions each.
      tolerance: rewards that differ by no more are equal; 1e-3 suits learned rewards.
      deltas: sizes of the further reward.
      temperatures: weights of an entropy bonus, with which the optimal policy is a softmax.
    """
    def measure(folders: Sequence[Path]) -> Result:
        run = trained(single(folders))
        forest, _ = sampled(run, problems, seed)
        names = [*[one.partition("=")[0].strip() for one in formats], OTHER] if formats else ["short", "long"]
        def table(values):
            return np.asarray(values)[forest.ends].reshape(len(forest.problems), -1)
        rewards, lengths = table(forest.rewards).astype(np.float64), table(forest.length)
        classes = (np.array([[names.index(format_of(text, formats)) for text in row] for row in table(forest.texts)])
                   if formats else (lengths > np.median(lengths)).astype(int))
        return {"run": str(folders[0]), "step": run.step,
                **cliff_of(rewards, lengths / run.config.sampling.max_tokens, classes, names, tolerance, deltas, temperatures)}

    return Diagnostic(measure, draw, panels=2, width=11)


def cliff_of(rewards: np.ndarray, bonus: np.ndarray, classes: np.ndarray, names: Sequence[str], tolerance: float,
             deltas: Sequence[float], temperatures: Sequence[float]) -> Result:
    """The numbers of a table of rewards `f64[P, G]` with a further reward `bonus f64[P, G]` and `classes i[P, G]`."""
    ties, gaps = cliff.optimal(rewards, tolerance), cliff.gap(rewards, tolerance)
    base = cliff.policy(rewards, 0, tolerance)
    def by_class(weights):
        total = np.bincount(classes.reshape(-1), weights.reshape(-1), minlength=len(names))
        return (total / total.sum()).tolist()
    chosen = {"sampled": by_class(np.ones_like(rewards)), "tied for the best": by_class(base)}
    curves, rows = [], []
    for delta in deltas:
        change = delta * bonus
        after = [cliff.policy(rewards + sign * change, 0, tolerance) for sign in (1, -1)]
        moved = [float(cliff.total_variation(base, one).mean()) for one in after]
        chosen |= {f"longer pays {delta:g}": by_class(after[0]), f"shorter pays {delta:g}": by_class(after[1])}
        soft = [float(cliff.total_variation(cliff.policy(rewards, t), cliff.policy(rewards + change, t)).mean())
                for t in temperatures]
        curves.append({"delta": delta, "temperatures": list(temperatures), "soft": soft,
                       "bounds": [cliff.soft_bound(change, t) for t in temperatures], "greedy": moved[0]})
        rows.append({"further reward": delta, "flips": float(cliff.flips(rewards, change, tolerance).mean()),
                     "moved, longer pays": moved[0], "moved, shorter pays": moved[1],
                     **{f"moved at alpha {t:g}": x for t, x in zip(temperatures, soft)}})
    finite = np.isfinite(gaps)
    facts = {"problems": len(rewards), "tied": float((ties.sum(1) > 1).mean()), "all tied": float((~finite).mean()),
             "classes tied": float(cliff.degenerate(rewards, classes, tolerance).mean()),
             "median gap": float(np.median(gaps[finite])) if finite.any() else float("nan")}
    shares = [{"completions": what, **dict(zip(names, share))} for what, share in chosen.items()]
    return {"facts": facts, "names": list(names), "chosen": chosen, "curves": curves,
            "tables": {"Shares of problems": [facts], "A further reward for length: share of problems that flip, and "
                       "probability of the optimal policy that moves": rows, "Classes": shares}}


def draw(results, axes) -> None:
    """Moved probability against the entropy bonus, and which classes are optimal."""
    for color, curve in zip(COLORS, results["curves"]):
        axes[0].plot(curve["temperatures"], curve["soft"], "o-", color=color, label=f"reward {curve['delta']:g}")
        axes[0].plot(curve["temperatures"], curve["bounds"], ":", color=color)
        axes[0].axhline(curve["greedy"], color=color, linewidth=0.8, alpha=0.5)
    axes[0].set_xscale("log")
    axes[0].set_ylim(-0.02, 1.05)
    axes[0].set_xlabel("weight of the entropy bonus")
    axes[0].set_ylabel("probability that moves")
    axes[0].set_title("Dotted: the bound; thin: no bonus")
    axes[0].legend()
    bottom = np.zeros(len(results["chosen"]))
    for color, name, share in zip(COLORS, results["names"], np.array(list(results["chosen"].values())).T):
        if share.any():
            axes[1].barh(range(len(share)), share, left=bottom, color=color, label=name)
            bottom = bottom + share
    axes[1].set_yticks(range(len(bottom)), list(results["chosen"]))
    axes[1].invert_yaxis()
    axes[1].set_xlabel("share of completions")
    axes[1].set_title("What is optimal")
    axes[1].legend(loc="lower right", frameon=True)
