"""Rules that give some prompts further rollouts: the papers' tables, exact totals, and the forests that grow by them."""
import sys

import numpy as np
import pytest
from test_topologies import asked, disagree, follow

from jaxrl_llm import topologies
from jaxrl_llm.topologies import by_rule, refill, sized

close = np.testing.assert_allclose
dars, speed_rl, xrpo = (sys.modules[f"jaxrl_llm.topologies.{name}"] for name in ("dars", "speed_rl", "xrpo_allocation"))


@pytest.mark.parametrize("weighting, most, use_std, expected", [
    ("equal", 32, False, [24, 11, 3, 1, 0, 0, 0, 0, 0]), ("equal", 32, True, [9, 5, 2, 1, 0, 0, 0, 0, 0]),
    ("hardness", 64, False, [56, 24, 8, 3, 0, 0, 0, 0, 0]), ("hardness", 64, True, [23, 14, 6, 3, 0, 0, 0, 0, 0])])
def test_dars_table(weighting, most, use_std, expected):
    result = dars.extra_rollouts(np.arange(9) / 8, 8, most, weighting=weighting, use_std=use_std)
    assert result.tolist() == expected


def test_dars_brings_hard_prompts_to_the_target():
    """One success of 8 with 11 further rollouts: the |A| of a half-solved prompt, in expectation and in the example."""
    extra = dars.extra_rollouts(np.array([1 / 8]), 8, 32)[0]
    assert 2 * 1 / 8 * 7 / 8 * (8 + extra) >= 4 > 2 * 1 / 8 * 7 / 8 * (7 + extra)
    rewards = np.array([1] * 3 + [0] * 16)
    A = rewards - rewards.mean()
    close([A[0], A[-1], np.abs(A).sum()], [0.842105, -0.157895, 5.052632], atol=5e-7)


def test_dars_in_a_forest():
    """Groups of 4, at most 12: none right gets 6 more, 1 of 4 gets 2 more, half gets none; a prompt never right leaves."""
    outcomes = {0: [0] * 12, 1: [1, 0, 0, 0] + [0] * 8, 2: [1, 1, 0, 0], 3: [1] * 4, 4: [0] * 9 + [1]}
    topology = by_rule(5, group=4, most=12, rule=topologies.make_rule("dars"))
    plans, forest = follow(topology, lambda problem, number: float(outcomes[problem][number]))
    assert asked(plans) == [5, dict.fromkeys(range(5), 4), {0: 6, 1: 2, 4: 6}] and topology.most == 12
    assert topology.choose(forest).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("name, hyper, further, kept", [
    ("dars", {}, {0: 6, 3: 6}, [False, True, False, False]), ("speed_rl", {}, {1: 8}, [False, True, False, False]),
    ("gvm_raft", {"mean": 1.5}, {1: 5, 2: 3}, [True] * 4),
    ("xrpo_allocation", {"mean": 1.25, "blocks": 1}, {2: 4}, [True] * 4)])
def test_success_is_the_reward_s_own_criterion(name, hyper, further, kept):
    """With `last_number + soft_overlong` a right answer that is too long earns nearly nothing, and a wrong one less.

    XRPO's intervals are those of the total reward.
    """
    right = {0: [0] * 12, 1: [1, 1] + [0] * 10, 2: [1] * 12, 3: [0] * 12}
    overlong = {0: [0] * 12, 1: [-0.9, -0.9] + [0] * 10, 2: [0, 0, -0.5, -0.5] + [0] * 8, 3: [-0.5] * 12}
    rule = topologies.make_rule(name, **hyper)
    topology = by_rule(4, group=4, most=12, rule=rule)
    seen = topology._replace(plan=lambda forest: topology.plan(
        forest.with_facts({"gradient_norms": np.ones(4, np.float32)}) if forest.problems else forest))
    plans, forest = follow(seen, lambda problem, number: right[problem][number] + overlong[problem][number],
                           score=lambda problem, number: right[problem][number])
    assert asked(plans) == [4, dict.fromkeys(range(4), 4), further] and topology.choose(forest).tolist() == kept


def test_speed_rl_screens_and_continues():
    """The example of the spec: of six screens, two a draw, (0,1) and (1,1) continue; 32 rollouts, 16 of which are trained."""
    screens = {0: "0000", 1: "10001001", 2: "1111", 3: "11001110", 4: "00010000", 5: "0000"}
    topology = refill(by_rule(2, group=4, most=8, rule=topologies.make_rule("speed_rl")), 2, keep=disagree, attempts=9)
    plans, forest = follow(topology, lambda problem, number: float(screens[problem][number]))
    assert asked(plans) == [2, {0: 4, 1: 4}, {1: 4}, 2, {2: 4, 3: 4}, {3: 4}]
    assert topology.choose(forest).tolist() == [False, True, False, True]
    for problem, right, wrong in ((1, 0.714286, -0.428571), (3, 0.428571, -0.714286)):
        r = np.array([int(x) for x in screens[problem]])
        close(np.unique(r - (r.sum() - r) / 7), [wrong, right], atol=5e-7)


def test_speed_rl_costs_less_than_whole_groups():
    p = np.array([0.02, 0.1, 0.5])
    by_screen, whole = speed_rl.cost(p, 4, 24), 24 / (1 - p**24 - (1 - p)**24)
    close(by_screen, [4 / (1 - x**4 - (1 - x)**4) + 20 for x in p])
    assert by_screen[2] < 25 and speed_rl.cost(0.5, 4, 24) > whole[2]  # where all pass, nothing is saved


def test_xrpo_example():
    std, n = np.array([0, 0.5, 0.577350, 0]), np.full(4, 4)
    close([xrpo.half_width(1, np.array([k]))[0] * np.sqrt(k) for k in (4, 5)], [3.182446, 2.776445], atol=5e-7)
    close(xrpo.priority(std, n), [0.042080, 0.216860, 0.243898, 0.042080], atol=5e-7)
    assert xrpo.block(std, n, 4, 99).tolist() == [0, 2, 2, 0]
    assert xrpo.block(std, n, 4, 5).tolist() == [1, 1, 1, 1] and xrpo.block(std, n, 4, 4).tolist() == [0] * 4


@pytest.mark.parametrize("mean, blocks, most", [(2, 1, 8), (2, 3, 8), (3, 2, 12), (4, 2, 8), (1, 1, 8)])
def test_xrpo_spends_its_budget(mean, blocks, most):
    rng = np.random.default_rng(mean)
    rewards = rng.integers(0, 2, (5, most))
    topology = by_rule(5, group=2, most=most, rule=topologies.make_rule("xrpo_allocation", mean=mean, blocks=blocks))
    plans, forest = follow(topology, lambda problem, number: float(rewards[problem, number]))
    sizes = np.bincount(forest.prompt[forest.ends])
    assert sizes.sum() == min(mean * 5 * 2, 5 * most) and sizes.min() >= 2 and sizes.max() <= most
    assert len(plans) == 2 + min(blocks, (mean - 1) * 5)
    with pytest.raises(ValueError, match="mean=0.5 groups a prompt"):
        topologies.make_rule("xrpo_allocation", mean=0.5)


def test_rules_with_lost_rollouts():
    """An environment lost one rollout of the first prompt, and all of the last one."""
    rewards, valid = np.zeros((4, 8), np.float32), np.zeros((4, 8), bool)
    rewards[0, :1], rewards[1, :4], valid[0, :3], valid[1:3, :4] = 1, 1, True, True
    rule = topologies.make_rule("speed_rl")
    assert rule.more(rewards, valid, 4, 8).tolist() == [4, 0, 0, 0]
    valid[0, :6] = True  # of the four further rollouts one is lost
    assert not rule.more(rewards, valid, 4, 8).any() and rule.keep(rewards, valid).tolist() == [True, False, False, False]
    rule = topologies.make_rule("xrpo_allocation", blocks=1)
    more = rule.more(rewards, valid, 4, 8)  # 14 of 32 rollouts: what is missing goes to prompts with room, in whole groups
    assert more.tolist() == [0, 4, 4, 4]


def test_sizes_are_exact():
    topology = sized(4, most=6)
    plans, forest = follow_sized(topology, [0, 3, 6, 99])
    assert asked(plans) == [4, {0: 1, 1: 3, 2: 6, 3: 6}] and topology.choose(forest).all() and topology.most == 6


def follow_sized(topology, sizes):
    """As `follow`, where the problems have these sizes."""
    seen = topology._replace(plan=lambda forest: topology.plan(
        forest.with_facts({"group_size": np.int32(sizes)}) if forest.problems else forest))
    return follow(seen)


def test_names_and_keywords_are_checked():
    assert topologies.rule_names() == sorted(topologies.RULES) and {"dars", "gvm_raft", "ngu"} <= {*topologies.RULES}
    with pytest.raises(ValueError, match="allocation rule 'darts'. Did you mean 'dars'"):
        topologies.make_rule("darts")
    with pytest.raises(ValueError, match="weighting 'hard'"):
        topologies.make_rule("dars", weighting="hard")


def test_an_empty_choice_is_no_error_for_a_filter():
    """All prompts leave by the rule before the filter looks at them."""
    topology = refill(by_rule(2, group=2, most=4, rule=topologies.make_rule("dars")), 2, keep=disagree, attempts=2)
    _, forest = follow(topology, lambda problem, number: 1.0)
    assert not topology.choose(forest).any()
