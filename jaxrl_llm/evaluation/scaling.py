"""How reward grows with compute, and what entropy pays for it: the sigmoid of ScaleRL and the entropy law, with uncertainty."""
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

GOLDEN = (np.sqrt(5) - 1) / 2


class Sigmoid(NamedTuple):
    """`R(C) = start + (ceiling - start) / (1 + (middle / C)^rate)` (arXiv 2510.13786).

    `start`: reward before training, measured. `ceiling` A: what more compute approaches. `rate` B and `middle` C_mid (compute
    at which half of the gain is made): efficiency. `sse`: the sum of squared residuals.
    """

    start: float
    ceiling: float
    rate: float
    middle: float
    sse: float = 0.0

    def predict(self, compute: np.ndarray) -> np.ndarray:
        """Reward after `compute`; `start` at 0."""
        return _sigmoid(np.asarray(compute, np.float64), self.start, self.ceiling, self.rate, self.middle)


def _sigmoid(compute, start, ceiling, rate, middle):
    with np.errstate(divide="ignore", over="ignore"):
        return start + (ceiling - start) / (1 + np.exp(rate * (np.log(middle) - np.log(compute))))


def fit_sigmoid(compute: np.ndarray, reward: np.ndarray, start: float, *, ceilings: np.ndarray | None = None,
                middles: np.ndarray | None = None, rates: tuple[float, float] = (0.05, 20.0)) -> Sigmoid:
    """The published procedure: the best rate by least squares for every ceiling and middle of a grid; the best of all is kept.

    `compute`, `reward`: [N] evaluations of one run or of several; the one before training is `start`. The grids default to
    ceilings in steps of 0.005 from the highest mean reward to 1, and 100 middles from a tenth of the smallest compute to three
    times the largest, evenly spaced in logarithms. Raises ValueError: fewer than four evaluations, compute that is not above 0,
    or a reward that does not rise (see `rises`).
    """
    compute, reward = np.asarray(compute, np.float64), np.asarray(reward, np.float64)
    if len(compute) < 4 or not (compute > 0).all():
        raise ValueError(f"a sigmoid needs at least four evaluations with compute above 0; these are {(compute > 0).sum()}")
    if not rises(compute, reward):
        raise ValueError("the reward does not rise all the way: a fit would say nothing about where it leads")
    if ceilings is None:
        ceilings = np.arange(max(np.round(_top(reward), 3), start + 0.005), 1.0 + 1e-9, 0.005)
    if middles is None:
        middles = np.geomspace(compute.min() / 10, 3 * compute.max(), 100)
    ceiling, middle = (grid.reshape(-1, 1) for grid in np.meshgrid(ceilings, middles, indexing="ij"))
    def error(rate):
        return ((_sigmoid(compute, start, ceiling, rate[:, None], middle) - reward) ** 2).sum(axis=1)
    rate = np.exp(_golden(lambda log_rate: error(np.exp(log_rate)), np.log(rates), len(ceiling)))
    errors = error(rate)
    best = int(errors.argmin())
    return Sigmoid(float(start), float(ceiling[best, 0]), float(rate[best]), float(middle[best, 0]), float(errors[best]))


def _golden(error: Callable[[np.ndarray], np.ndarray], between: np.ndarray, size: int, steps: int = 34) -> np.ndarray:
    """Golden-section search of `size` functions at once for their minima between two numbers, `between`."""
    low, high = between
    a, b = np.full(size, low), np.full(size, high)
    c, d = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    at_c, at_d = error(c), error(d)
    for _ in range(steps):
        left = at_c < at_d
        a, b = np.where(left, a, c), np.where(left, d, b)
        c, d, kept = b - GOLDEN * (b - a), a + GOLDEN * (b - a), np.where(left, at_c, at_d)
        fresh = error(np.where(left, c, d))
        at_c, at_d = np.where(left, fresh, kept), np.where(left, kept, fresh)
    return (a + b) / 2


def _top(reward: np.ndarray) -> float:
    """Highest mean of a tenth of the evaluations, in order."""
    width = max(len(reward) // 10, 1)
    return float(np.convolve(reward, np.ones(width) / width, mode="valid").max())


def rises(compute: np.ndarray, reward: np.ndarray) -> bool:
    """Whether no quarter of the curve lies clearly (two standard errors) below the quarter before it."""
    order = np.argsort(compute, kind="stable")
    quarters = np.array_split(np.asarray(reward, np.float64)[order], min(4, max(len(reward) // 4, 1)))
    for before, after in zip(quarters, quarters[1:]):
        noise = np.sqrt(_noise(before) + _noise(after))
        if after.mean() < before.mean() - 2 * noise - 1e-12:
            return False
    return len(reward) < 2 or reward[order][-len(quarters[-1]):].mean() >= reward[order][:len(quarters[0])].mean()


def _noise(rewards: np.ndarray) -> float:
    """Squared standard error of the mean around a straight line."""
    if len(rewards) < 4:
        return float(rewards.var(ddof=1) / len(rewards)) if len(rewards) > 1 else 0.0
    x = np.arange(len(rewards))
    left = rewards - np.polyval(np.polyfit(x, rewards, 1), x)
    return float((left**2).sum() / (len(rewards) - 2) / len(rewards))


def sigmoid_intervals(curves: Sequence[tuple[np.ndarray, np.ndarray]], start: float, *, resamples: int = 100,
                      level: float = 0.95, seed: int = 0, **grids) -> dict[str, tuple[float, float]]:
    """Bootstrap intervals of ceiling, rate and middle of the joint fit to the `(compute, reward)` of runs.

    Three or more runs are resampled whole: their spread is what a new seed would show. With fewer, only the residuals of the
    fit are resampled, which says how well one curve determines the numbers but nothing about another seed. The default grids
    are coarser than those of `fit_sigmoid`: 40 x 40.
    """
    random, fits = np.random.default_rng(seed), []
    compute, reward = (np.concatenate(column) for column in zip(*curves))
    grids = {"middles": np.geomspace(compute.min() / 10, 3 * compute.max(), 40),
             "ceilings": np.linspace(max(_top(reward), start + 0.005), 1, 40)} | grids
    fitted = fit_sigmoid(compute, reward, start, **grids)
    residuals = reward - fitted.predict(compute)
    for _ in range(resamples):
        if len(curves) >= 3:
            drawn = [curves[i] for i in random.integers(len(curves), size=len(curves))]
            x, y = (np.concatenate(column) for column in zip(*drawn))
        else:
            x, y = compute, fitted.predict(compute) + random.choice(residuals, len(residuals))
        try:
            fits.append(fit_sigmoid(x, y, start, **grids)[1:4])
        except ValueError:  # a draw that does not rise
            continue
    if len(fits) < resamples / 2:
        raise ValueError("most resamples of these runs do not rise: there are too few evaluations for an interval")
    tails = np.quantile(fits, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {name: (float(low), float(high)) for name, low, high in zip(("ceiling", "rate", "middle"), *tails)}


def fit_power(compute: np.ndarray, reward: np.ndarray, rates: np.ndarray | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """`R = A - D C^-B` by least squares: A and D for each B of a grid. The sigmoid is compared with it."""
    best = None
    for rate in np.geomspace(0.02, 5, 200) if rates is None else rates:
        columns = np.stack([np.ones(len(compute)), -np.asarray(compute, np.float64) ** -rate], axis=1)
        solution, *_ = np.linalg.lstsq(columns, reward, rcond=None)
        error = ((columns @ solution - reward) ** 2).sum()
        if best is None or error < best[0]:
            best = error, rate, solution
    _, rate, (ceiling, drop) = best
    return lambda x: ceiling - drop * np.asarray(x, np.float64) ** -rate


def fit_logarithm(compute: np.ndarray, reward: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """`R = a + b log C` by least squares."""
    slope, intercept = np.polyfit(np.log(compute), reward, 1)
    return lambda x: intercept + slope * np.log(x)


def extrapolation(compute: np.ndarray, reward: np.ndarray, start: float, share: float = 0.5, **grids) -> dict[str, float]:
    """Root mean squared error on the last part of the curve of laws that were fitted to the first `share` of its compute."""
    first = compute <= share * np.max(compute)
    laws = {"sigmoid": fit_sigmoid(compute[first], reward[first], start, **grids).predict,
            "power": fit_power(compute[first], reward[first]), "logarithm": fit_logarithm(compute[first], reward[first])}
    return {name: float(np.sqrt(np.mean((law(compute[~first]) - reward[~first]) ** 2))) for name, law in laws.items()}


class EntropyLaw(NamedTuple):
    """`R = -a exp(H) + b` (arXiv 2505.22617) with standard errors. `rmse` is measured on the fitted points."""

    a: float
    b: float
    a_error: float
    b_error: float
    ceiling: float
    ceiling_error: float
    rmse: float

    def predict(self, entropy: np.ndarray) -> np.ndarray:
        """Reward at mean token entropy H, nats."""
        return self.b - self.a * np.exp(entropy)


def fit_entropy_law(entropy: np.ndarray, reward: np.ndarray) -> EntropyLaw:
    """Linear least squares of R on `-exp(H)`. The ceiling `b - a` is the reward where no entropy is left to spend.

    The standard errors assume independent residuals; evaluations of one run are not fully independent. Raises ValueError: fewer
    than three points, or all at one entropy.
    """
    x, reward = -np.exp(np.asarray(entropy, np.float64)), np.asarray(reward, np.float64)
    if len(x) < 3 or np.ptp(x) == 0:
        raise ValueError(f"the entropy law needs at least three points of different entropy; these are {len(x)}")
    columns = np.stack([x, np.ones(len(x))], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, reward, rcond=None)
    squares = float(((columns @ [a, b] - reward) ** 2).sum())
    spread = np.linalg.inv(columns.T @ columns) * squares / (len(x) - 2)
    contrast = np.array([-1.0, 1.0])  # b - a
    a_error, b_error = np.sqrt(np.diag(spread)).tolist()
    return EntropyLaw(float(a), float(b), a_error, b_error, float(b - a),
                      float(np.sqrt(contrast @ spread @ contrast)), float(np.sqrt(squares / len(x))))
