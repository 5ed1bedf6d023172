"""Replay rules by hand: stored rollouts, replaced rollouts, and returning groups."""
import textwrap

import numpy as np
import pytest

from jaxrl_llm import replay
from jaxrl_llm.replay import base

rng = np.random.default_rng


def arrays(rewards, valid=None):
    rewards = np.float32(rewards)
    return rewards, np.ones(rewards.shape, bool) if valid is None else np.array(valid, bool)


def test_rapo_puts_the_latest_success_into_groups_where_all_fail():
    """The worked example of the paper's rewards: 1.1 right, 0.1 well-formed and wrong."""
    rule = replay.make("latest_success")
    rewards, valid = arrays([[1.1, 0.1, 0.1, 0.1], [0.1] * 4, [0.5] * 4, [1.1] * 4], [[1] * 4, [0, 1, 1, 0], [1] * 4, [1] * 4])
    assert rule.admit(rewards, valid).tolist() == [[True] + [False] * 3, [False] * 4, [False] * 4, [True] * 4]
    place = rule.gives_way(rewards, valid, rng(0))
    assert place[[0, 3]].tolist() == [-1, -1] and place[1] in (1, 2) and 0 <= place[2] < 4
    assert rule.per_prompt == 1 and rule.as_sampled and rule.most(problems=50, per_step=8) == 50


def test_rapo_puts_nothing_into_a_group_without_a_rollout():
    assert replay.make("latest_success").gives_way(*arrays(np.zeros((2, 2)), [[0, 0], [0, 1]]), rng(0)).tolist() == [-1, 1]


def test_rapo_lets_each_member_give_way_as_often():
    place = replay.make("latest_success").gives_way(*arrays(np.zeros((3000, 3))), rng(1))
    np.testing.assert_allclose(np.bincount(place) / 3000, [1 / 3] * 3, atol=0.03)


def test_arpo_puts_a_past_success_in_the_first_place():
    """Fails: std below 0.05 and mean below 0.2. A group of ones, or of a mean of 0.2, does not."""
    rule = replay.make("past_success")
    rewards, valid = arrays([[0] * 4, [1] * 4, [1, 0, 0, 0], [0.2] * 4, [0.9, 0.1, 0.1, 0.1], [0] * 4],
                            [[1] * 4, [1] * 4, [1] * 4, [1] * 4, [0, 0, 1, 1], [0] * 4])
    assert rule.gives_way(rewards, valid, rng(0)).tolist() == [0, -1, -1, -1, 2, -1]
    assert rule.admit(rewards, valid).sum(1).tolist() == [0, 4, 1, 4, 0, 0]  # above 0.1, and 0.1 is not
    assert rule.per_prompt == 8 and not rule.as_sampled and rule.most(problems=5, per_step=8) == 40


def test_remix_takes_groups_of_the_last_two_policies_and_none_twice():
    rule = replay.make("recent_groups", reuse=0.5)
    born, counts = np.repeat([7, 8, 9], 40), np.zeros(4, int)
    for seed in range(50):
        chosen = rule.groups(born, 10, 40, rng(seed))
        assert len(set(chosen)) == len(chosen) <= 40
        counts += np.bincount(10 - born[chosen], minlength=4)
    np.testing.assert_allclose(counts / 2000, [0, 0.25, 0.25, 0], atol=0.04)
    assert rule.groups(np.array([9, 9]), 10, 400, rng(0)).tolist() in ([0, 1], [1, 0])  # there are no more
    assert rule.admit(*arrays([[0, 1]], [[1, 0]])).tolist() == [[True, False]]
    assert rule.most(problems=1000, per_step=32) == 64
    ending = replay.make("recent_groups", reuse=1.0, until=10)
    born = np.repeat([8, 9], 40)
    assert len(ending.groups(born - 1, 9, 40, rng(0))) == 40 and not len(ending.groups(born, 10, 40, rng(0)))


def test_spear_stores_what_did_better_than_its_group_and_replays_it_when_the_buffer_is_full():
    rule = replay.make("self_imitation")
    rewards, valid = arrays([[1, 0, 0, 0], [1, 1, 1, 1], [0.5, 0.2, 9, 0.1]], [[1] * 4, [1] * 4, [1, 1, 0, 1]])
    assert rule.admit(rewards, valid).tolist() == [[True, False, False, False], [False] * 4, [True, False, False, False]]
    assert not len(rule.groups(np.arange(12), 9, 8, rng(0)))  # 1.5 times 8 are not more than that
    chosen = rule.groups(np.arange(13), 9, 8, rng(0))
    assert len(set(chosen)) == 8 and len(rule.groups(np.arange(19), 9, 12, rng(0))) == 8  # a power of two up to 12
    assert len(replay.make("self_imitation", batches=3.0).groups(np.arange(37), 9, 8, rng(0))) == 16
    assert (rule.updates, rule.restarts, rule.as_sampled, rule.max_age) == (1, True, True, 10)
    assert rule.most(problems=3, per_step=8) == 80


def test_a_rule_needs_a_limit_and_names_are_checked():
    with pytest.raises(ValueError, match="stores no or endlessly many rollouts; give one of them"):
        base.Replay(lambda rewards, valid: valid).most(3, 3)
    with pytest.raises(ValueError, match="capacity=0"):
        replay.make("prioritised", capacity=0).most(3, 3)
    with pytest.raises(ValueError, match="batches=0.0, fill=1.5; give the groups that are replayed"):
        replay.make("self_imitation", batches=0.0)
    with pytest.raises(ValueError, match="replay rule 'latest_sucess'. Did you mean 'latest_success'"):
        replay.make("latest_sucess")
    with pytest.raises(ValueError, match="keyword of replay rule 'recent_groups' 'max_ages'. Did you mean 'max_age'"):
        replay.make("recent_groups", max_ages=2)


def test_the_example_of_the_docstring_is_a_rule():
    lines = base.__doc__.partition("To add one")[2].partition("\n\n")[2]
    space = dict(vars(base)) | {"rule": lambda factory: factory, "np": np}
    exec(textwrap.dedent(lines), space)
    one = space["failures"](max_age=3)
    assert one.admit(*arrays([[1, 0, -1]])).tolist() == [[False, True, True]] and one.most(9, 2) == 6
    assert len(one.groups(np.arange(5), 5, 4, rng(0))) == 1
