"""How a policy responds to noise in its layers: ratios of a perturbed policy to the sampling one (arXiv 2603.19470)."""
import numpy as np

LEVELS = ("token", "sequence", "cumulative")
LIMIT = 20.0  # bound of a log-ratio before it is exponentiated


def ratios(perturbed: np.ndarray, sampled: np.ndarray, mask: np.ndarray, level: str, *, geometric: bool = False) -> np.ndarray:
    """Probability under the perturbed policy over that of sampling, `f64[..., T]`; 0 outside of `mask bool[..., T]`.

    From log-probs `perturbed`, `sampled` f64[..., T] with x = perturbed - sampled: of each token exp(x_t), of its whole
    `sequence` exp(sum x), `cumulative` exp(sum of x up to t). With `geometric` sums are divided by their number of tokens.
    Log-ratios are cut at +-20.
    """
    x = np.where(mask, np.asarray(perturbed, np.float64) - np.where(mask, sampled, 0.0), 0.0)
    if level == "token":
        logs = x
    else:
        counts = np.cumsum(mask, axis=-1)
        logs = np.cumsum(x, axis=-1) / (np.maximum(counts, 1) if geometric else 1)
        if level == "sequence":
            logs = np.broadcast_to(logs[..., -1:], logs.shape)
    return np.where(mask, np.exp(np.clip(logs, -LIMIT, LIMIT)), 0.0)


def divergence(perturbed: np.ndarray, sampled: np.ndarray, mask: np.ndarray) -> float:
    """KL(sampling || perturbed), nats per sampled token: the mean of `exp(x) - 1 - x` over the mask, never negative."""
    x = (np.asarray(perturbed, np.float64) - sampled)[np.asarray(mask, bool)]
    return float(np.mean(np.expm1(np.clip(x, -LIMIT, LIMIT)) - x))


def tails(values: np.ndarray, mask: np.ndarray, share: float = 0.999) -> tuple[float, float]:
    """The quantiles `1 - share` and `share` of ratios over the mask."""
    low, high = np.quantile(np.asarray(values)[np.asarray(mask, bool)], [1 - share, share])
    return float(low), float(high)
