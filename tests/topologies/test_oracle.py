"""The oracle: who is asked what to expect of problems, and what the answers say."""
import numpy as np

from jaxrl_llm.data.forest import grow, join, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.sampling.stages.measure import with_expected
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies import oracle, refill, single


def planted(first, count, draw):
    new = plant([Problem("q", "", first + p) for p in range(count)], [[1]] * count, ("exact",), answers=False, draw=draw)
    return new.with_facts({"expected": np.full(count, np.nan, np.float32)})


def sampled(forest, rows, rewards, tokens):
    """The forest with one completion of `tokens` tokens for each of the rows."""
    roots, n = np.flatnonzero(forest.role == Role.PROMPT), len(rows)
    earned = np.asarray(rewards, np.float32)
    return grow(forest, roots[rows].tolist(), [len(forest.uid) + i for i in range(n)], dict(
                role=Role.POLICY, length=[tokens] * n, stopped=[True] * n, rewards=earned,
                components=earned[:, None], texts=[""] * n, answers=None,
                tokens=[5] * n * tokens, logprobs=[0.0] * n * tokens, entropies=[0.0] * n * tokens, version=[0] * n * tokens))


def rows(plan):
    return [act.at for act in plan.acts]


def test_the_policy_is_asked_of_each_draw_before_it_is_sampled():
    empty = plant([], [], ("exact",), answers=False)
    topology = oracle(single(3, group=1), prompts=3, group=1, draws=2)
    assert topology.plan(empty).draw == 3
    forest = planted(0, 3, draw=0)
    plan = topology.plan(forest)
    assert plan.measure == "expected" and rows(plan) == [0, 1, 2, 0, 1, 2]
    known, tokens = with_expected(forest, sampled(forest, rows(plan), [1, 0, 0.5, 0, 0, 1], tokens=4))
    assert known.facts["expected"].tolist() == [0.5, 0, 0.75] and tokens == 24 and not len(known.ends)
    plan = topology.plan(known)
    assert not plan.measure and rows(plan) == [0, 1, 2]
    assert topology.plan(sampled(known, rows(plan), [1, 1, 0], tokens=1)).complete


def test_a_budget_asks_for_successes():
    """Returns of -1 and 1, of which 1 solves: half of the first problem's samples, none of the second's."""
    forest = planted(0, 2, draw=0)
    grown = sampled(forest, np.array([0, 0, 1, 1]), [-1, 1, -1, -1], tokens=1)
    rewards, successes = (with_expected(forest, grown, asked)[0].facts["expected"].tolist() for asked in (False, True))
    assert (rewards, successes) == ([0, -1], [0.5, 0])


def test_a_second_draw_is_asked_alone():
    """A filter that keeps nobody draws again: what is known of the first problems stays, and none of their samples count."""
    topology = refill(oracle(single(2, group=1), prompts=2, group=1, draws=1), 2,
                      keep=lambda forest: np.zeros(len(forest.problems), bool), attempts=2)
    first = planted(0, 2, draw=0).with_facts({"expected": np.float32([0.25, 1])})
    first = sampled(first, np.array([0, 1]), [1, 1], tokens=2)
    assert topology.plan(first).draw == 2
    forest = join([first, planted(2, 2, draw=1)])
    plan = topology.plan(forest)
    assert plan.measure == "expected" and rows(plan) == [2, 3]
    known, tokens = with_expected(forest, sampled(forest, rows(plan)[:1], [0.5], tokens=3))
    assert known.facts["expected"].tolist() == [0.25, 1, 0.5, 0.5] and tokens == 3  # all trajectories of the last were lost
    assert len(known.ends) == 2 and rows(topology.plan(known)) == [2, 3]
