"""Success rates far below 1/n: sample until a problem is solved r times (arXiv 2310.03262)."""
from scipy import stats

from jaxrl_llm.evaluation.intervals import Proportion, clopper_pearson


def pass_until(tries: int, successes: int, wanted: int = 2, *, unbiased: bool = False) -> float:
    """Success rate of a problem that took `tries` samples to its `wanted`-th success, or was given up with fewer successes.

    `r / K`, the maximum-likelihood estimate, which is biased upwards; or `(r - 1) / (K - 1)`, which is unbiased (r >= 2). For a
    problem that was given up it is `successes / tries` in both cases. Raises ValueError: impossible counts, or `unbiased` with
    wanted = 1.
    """
    if not 0 <= successes <= min(wanted, tries) or tries < 1:
        raise ValueError(f"{successes} successes of {wanted} in {tries} tries cannot be; sampling stops at the last one wanted")
    if unbiased and wanted < 2:
        raise ValueError("the unbiased form needs at least two successes: wanted=2")
    if successes < wanted or not unbiased:
        return successes / tries
    return (wanted - 1) / (tries - 1)


def pass_until_interval(tries: int, successes: int, wanted: int = 2, level: float = 0.95) -> Proportion:
    """The exact interval of an inverse binomial sample; of a plain binomial one if the problem was given up.

    With a = (1 - level) / 2 the bounds solve `Pr[Bin(K, p) >= r] = a` and `Pr[Bin(K - 1, p) < r] = a`.
    """
    rate = pass_until(tries, successes, wanted)
    if successes < wanted:
        return clopper_pearson(successes, tries, level)
    tail = (1 - level) / 2
    low = stats.beta.ppf(tail, wanted, tries - wanted + 1)
    high = stats.beta.ppf(1 - tail, wanted, tries - wanted) if tries > wanted else 1.0
    return Proportion(rate, float(low), float(high))
