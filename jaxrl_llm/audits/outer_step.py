"""Why a run stops improving: each update of the policy as one noisy step, after Beukman et al. (arXiv 2603.06009).

  python -m jaxrl_llm.audits.outer_step runs/plateau runs/slower [--last=50]

The second run continues a checkpoint of the first one with a fifth of its learning rate. If its reward is higher, steps were
too large for the noise of their batches: more rollouts or smaller steps help. Otherwise something else limits the run.
"""
import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

BLOCKS = 10  # means of neighbouring steps, which are taken as independent


class Batch(NamedTuple):
    """How a step learns: rollouts of the batch, updates that divide it, passes over it, learning rate."""

    rollouts: int
    minibatches: int
    epochs: int
    learning_rate: float

    @property
    def minibatch(self) -> int:
        """Rollouts of an update."""
        return self.rollouts // self.minibatches

    @property
    def updates(self) -> int:
        """Updates of a step."""
        return self.minibatches * self.epochs


class Plateau(NamedTuple):
    """The reward of the last steps of a run: its mean, the 95% interval, and whether it still rises or falls."""

    mean: float
    low: float
    high: float
    moves: bool


class Verdict(NamedTuple):
    """What a fifth of the learning rate did to the reward: the difference, its 95% interval, and its interpretation."""

    difference: float
    low: float
    high: float
    says: str


def stationary_variance(step: float, noise: float, samples: int, curvature: float) -> float:
    """Stationary variance of x' = x - a (h x + noise / sqrt(N)): a s2 / (N h (2 - a h)).

    `step` a, `noise` the variance s2 of one sample, `samples` N, `curvature` h of the loss h x^2 / 2. Raises ValueError
    outside of 0 < a h < 2, where there is none.
    """
    if not 0 < step * curvature < 2 or samples < 1:
        raise ValueError(f"step={step} times curvature={curvature} is {step * curvature:g}, samples={samples}; allowed are "
                         "products between 0 and 2, one sample or more")
    return step * noise / (samples * curvature * (2 - step * curvature))


def excess_loss(step: float, noise: float, samples: int, curvature: float) -> float:
    """The stationary loss of noisy steps: a s2 / (2 N (2 - a h)), see `stationary_variance`.

    Half the step or twice the samples halve it, roughly; smaller steps take proportionally longer to get there.
    """
    return curvature * stationary_variance(step, noise, samples, curvature) / 2


def co_scaled(batch: Batch, rollouts: int) -> Batch:
    """The same learning from more rollouts per step: more minibatches of the same size, at the same rate.

    Larger minibatches with a rate that grows with the root of their size are reported to do much worse. Raises ValueError for
    rollouts that are not a multiple of a minibatch.
    """
    if rollouts < 1 or rollouts % batch.minibatch:
        raise ValueError(f"rollouts={rollouts} are no multiple of a minibatch of {batch.minibatch}; give one")
    return batch._replace(rollouts=rollouts, minibatches=rollouts // batch.minibatch)


def data_per_divergence(tokens: float, divergence: float) -> float:
    """Trained tokens of a batch for each nat of KL(old || new) that they moved the policy; inf where it did not move.

    The paper's ratio of data to divergence has no public definition; this one is ours.
    """
    return float(np.inf) if divergence <= 0 else tokens / divergence


def plateau(rewards: Sequence[float]) -> Plateau:
    """The level of these steps, by means of ten blocks; it moves where the halves differ at 1%. Raises ValueError below 20."""
    means = _blocks(rewards)
    half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means)
    moves = stats.ttest_ind(means[:BLOCKS // 2], means[BLOCKS // 2:], equal_var=False).pvalue < 0.01
    return Plateau(float(means.mean()), float(means.mean() - half), float(means.mean() + half), bool(moves))


def verdict(before: Sequence[float], slower: Sequence[float]) -> Verdict:
    """Compares the rewards of a run at its plateau with those of its continuation at a fifth of the learning rate (Welch).

    Raises ValueError if one of them has fewer than 20 steps, or if the first one is not at a plateau.
    """
    if plateau(before).moves:
        raise ValueError("the reward of the first run still moves in these steps; lower --last, or continue it to its plateau")
    first, second = _blocks(before), _blocks(slower)
    difference = float(second.mean() - first.mean())
    variances = np.array([first.var(ddof=1), second.var(ddof=1)]) / BLOCKS
    freedom = variances.sum() ** 2 / max((variances ** 2 / (BLOCKS - 1)).sum(), 1e-300)
    half = float(stats.t.ppf(0.975, max(freedom, 1.0)) * variances.sum() ** 0.5)
    says = ("stagnation: steps are too large for their noise, take more rollouts or smaller steps" if difference - half > 0 else
            "other: smaller steps do not help; look at exploration, capacity, the task")
    return Verdict(difference, difference - half, difference + half, says)


def _blocks(rewards: Sequence[float]) -> np.ndarray:
    values = np.asarray(rewards, np.float64)
    values = values[np.isfinite(values)]
    if len(values) < 2 * BLOCKS:
        raise ValueError(f"{len(values)} steps with a reward; a plateau needs {2 * BLOCKS} at least")
    return np.array([part.mean() for part in np.array_split(values, BLOCKS)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plateaus of two runs and the verdict."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.audits.outer_step", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plateau", help="folder of a run whose reward does not rise any more")
    parser.add_argument("slower", help="folder of a run that continues it with a fifth of the learning rate")
    parser.add_argument("--metric", default="reward/mean", help="of metrics.jsonl")
    parser.add_argument("--last", type=int, default=50, help="steps of each run")
    given = parser.parse_args(arguments)
    from jaxrl_llm.commands.command_line import print_table
    from jaxrl_llm.store.lines import read_metrics

    rewards, rows = [], []
    for folder in (given.plateau, given.slower):
        metrics = read_metrics(folder)
        if given.metric not in metrics:
            raise SystemExit(f"{folder} has no metric {given.metric!r}; it has {', '.join(sorted(metrics))}")
        last = {name: values[-given.last:] for name, values in metrics.items()}
        rewards.append(last[given.metric].tolist())
        rows.append({"run": folder, **plateau(rewards[-1])._asdict()})
        if {"completion/tokens", "approx_kl"} <= last.keys():  # 0 where each step has one update
            moved = float(np.nanmean(np.abs(last["approx_kl"])))
            rows[-1]["tokens a nat"] = data_per_divergence(float(np.nanmean(last["completion/tokens"])), moved)
    print_table(rows, f"last {given.last} steps")
    says = verdict(*rewards)
    print(f"difference {says.difference:+.4g} ({says.low:+.4g} to {says.high:+.4g})  {says.says}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
