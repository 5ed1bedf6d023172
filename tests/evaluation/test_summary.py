"""The numbers of an evaluation from completions counted by hand, and two policies on the same problems."""
import json

import numpy as np
import pytest

from jaxrl_llm.evaluation import summary


def row(correct, answers=None, lengths=None, stopped=None, level=""):
    n = len(correct)
    return {"level": level, "correct": correct, "answers": answers, "lengths": lengths or [3] * n,
            "stopped": stopped or [1] * n, "components": {"exact": [float(c) for c in correct], "format": [1.0] * n}}


JOINED = {
    4: row([1, 1, 0, 0], ["7", "7", "8", None], [2, 2, 4, 8], [1, 1, 1, 0], "easy"),
    9: row([0, 0, 0, 0], ["1", "1", "1", "2"], [4, 4, 4, 4], level="hard"),
}


def test_all_numbers_of_two_problems():
    result = summary.measure(JOINED)
    json.dumps(result, allow_nan=False)
    assert (result["problems"], result["samples"]) == (2, 4)
    assert result["score"] == result["solved"] == result["pass@1"] == [0.25, 0.0, 0.5]
    assert result["pass@2"][0] == pytest.approx((5 / 6) / 2) and result["pass@4"][0] == 0.5
    assert result["maj@2"][0] == pytest.approx((2 / 3) / 2) and result["maj@4"] == [0.5, 0.0, 1.0]
    assert result["ever_solved"][0] == 0.5 and 0 < result["ever_solved"][1] and result["ever_solved"][2] < 1
    assert result["truncated"][0] == 1 / 8 and result["components"] == {"exact": [0.25, 0.0, 0.5], "format": [1.0, 1.0, 1.0]}
    assert result["length"] == {"mean": 4.0, "median": 4.0, "p95": pytest.approx(6.6), "right": 2.0,
                                "wrong": pytest.approx(28 / 6)}


def test_one_completion_each_has_wilsons_interval():
    result = summary.measure({i: row([int(i < 3)]) for i in range(10)})
    assert result["solved"] == result["ever_solved"] and result["solved"][:2] == [0.3, pytest.approx(0.1077912674)]
    assert "maj@1" not in result  # no answers were read


def test_partial_credit_counts_for_the_score_and_not_as_solved():
    half = row([0, 1]) | {"components": {"gym": [0.6, 1.0], "format": [1.0, 1.0]}}
    result = summary.measure({1: half, 2: half})
    assert result["score"][0] == pytest.approx(0.8) and result["solved"][0] == 0.5


def test_scores_are_paired_by_our_first_component():
    """Two problems: scores .8 and .4 against .2 and .4, on the completions that both have; none of them solves more."""
    def scored(name, *values):
        return row([0] * len(values)) | {"components": {name: list(values), "format": [1.0] * len(values)}}
    ours = {1: scored("gym", .6, 1.), 2: scored("gym", .4, .4)}
    theirs = {1: scored("gym", .2, .2, .9), 2: scored("gym", .4, .4, .9)}
    result = summary.compare(ours, theirs)
    assert list(result)[2:4] == ["score", "solved"] and result["score"]["mean"] == pytest.approx(0.3)
    assert (result["score"]["low"], result["score"]["high"]) == pytest.approx((0, 0.6)) and result["solved"]["mean"] == 0
    assert "score" not in summary.compare(ours, {1: scored("exact", .2, .2), 2: scored("exact", .4, .4)})


def test_sizes_end_with_all_samples():
    assert summary.sizes(1) == [1] and summary.sizes(8) == [1, 2, 4, 8] and summary.sizes(12) == [1, 2, 4, 8, 12]
    assert len(summary.sizes(1024)) == 11


def test_levels_apart():
    result = summary.by_level(JOINED)
    assert list(result) == ["easy", "hard"] and result["easy"]["solved"][0] == 0.5 and result["hard"]["solved"][0] == 0
    assert summary.by_level({4: JOINED[4]}) == {}


def test_sampling_until_solved_twice():
    joined = {1: row([0, 1, 0, 0, 1, 1]), 2: row([1, 1]), 3: row([0, 0, 1, 0])}
    result = json.loads(json.dumps(summary.measure_until(joined, 2)))
    assert result["rate"][0] == pytest.approx((1 / 4 + 1 + 1 / 4) / 3)  # (r - 1) / (K - 1), and 1 of 4 where it was given up
    assert result["given_up"] == pytest.approx(1 / 3) and result["tries"] == 5 + 2 + 4
    assert result["per_problem"]["1"] == pytest.approx([0.4, 0.0527450, 0.8058796], abs=1e-6)
    assert summary.measure_until(joined, 1)["rate"][0] == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)


def test_problems_with_different_numbers_of_completions():
    with pytest.raises(ValueError, match=r"\[1, 4\] completions"):
        summary.estimates(JOINED | {5: row([1])})


def test_each_problem_has_the_same_weight_whatever_it_lost():
    """A third problem has two of four completions, one of them right, so that pass@k ends at two."""
    result = summary.measure(JOINED | {5: row([1, 0], ["1", "2"])})
    assert (result["problems"], result["samples"], result["completions"]) == (3, 2, 10)
    assert result["score"] == result["solved"] == result["pass@1"] and result["solved"][0] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert result["pass@2"][0] == pytest.approx((5 / 6 + 0 + 1) / 3) and "pass@4" not in result and "maj@4" not in result
    assert result["maj@2"][0] == pytest.approx((2 / 3 + 0 + 1 / 2) / 3)
    assert result["truncated"][0] == pytest.approx(1 / 12)


def test_a_better_policy_on_the_same_problems():
    random = np.random.default_rng(0)
    skill = random.random(60)
    def draw(p, n):
        return {i: row((random.random(n) < s).astype(int).tolist()) for i, s in enumerate(p)}
    better, base = draw(np.minimum(skill + 0.2, 1), 8), draw(skill, 16)
    del base[3]
    result = summary.compare(better, base)
    json.dumps(result, allow_nan=False)
    assert (result["problems"], result["samples"]) == (59, 8)
    assert result["solved"]["low"] > 0.08 and result["solved"]["high"] < 0.3 and result["solved"]["p_value"] < 0.01
    assert result["pass@8"]["mean"] < result["solved"]["mean"]  # most problems are within reach of both
    assert "pass@16" not in result
    def solved(rows):
        return sum(any(rows[i]["correct"][:8]) for i in base)
    b = result["boundary"]
    assert b["expansion"] + b["preserved"] == solved(better) and b["shrinkage"] + b["preserved"] == solved(base)
    assert result["score"] == result["solved"]  # rewards of 0 and 1
    same = summary.compare(base, base)
    assert same["solved"] == {"mean": 0, "low": 0, "high": 0, "p_value": 1} and same["boundary"]["expansion"] == 0
    with pytest.raises(ValueError, match="no problem in common"):
        summary.compare({1: row([1])}, {2: row([1])})
