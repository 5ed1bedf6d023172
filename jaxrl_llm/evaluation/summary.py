"""Measurements of a policy from its completions of held-out problems, and comparisons of two policies on the same ones."""
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.evaluation.intervals import wilson
from jaxrl_llm.evaluation.paired import paired_difference
from jaxrl_llm.evaluation.pass_at_k import MOST_VOTES, boundary, count_votes, majority_at_k, pass_at_k
from jaxrl_llm.evaluation.pass_until import pass_until, pass_until_interval
from jaxrl_llm.evaluation.rates import bootstrap_mean

Joined = Mapping[int, Mapping[str, Any]]


def sizes(samples: int) -> list[int]:
    """1, 2, 4, ... up to `samples`, which is the last one."""
    return sorted({*[2**i for i in range(samples.bit_length()) if 2**i <= samples], samples})


def estimates(joined: Joined) -> dict[str, np.ndarray]:
    """Per problem `[Q]`: pass@k and, where answers were read, maj@k for all `sizes`.

    Raises ValueError unless all problems have the same number of completions.
    """
    counts = {len(row["correct"]) for row in joined.values()}
    if len(counts) != 1:
        raise ValueError(f"problems have {sorted(counts)} completions; finish the measurement first")
    return _of_tries(joined)


def _of_tries(joined: Joined) -> dict[str, np.ndarray]:
    """As `estimates`, up to the smallest number of completions of a problem, each estimated from all that it has."""
    counts = np.array([len(row["correct"]) for row in joined.values()])
    correct, tries = np.array([sum(row["correct"]) for row in joined.values()]), sizes(int(counts.min()))
    values = {f"pass@{k}": pass_at_k(counts, correct, k) for k in tries}
    if all(row["answers"] is not None for row in joined.values()) and counts.max() <= MOST_VOTES:
        votes = [count_votes(row["answers"], row["correct"]) for row in joined.values()]
        values |= {f"maj@{k}": np.array([majority_at_k(v, k) for v in votes]) for k in tries}
    return values


def measure(joined: Joined) -> dict[str, Any]:
    """The measurements of a policy as JSON values; every rate is `[mean, low, high]` with a 95% interval.

    Intervals of means over completions resample problems; shares of problems have Wilson's. Problems may have different numbers
    of completions, where an environment lost some: `samples` is the smallest, `completions` their sum, and each problem has the
    same weight.
    """
    rows = list(joined.values())
    counts, lengths = [len(row["correct"]) for row in rows], np.concatenate([row["lengths"] for row in rows])
    right = np.concatenate([row["correct"] for row in rows]).astype(bool)
    ever = sum(any(row["correct"]) for row in rows)
    score = next(iter(rows[0]["components"]))  # the first component
    def rate(values):
        return list(bootstrap_mean(np.array([np.mean(one) for one in values])[:, None]))
    return {
        "problems": len(rows), "samples": min(counts), "completions": sum(counts),
        "score": rate([row["components"][score] for row in rows]),
        "solved": list(wilson(ever, len(rows))) if max(counts) == 1 else rate([row["correct"] for row in rows]),
        "ever_solved": list(wilson(ever, len(rows))),
        **{name: rate(values) for name, values in _of_tries(joined).items()},
        "truncated": rate([1 - np.array(row["stopped"]) for row in rows]),
        "components": {name: rate([row["components"][name] for row in rows if name in row["components"]])
                       for name in dict.fromkeys(name for row in rows for name in row["components"])},
        "length": {"mean": float(lengths.mean()), "median": float(np.median(lengths)),
                   "p95": float(np.percentile(lengths, 95)), "right": float(lengths[right].mean()) if right.any() else None,
                   "wrong": float(lengths[~right].mean()) if (~right).any() else None},
    }


def measure_until(joined: Joined, wanted: int) -> dict[str, Any]:
    """Mean success rate when each problem is sampled until it is solved `wanted` times, as JSON values (arXiv 2310.03262).

    `rate`: the mean of the unbiased rates (of r / K for wanted = 1) with an interval that resamples problems. `given_up`: share
    of problems with fewer successes, which count with their plain share. `tries`: samples up to the last success.
    """
    streams = {i: np.flatnonzero(row["correct"])[:wanted] for i, row in joined.items()}
    tries = {i: int(hits[-1]) + 1 if len(hits) == wanted else len(joined[i]["correct"]) for i, hits in streams.items()}
    rates = [pass_until(tries[i], len(hits), wanted, unbiased=wanted > 1) for i, hits in streams.items()]
    return {"problems": len(rates), "wanted": wanted, "rate": list(bootstrap_mean(np.array(rates)[:, None])),
            "given_up": float(np.mean([len(hits) < wanted for hits in streams.values()])), "tries": sum(tries.values()),
            "per_problem": {str(i): list(pass_until_interval(tries[i], len(hits), wanted)) for i, hits in streams.items()}}


def by_level(joined: Joined) -> dict[str, dict[str, Any]]:
    """`measure` for the problems of each level; empty if all have the same one."""
    levels = sorted({row["level"] for row in joined.values()})
    if len(levels) < 2:
        return {}
    return {level: measure({i: row for i, row in joined.items() if row["level"] == level}) for level in levels}


def compare(ours: Joined, theirs: Joined) -> dict[str, Any]:
    """Ours minus theirs on the problems that both have: a paired test for score, solved, each pass@k and maj@k.

    The longer measurement is cut to the number of completions of the shorter one. `score` is that of our first component, and
    absent if theirs has no component of this name. Raises ValueError: the two share no problem.
    """
    shared = [i for i in ours if i in theirs]
    if not shared:
        raise ValueError("the two measurements have no problem in common; use the same task and number of problems")
    n = min(len(rows[i]["correct"]) for rows in (ours, theirs) for i in shared)
    a, b = ({i: _first(rows[i], n) for i in shared} for rows in (ours, theirs))
    score = next(iter(a[shared[0]]["components"]))
    mine, other = _means(a, score), _means(b, score)
    return {"problems": len(shared), "samples": n,
            **{name: paired_difference(mine[name], other[name])._asdict() for name in mine if name in other},
            "boundary": boundary(other["solved"], mine["solved"])._asdict()}


def _means(joined: Joined, score: str) -> dict[str, np.ndarray]:
    """Per problem `[Q]`: the component `score` where all problems have it, solved, pass@k and maj@k."""
    rows = joined.values()
    scored = [np.mean(row["components"][score]) for row in rows if score in row["components"]]
    return ({"score": np.array(scored)} if len(scored) == len(rows) else {}) | {
        "solved": np.array([np.mean(row["correct"]) for row in rows]), **estimates(joined)}


def _first(row: Mapping[str, Any], n: int) -> dict[str, Any]:
    return {"correct": row["correct"][:n], "answers": None if row["answers"] is None else row["answers"][:n],
            "components": {name: values[:n] for name, values in row["components"].items()}}
