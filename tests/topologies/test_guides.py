"""The share of a solution that completions begin with: the worked examples of ADHint, plans on forests, and refusals."""
import numpy as np
import pytest
from test_topologies import asked, follow

from jaxrl_llm.control.hint_share import hint_length, hint_ratio
from jaxrl_llm.sampling.one_turn import halves
from jaxrl_llm.topologies import guided, make_guide


def test_shares_of_the_worked_examples():
    """Difficulty .75: .6 of the solution with a range of .8; .695 and 13 of 20 tokens with .9 and a noise of .02."""
    first, valid = np.float32([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]), np.ones((3, 4), bool)
    result = make_guide("adhint", noise=0.0).second(first, valid, np.zeros(len(first), np.float32))
    np.testing.assert_allclose(result, [0.6, 0.0, 0.8], atol=1e-6)
    ratio = hint_ratio(np.float32([[0, 0, 0, 1]]), np.ones((1, 4), bool), np.float32([0.02]), high=0.9)
    np.testing.assert_allclose(ratio, [0.695], atol=1e-6)
    assert hint_length(ratio, np.array([20])).tolist() == [13]


def test_hints_stay_in_their_range_and_grow_with_difficulty():
    rng = np.random.default_rng(1)
    rewards, valid = (rng.random((400, 8)) < rng.random((400, 1))).astype(np.float32), rng.random((400, 8)) < 0.9
    valid[:, 0] = True
    guide = make_guide("adhint", low=0.1, high=0.7)
    normal = rng.standard_normal(400).astype(np.float32)
    result = guide.second(rewards, valid, normal)
    assert result.min() >= np.float32(0.1) and result.max() <= np.float32(0.7)
    rate = (rewards * valid).sum(1) / valid.sum(1)
    assert (result[rate == 1] == np.float32(0.1)).all() and np.corrcoef(result, rate)[0, 1] < -0.9
    np.testing.assert_array_equal(result[:7], guide.second(rewards[:7], valid[:7], normal[:7]))  # alone as in company


def test_an_expert_takes_the_first_places_of_each_group():
    topology = guided(3, group=4, guide=make_guide("experts", traces=2, share=0.5))
    plans, forest = follow(topology, group=4)
    assert asked(plans) == [3, [0, 1, 2]] and topology.max_groups == 1
    np.testing.assert_array_equal(plans[1].shares, [[0.5, 0.5, 0, 0]] * 3)


def test_hints_follow_a_group_without_any():
    """Problem 0 is solved, 1 half of the time, 2 never; a second call with the same forest has the same noise."""
    topology = guided(3, group=2, guide=make_guide("adhint"))
    plans, forest = follow(topology, reward=lambda problem, number: float(number % 2 == 0 if problem == 1 else problem == 0))
    assert asked(plans) == [3, [0, 1, 2], [0, 1, 2]] and topology.max_groups == 2
    assert not plans[1].shares.any() and plans[2].shares.shape == (3, 2)
    shares = plans[2].shares[:, 0]
    np.testing.assert_array_equal(plans[2].shares[:, 1], shares)
    assert shares[0] == 0 and 0.2 < shares[1] < 0.6 < shares[2] <= 0.8 and abs(shares[1] - 0.4) > 1e-5
    again, _ = follow(topology, reward=lambda problem, number: float(number % 2 == 0 if problem == 1 else problem == 0))
    np.testing.assert_array_equal(again[2].shares, plans[2].shares)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="traces=4 leave none of the 4 completions of a group to the policy"):
        guided(3, group=4, guide=make_guide("experts", traces=4))
    for name, hyper, words in (("experts", {"traces": 0}, "traces=0"), ("experts", {"share": 1.5}, "share=1.5"),
                               ("adhint", {"low": 0.5, "high": 0.4}, "low=0.5 to high=0.4"),
                               ("adhint", {"high": 1.0}, "high=1.0"),
                               ("expert", {}, "Did you mean 'experts'")):
        with pytest.raises(ValueError, match=words):
            make_guide(name, **hyper)


def test_nodes_of_completions_that_an_expert_began():
    """An expert's alone, a prefix, the policy's alone, an empty one."""
    result = halves(np.array([3, 2, 0, 0]), np.array([3, 5, 4, 0]))
    assert result.row.tolist() == [0, 1, 1, 2, 3] and result.role.tolist() == [4, 4, 1, 1, 1]
    assert result.length.tolist() == [3, 2, 3, 4, 0]
    assert result.first.tolist() == [True, True, False, True, True] and result.last.tolist() == [True, False, True, True, True]
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 6, 200)
    begun = rng.integers(0, lengths + 1)
    result = halves(begun, lengths)
    np.testing.assert_array_equal(np.bincount(result.row, result.length, 200), lengths)
    np.testing.assert_array_equal(np.bincount(result.row, result.length * (result.role == 4), 200), begun)
    assert (np.bincount(result.row, result.last, 200) == 1).all() and (np.bincount(result.row, result.first, 200) == 1).all()
