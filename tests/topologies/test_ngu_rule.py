"""NGU's rounds by hand: who gets another group, who is trained on, and how many rollouts an unsolved prompt gets."""
import numpy as np
import pytest
from test_topologies import asked, follow

from jaxrl_llm import topologies
from jaxrl_llm.topologies import by_rule, refill
from jaxrl_llm.topologies.rounds import chances


def test_rounds_go_on_until_one_is_right_or_the_prompt_is_given_up():
    """again = 0.8: after one round a prompt goes on if its chance is below 0.8, after two below 0.64, then below 0.512."""
    rule = topologies.make_rule("ngu", again=0.8)
    rewards, chance = np.zeros((4, 12), np.float32), np.array([0.6, 0.7, 0.2, 0.9])
    for rounds, more in ((1, [2, 2, 2, 0]), (2, [2, 0, 2, 0]), (3, [0, 0, 2, 0])):
        valid = np.arange(12) < np.full((4, 1), 2 * rounds)
        assert rule.more(rewards, valid, 2, 12, chance=chance).tolist() == more
    rewards[2, 3] = 1
    assert rule.more(rewards, valid, 2, 12, chance=chance).tolist() == [0, 0, 0, 0]
    assert rule.keep(rewards, valid).tolist() == [False, False, True, False]


def test_a_prompt_is_trained_on_with_all_its_rollouts():
    """Groups of 4: the first is right at once, the second in the third round, the third never, the fourth is all right."""
    right = {0: "0100", 1: "0000" "0000" "0010", 2: "0" * 16, 3: "1111"}
    topology = by_rule(4, group=4, most=16, rule=topologies.make_rule("ngu", again=1))
    plans, forest = follow(topology, lambda problem, number: float(right[problem][number]))
    assert asked(plans) == [4, dict.fromkeys(range(4), 4), {1: 4, 2: 4}, {1: 4, 2: 4}, {2: 4}]
    assert topology.choose(forest).tolist() == [True, True, False, False]
    assert np.bincount(forest.prompt[forest.ends]).tolist() == [4, 12, 16, 4]


def test_the_number_of_rounds_is_geometric():
    """With again = 3/4 an unsolved prompt gets 4 groups in expectation; 4000 prompts, a standard error of 0.055."""
    rule, chance = topologies.make_rule("ngu", again=0.75), np.random.default_rng(0).random(4000)
    groups = np.ones(4000, int)
    while (more := rule.more(np.zeros((4000, 99)), np.arange(99) < groups[:, None], 1, 99, chance=chance)).any():
        groups += more
    assert abs(groups.mean() - 4) < 0.2 and abs((groups == 1).mean() - 0.25) < 0.03


def test_the_chance_of_a_prompt_is_the_same_in_every_look_and_another_for_every_prompt():
    topology = by_rule(3, group=2, most=4, rule=topologies.make_rule("ngu"))
    _, first = follow(topology._replace(plan=lambda forest: topologies.Plan() if len(forest.ends) else topology.plan(forest)),
                      lambda problem, number: 0.0)
    _, later = follow(topology, lambda problem, number: 0.0)
    np.testing.assert_array_equal(chances(first), chances(later))
    assert len({*chances(first), *chances(first, seed=1)}) == 6 and len(later.ends) > len(first.ends)


def test_the_rounds_of_another_seed_are_others():
    """Of 32 prompts that are never solved, each of which goes on with a chance of one half."""
    def sizes(seed):
        topology = by_rule(32, group=2, most=8, rule=topologies.make_rule("ngu", again=0.5), seed=seed)
        _, forest = follow(topology, lambda problem, number: 0.0)
        return np.bincount(forest.prompt[forest.ends]).tolist()

    assert sizes(0) == sizes(0) != sizes(1)


def test_dropped_prompts_are_replaced_by_a_filter_that_draws():
    """Of each draw of two, one is right at once in all its rollouts; until two prompts have both outcomes."""
    topology = refill(by_rule(2, group=2, most=6, rule=topologies.make_rule("ngu", again=1)), 2,
                      keep=lambda forest: np.ones(len(forest.problems), bool), attempts=9)
    plans, forest = follow(topology, lambda problem, number: 1.0 if problem % 2 else float(number == 3))
    assert asked(plans) == [2, {0: 2, 1: 2}, {0: 2}, 2, {2: 2, 3: 2}, {2: 2}]
    assert topology.choose(forest).tolist() == [True, False, True, False]


def test_rollouts_that_an_environment_loses_end_no_prompt_early():
    """A round of which one rollout is lost counts as a round; one that is lost as a whole counts as none."""
    rule, rewards, valid = topologies.make_rule("ngu", again=0.5), np.zeros((2, 6)), np.zeros((2, 6), bool)
    valid[0, :3] = True
    assert rule.more(rewards, valid, 2, 6, chance=np.array([0.3, 0.3])).tolist() == [0, 2]


@pytest.mark.parametrize("again", [1.01, -0.1, float("nan"), float("inf")])
def test_a_number_that_is_no_probability_is_an_error(again):
    with pytest.raises(ValueError, match="ngu.*again=.*; give 0 or more and at most 1"):
        topologies.make_rule("ngu", again=again)
