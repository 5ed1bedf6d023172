"""The share of a solution that completions begin with: the worked examples of ADHint, plans on forests, and refusals."""
import re

import numpy as np
import pytest
from test_topologies import asked, follow

from jaxrl_llm.control.hint_share import hint_length, hint_ratio
from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.engines.requests import Node
from jaxrl_llm.sampling.one_turn import by_author
from jaxrl_llm.sampling.trajectory import Planted, Trajectory, authors, ended_before, spoken
from jaxrl_llm.topologies import TOPOLOGIES, Guide, budgets, guided, make_guide, refill, rounds, single


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


def shares(plan):
    """The share that each trajectory of a plan begins with, by prompt."""
    found = {}
    for act in plan.acts:
        assert all(role == Role.EXPERT and logprobs is None for role, _, logprobs in act.parts) and len(act.parts) < 2
        found.setdefault(act.at, []).extend([sum(what.share for _, what, _ in act.parts)] * act.count)
    return found


def test_an_expert_takes_the_first_places_of_each_group():
    topology = guided(single(3, group=4), group=4, guide=make_guide("experts", traces=2, share=0.5))
    plans, forest = follow(topology)
    assert asked(plans) == [3, {0: 4, 1: 4, 2: 4}] and topology.most == 4
    assert shares(plans[1]) == dict.fromkeys(range(3), [0.5, 0.5, 0, 0])


def test_a_guide_may_return_lists():
    guide = Guide(lambda n: [0.5] + [0] * (n - 1), lambda rewards, valid, normal: [0.25, 0, 1][:len(normal)])
    plans, _ = follow(guided(single(3, group=2), group=2, guide=guide))
    assert shares(plans[1]) == dict.fromkeys(range(3), [0.5, 0])
    assert shares(plans[2]) == {0: [0.25, 0.25], 1: [0, 0], 2: [1, 1]}


@pytest.mark.parametrize("given", ([0.5], 0.5, [2.0, 0], [-1, 0], ["half", 0], [[0.5], [0]], None))
def test_what_are_no_shares_is_said_before_a_run_and_in_a_plan(given):
    said = re.escape(f"'first' of the guide returned {given!r}; return 2 shares of a solution, each from 0 to 1")
    topology = guided(single(3, group=2), group=2, guide=Guide(lambda n: given))
    with pytest.raises(ValueError, match=said):
        follow(topology)
    alone, = [one for one in TOPOLOGIES["guided"].conflicts if one.of == ("guide", "config.sampling.group")]
    assert re.match(said, alone.why(Guide(lambda n: given), 2))


def test_an_expert_begins_the_first_rollouts_of_rounds_and_budgets():
    """Further rounds are the policy's alone; of a budget, prompts with one rollout have an expert's alone."""
    guide = make_guide("experts", traces=1)
    topology = guided(rounds(2, group=2, most=5, wants=lambda forest: np.array([False, True])), group=2, guide=guide)
    plans, _ = follow(topology)
    assert asked(plans) == [2, {0: 2, 1: 2}, {1: 2}, {1: 1}] and topology.most == 5
    assert [shares(plan) for plan in plans[1:]] == [{0: [1, 0], 1: [1, 0]}, {1: [0, 0]}, {1: [0]}]
    plans, _ = follow(guided(budgets(2, prompts=2, group=4, most=5, utility="per_rollout"), group=4, guide=guide),
                      expected=[0.5, 0.2])
    assert shares(plans[1]) == {0: [1, 0, 0], 1: [1, 0, 0, 0, 0]}


def test_hints_follow_a_group_without_any():
    """Problem 0 is solved, 1 half of the time, 2 never; a second batch with the same rollouts has the same noise."""
    topology = guided(single(3, group=2), group=2, guide=make_guide("adhint"))

    def reward(problem, number):
        return float(number % 2 == 0 if problem == 1 else problem == 0)

    plans, forest = follow(topology, reward)
    assert asked(plans) == [3, {0: 2, 1: 2, 2: 2}, {0: 2, 1: 2, 2: 2}] and topology.most == 4
    assert shares(plans[1]) == dict.fromkeys(range(3), [0, 0])
    first, again = shares(plans[2]), shares(follow(topology, reward)[0][2])
    assert first == again and all(one == two for one, two in first.values())
    easy, half, hard = (first[row][0] for row in range(3))
    assert easy == 0 and 0.2 < half < 0.6 < hard < 0.801 and abs(half - 0.4) > 1e-5
    both = refill(topology, 2, keep=lambda forest: forest.draw > 0, attempts=3)
    assert asked(follow(both, reward)[0]) == [3, *[{p: 2 for p in (0, 1, 2)}] * 2, 3, *[{p: 2 for p in (3, 4, 5)}] * 2]


def test_impossible_settings_are_refused():
    for name, hyper, words in (("experts", {"traces": 0}, "traces=0"), ("experts", {"share": 1.5}, "share=1.5"),
                               ("adhint", {"low": 0.5, "high": 0.4}, "low=0.5 to high=0.4"),
                               ("adhint", {"high": 1.0}, "high=1.0"),
                               ("expert", {}, "Did you mean 'experts'")):
        with pytest.raises(ValueError, match=words):
            make_guide(name, **hyper)


def test_nodes_of_completions_by_their_authors():
    """An expert's alone, a prefix, the policy's alone, an empty one, a hint behind tokens that the policy wrote before."""
    parts = [planted(Role.POLICY, 7), planted(Role.POLICY, 8), planted(Role.HINT, 9, 9)]
    result = by_author([authors([planted(Role.EXPERT, *[1] * n)], length) for n, length in ((9, 3), (2, 5), (0, 4), (0, 0))]
                       + [authors(parts, 6)])
    assert result.row.tolist() == [0, 1, 1, 2, 3, 4, 4, 4] and result.role.tolist() == [4, 4, 1, 1, 1, 1, 3, 1]
    assert result.length.tolist() == [3, 2, 3, 4, 0, 2, 2, 2]
    assert result.first.tolist() == [True, True, False, True, True, True, False, False]
    assert result.last.tolist() == [True, False, True, True, True, False, False, True]


def planted(role, *ids, logprobs=()):
    return Planted(role, [*ids], [*logprobs] or [np.nan] * len(ids))


def test_a_turn_begins_with_what_is_planted():
    """An engine reads three tokens behind a prompt of two and draws one; what they are worth to their writer may be unknown."""
    parts = planted(Role.POLICY, 7, logprobs=[-3]), planted(Role.HINT, 9), planted(Role.EXPERT, 1, 2, logprobs=[-4, -5])
    one = Trajectory([5, 6], 0, planted=[*parts], version=8)
    drawn = Node(3, None, 6, np.int32([4]), np.float32([-1]), np.float32([0.5]), np.int32([9]), "limit",
                 {"more": np.ones((1, 2))})
    turn = spoken(one, drawn, (Column("more", "token", np.float32, (2,), fill=-1),))
    assert (turn.start, turn.tokens.tolist(), turn.policy_version.tolist()) == (2, [7, 9, 1, 2, 4], [8, 8, 8, 8, 9])
    np.testing.assert_array_equal(turn.logprobs, [-3, np.nan, -4, -5, -1])
    assert turn.entropies.tolist() == [0, 0, 0, 0, 0.5] and turn.columns["more"].tolist() == [[-1, -1]] * 4 + [[1, 1]]
    one.turns = 1
    assert spoken(one, drawn, ()) is drawn


@pytest.mark.parametrize(("limit", "stops", "tokens", "finish"), [
    (9, (2,), [7, 1, 2], "stop"), (2, (2,), [7, 1], "limit"), (3, (2,), [7, 1, 2], "stop"), (4, (), [7, 1, 2, 3], "limit")])
def test_nothing_is_sampled_behind_a_stop_token_or_the_limit(limit, stops, tokens, finish):
    one = Trajectory([5, 6], 0, planted=[planted(Role.EXPERT, 7, 1, 2, 3)], version=8)
    turn = ended_before(one, 11, limit, stops, ())
    assert (turn.uid, turn.start, turn.tokens.tolist(), turn.finish) == (11, 2, tokens, finish)
    said = ended_before(one, 11, limit, stops, (), 1)
    assert (said.tokens.tolist(), said.finish) == ([7], "stop_string")
    assert ended_before(one, 11, 5, (), ()) is None and ended_before(Trajectory([5], 0), 11, 1, (), ()) is None
