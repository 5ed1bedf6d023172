"""Problems visible in a run's metrics, as sentences; docs/troubleshooting.md says what to do about each."""
import numpy as np

RECENT = 0.2  # share of the steps, at the end, for which a complaint must hold


def findings(metrics: dict[str, np.ndarray]) -> list[str]:
    """Complaints about a run, most serious first; each names its metric. An empty list does not prove that all is well."""
    complaints = []
    if _last(metrics, "skipped_updates") > 0:
        complaints.append(f"{_last(metrics, 'skipped_updates'):.0f} updates were refused, their loss or gradient was not "
                          "finite (skipped_updates)")
    for name in sorted(metrics):
        if name.startswith("reward_failures/") and np.nansum(metrics[name]) > 0:
            complaints.append(f"rewards failed {np.nansum(metrics[name]):.0f} times ({name})")
    mismatch = np.abs(_recent(metrics, "mismatch/kl"))
    if len(mismatch) and mismatch.mean() > 0.01:
        complaints.append(f"sampler and learner disagree by {mismatch.mean():.2g} nats per token (mismatch/kl)")
    if _mean(metrics, "groups/all_equal") > 0.9:
        complaints.append(f"{_mean(metrics, 'groups/all_equal'):.0%} of the groups have equal rewards and teach nothing "
                          "(groups/all_equal)")
    if _mean(metrics, "completion/truncated") > 0.25:
        complaints.append(f"{_mean(metrics, 'completion/truncated'):.0%} of the completions are cut at the limit "
                          "(completion/truncated)")
    entropy = metrics.get("entropy", np.zeros(0))
    entropy = entropy[np.isfinite(entropy)]
    if len(entropy) > 1 and _mean(metrics, "entropy") < 0.05 * entropy[0]:
        complaints.append(f"entropy fell from {entropy[0]:.3g} to {_mean(metrics, 'entropy'):.3g} nats per token (entropy)")
    if _mean(metrics, "clip_fraction") > 0.3:
        complaints.append(f"{_mean(metrics, 'clip_fraction'):.0%} of the tokens are clipped (clip_fraction)")
    if _fell(metrics):
        complaints.append("held-out score ends clearly below its best (eval/score)")
    return complaints


def _recent(metrics: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The finite values of the last steps."""
    values = metrics.get(name, np.zeros(0))
    values = values[len(values) - max(1, round(RECENT * len(values))):]
    return values[np.isfinite(values)]


def _mean(metrics: dict[str, np.ndarray], name: str) -> float:
    values = _recent(metrics, name)
    return float(values.mean()) if len(values) else float("nan")


def _last(metrics: dict[str, np.ndarray], name: str) -> float:
    values = metrics.get(name, np.zeros(0))
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else 0.0


def _fell(metrics: dict[str, np.ndarray]) -> bool:
    """Whether the interval of the last held-out score is below the interval of the best one."""
    names = ("eval/score", "eval/score_low", "eval/score_high")
    if not all(name in metrics for name in names):
        return False
    score, low, high = (metrics[name][np.isfinite(metrics["eval/score"])] for name in names)
    return len(score) > 1 and bool(high[-1] < low[np.argmax(score)])
