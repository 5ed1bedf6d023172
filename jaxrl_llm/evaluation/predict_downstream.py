"""How far a score follows compute, along the chain from the log-prob of an answer to its accuracy (arXiv 2406.04391).

Scores are `[M, I]`: M models, or checkpoints of one run, on I problems with C candidate answers each.
"""
import numpy as np
from scipy import special, stats

STAGES = ("log p", "p", "p among choices", "negative Brier", "accuracy")
CORRELATIONS = ("pearson", "spearman", "kendall")


def chain(logprobs: np.ndarray, correct: np.ndarray) -> dict[str, np.ndarray]:
    """The five scores by stage, `f64[M, I]` each; higher is better.

    `logprobs f64[M, I, C]`: of each candidate as a whole; -infinity pads problems with fewer. `correct i[I]`: the right one.
    `log p` of the right candidate; `p`; its share of the candidates' mass; minus the Brier score of these shares; whether it
    is the most probable, the first one of equals.
    """
    logprobs, correct = np.asarray(logprobs, np.float64), np.asarray(correct)
    right = np.arange(logprobs.shape[-1]) == correct[:, None]
    among = special.softmax(logprobs, axis=-1)
    log_p = np.where(right, logprobs, 0.0).sum(axis=-1)
    scores = (log_p, np.exp(log_p), (among * right).sum(axis=-1), -((among - right) ** 2).sum(axis=-1),
              (logprobs.argmax(axis=-1) == correct).astype(np.float64))
    return dict(zip(STAGES, scores))


def correlations(scores: np.ndarray, compute: np.ndarray, kind: str = "pearson") -> np.ndarray:
    """Correlation of each problem's scores `[M, I]` with log compute over the models, `f64[I]`; NaN for constant scores.

    `kind`: `pearson`, `spearman` or `kendall` (tau-b).
    """
    function = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}[kind]
    x = np.log(np.asarray(compute, np.float64))
    return np.array([np.nan if np.ptp(y) == 0 else function(x, y).statistic for y in np.asarray(scores, np.float64).T])


def survival(values: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Share of the defined `values` that is at least each threshold; NaN where none is defined."""
    defined = np.asarray(values)[~np.isnan(values)]
    return (defined[:, None] >= thresholds).mean(axis=0) if len(defined) else np.full(len(thresholds), np.nan)


def incorrect_mass(logprobs: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Log of the probability of all wrong candidates together, `f64[M, I]`."""
    logprobs = np.asarray(logprobs, np.float64)
    right = np.arange(logprobs.shape[-1]) == np.asarray(correct)[:, None]
    return special.logsumexp(np.where(right, -np.inf, logprobs), axis=-1)


def co_variation(logprobs: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Pearson correlation over the models of log p and the log mass of wrong candidates, `f64[I]`; NaN for constants."""
    pairs = zip(chain(logprobs, correct)["log p"].T, incorrect_mass(logprobs, correct).T)
    return np.array([stats.pearsonr(a, b).statistic if np.ptp(a) > 0 and np.ptp(b) > 0 else np.nan for a, b in pairs])
