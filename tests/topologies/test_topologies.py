"""The next samples of a source: plans against forests that grow by them."""
from collections import Counter

import numpy as np
import pytest

from jaxrl_llm.data.forest import grow, join, outcomes, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies import (
    Begin,
    BeginPart,
    FromTrace,
    Plan,
    Stop,
    Topology,
    budgets,
    groups,
    narrowed,
    refill,
    rounds,
    single,
)
from jaxrl_llm.topologies.acts import numbered
from jaxrl_llm.topologies.base import asked as asked_of
from jaxrl_llm.topologies.base import everyone, remembered
from jaxrl_llm.topologies.one_more import one_more
from jaxrl_llm.values.v0_5 import fuse, wants_more


def follow(topology, reward=lambda problem, number: 1.0, expected=None, score=None,
           loses=lambda problem, number: False):
    """`(the plans, the forest at the end)` where completion `number` of a problem earns `reward(problem id, number)`.

    `score`: the first component of the reward, if the reward has others. `loses`: whether an environment loses it.
    """
    forest, plans = plant([], [], ("exact",), answers=False), []
    while not (plan := topology.plan(forest)).complete:
        plans.append(plan)
        if plan.draw:
            first = len(forest.problems)
            new = plant([Problem("q", "", first + p) for p in range(plan.draw)], [[1]] * plan.draw, ("exact",), answers=False,
                        draw=int(forest.draw.max(initial=-1)) + 1)
            if expected is not None:
                new = new.with_facts({"expected": np.float32(expected[first:first + plan.draw])})
            forest = join([forest, new]) if forest.problems else new
            continue
        roots = np.flatnonzero(forest.role == Role.PROMPT)
        for act in plan.acts:
            row, had = act.at, int(asked_of(forest)[act.at])
            kept = [had + i for i in range(act.count) if not loses(row, had + i)]
            lost = forest.lost.copy()
            lost[row] += act.count - len(kept)
            earned, first = (np.float32([one(row, number) for number in kept]) for one in (reward, score or reward))
            n = len(kept)
            forest = grow(forest, [roots[row]] * n, [len(forest.uid) + i for i in range(n)], dict(
                          role=Role.POLICY if act.reads == () else Role.ELSEWHERE, length=[1] * n, stopped=[True] * n,
                          rewards=earned, components=first[:, None], texts=[""] * n, answers=None,
                          tokens=[5] * n, logprobs=[0.0] * n, entropies=[0.0] * n, version=[0] * n,
                          reads=[None if act.reads == () else [0]] * n))
            forest = forest.with_columns(lost=lost)
        assert len(plans) < 50
    return plans, forest


def asked(plans):
    """The problems that each plan draws, or the trajectories that it begins at each prompt."""
    return [plan.draw or dict(sum((Counter({act.at: act.count}) for act in plan.acts), Counter())) for plan in plans]


def test_one_group_for_every_prompt():
    topology = single(3, group=5)
    plans, forest = follow(topology)
    assert asked(plans) == [3, {0: 5, 1: 5, 2: 5}] and topology.choose(forest).tolist() == [True] * 3 and topology.most is None


def test_prompts_that_disagree_with_their_prior_are_sampled_again():
    """Prompt 0 agrees with its prior; 1 and 2 do not."""
    prior = np.array([1.0, 0.0, 1.0])
    truth = {0: [1] * 6, 1: [1, 1, 0, 1, 1, 0], 2: [0, 0, 0, 1, 1, 0]}

    def wants(forest):
        rewards, valid = outcomes(forest, 6)
        count = valid.sum(1)
        mean = (rewards * valid).sum(1) / count
        fused = fuse(prior, mean, count, variance=0.25)
        return np.asarray(wants_more(fused, count, variance=0.25, k_init=2, k_max=6, cost=0.01))

    topology = rounds(3, group=2, most=6, wants=wants)
    plans, forest = follow(topology, lambda problem, number: truth[problem][number])
    assert asked(plans)[:3] == [3, {0: 2, 1: 2, 2: 2}, {1: 2, 2: 2}] and topology.most == 6
    rewards, valid = outcomes(forest, 6)
    assert valid[0].tolist() == [True, True] + [False] * 4 and rewards[1, :4].tolist() == [1, 1, 0, 1]


def test_rounds_end_when_no_prompt_wants_more_or_at_the_limit():
    assert asked(follow(rounds(2, group=2, most=8, wants=lambda forest: np.zeros(2, bool)))[0]) == [2, {0: 2, 1: 2}]
    plans, _ = follow(rounds(2, group=2, most=5, wants=lambda forest: np.array([False, True])))
    assert asked(plans) == [2, {0: 2, 1: 2}, {1: 2}, {1: 1}]
    plans, _ = follow(rounds(2, group=2, most=9, wants=lambda forest: np.array([0, 3]) * (len(forest.ends) < 8)))
    assert asked(plans) == [2, {0: 2, 1: 2}, {1: 3}, {1: 3}]


def test_budgets_go_where_there_is_most_to_learn():
    topology = budgets(4, prompts=4, group=2, most=6, utility="per_rollout")
    plans, forest = follow(topology, expected=[0.0, 0.5, 0.5, 1.0])
    assert asked(plans) == [4, {0: 2, 1: 2, 2: 2, 3: 2}] and topology.choose(forest).all()  # each gets two at least
    plans, forest = follow(budgets(4, prompts=4, group=3, most=5, utility="per_rollout"), expected=[0.0, 0.5, 0.3, 1.0])
    assert asked(plans) == [4, {0: 2, 1: 3, 2: 5, 3: 2}]
    many = budgets(4, prompts=2, group=3, most=5, utility="per_rollout")  # too few rollouts for all prompts: some get none
    plans, forest = follow(many, expected=[0.0, 0.5, 0.5, 1.0])
    assert asked(plans) == [4, {1: 3, 2: 3}] and many.choose(forest).tolist() == [False, True, True, False]


def disagree(forest):
    rewards, valid = outcomes(forest, 8)
    return np.array([len(set(row[real].tolist())) > 1 for row, real in zip(rewards, valid)])


def test_problems_that_a_filter_drops_are_replaced():
    mixed = {1, 3, 4, 6}
    topology = refill(single(3, group=2), 3, keep=disagree, attempts=9)
    plans, forest = follow(topology, lambda problem, number: float(problem in mixed and number))
    assert asked(plans) == [3, {0: 2, 1: 2, 2: 2}, 3, {3: 2, 4: 2, 5: 2}] and forest.draw.tolist() == [0, 0, 0, 1, 1, 1]
    assert topology.choose(forest).tolist() == [p in (1, 3, 4) for p in range(6)]
    assert topology.metrics(forest) == {"filter/draws": 2, "filter/kept": 0.5}


def test_no_more_than_the_prompts_of_a_batch_are_kept():
    topology = refill(single(3, group=2), 2, keep=disagree, attempts=2)
    _, forest = follow(topology, lambda problem, number: float(number))
    assert topology.choose(forest).tolist() == [True, True, False]


def test_refilling_gives_up():
    topology = refill(single(2, group=2), 2, keep=disagree, attempts=3)
    plans, forest = follow(topology)
    assert sum(plan.draw for plan in plans) == 6 and not topology.choose(forest).any()
    assert topology.metrics(forest) == {"filter/draws": 3, "filter/kept": 0}


def test_refilling_of_rounds_asks_the_prompts_of_the_last_draw():
    """Each draw of two goes through its own rounds before the filter looks at it."""
    inner = rounds(2, group=2, most=4, wants=lambda forest: outcomes(forest, 4)[0].sum(1) == 0)
    topology = refill(inner, 2, keep=disagree, attempts=3)
    plans, forest = follow(topology, lambda problem, number: float((problem, number) in {(2, 0), (3, 3), (5, 1)}))
    assert asked(plans) == [2, {0: 2, 1: 2}, {0: 2, 1: 2}, 2, {2: 2, 3: 2}, {3: 2}] and topology.most == 4
    assert topology.choose(forest).tolist() == [False, False, True, True]


def test_refilling_keeps_what_a_plan_says_of_its_acts():
    """Beginnings, for the prompts of the second draw; what is measured of whole batches is refused."""
    half = (BeginPart(Role.EXPERT, FromTrace(0, 0.5)),)

    def plan(forest):
        if not forest.problems:
            return Plan(draw=2)
        return Plan() if len(forest.ends) else Plan(acts=(Begin(1, 1, half), Begin(0, 2, limit=3)))

    plans, _ = follow(refill(Topology(plan, everyone), 2, keep=disagree, attempts=2), lambda problem, number: 0.0)
    assert asked(plans) == [2, {1: 1, 0: 2}, 2, {3: 1, 2: 2}]
    assert plans[3].acts == (Begin(3, 1, half), Begin(2, 2, limit=3))
    measuring = Topology(lambda forest: Plan(measure="gradient_norms") if forest.problems else Plan(draw=2), everyone)
    with pytest.raises(NotImplementedError, match="gradient_norms are measured of a whole batch, and a filter draws"):
        follow(refill(measuring, 2, keep=disagree, attempts=2))


def test_what_a_filter_drops_can_leave_a_batch_smaller():
    """Alone it draws nothing again; behind a filter that refills it reads the kept prompts."""
    mixed = {1, 3, 4}
    topology = narrowed(single(3, group=2), keep=disagree)
    plans, forest = follow(topology, lambda problem, number: float(problem in mixed and number))
    assert asked(plans) == [3, {0: 2, 1: 2, 2: 2}] and topology.choose(forest).tolist() == [False, True, False]
    assert topology.metrics(forest) == {"filter/kept": pytest.approx(1 / 3)}

    def first_two(forest):
        assert len(forest.problems) == 3
        return np.array([True, True, False])

    topology = narrowed(refill(single(3, group=2), 3, keep=disagree, attempts=2), keep=first_two)
    plans, forest = follow(topology, lambda problem, number: float(problem in mixed and number))
    assert asked(plans) == [3, {0: 2, 1: 2, 2: 2}, 3, {3: 2, 4: 2, 5: 2}]
    assert topology.choose(forest).tolist() == [False, True, False, True, False, False]
    assert topology.metrics(forest) == {"filter/draws": 2, "filter/kept": pytest.approx(1 / 3)}


def test_a_problem_that_an_environment_always_loses_is_asked_once():
    """Others are sampled again meanwhile, and lost completions count in the limit: 2 loses all but its first one."""
    topology = rounds(3, group=2, most=6, wants=lambda forest: np.ones(3, bool))
    plans, forest = follow(topology, loses=lambda problem, number: problem == 1 or problem == 2 and number)
    assert asked(plans) == [3, {0: 2, 1: 2, 2: 2}, {0: 2, 2: 2}, {0: 2, 2: 2}]
    assert forest.lost.tolist() == [0, 2, 5] and outcomes(forest, 6)[1].sum(1).tolist() == [6, 0, 1]
    everything = follow(rounds(3, group=4, most=6, wants=lambda forest: np.ones(3, bool)), loses=lambda *_: True)
    assert asked(everything[0]) == [3, {0: 4, 1: 4, 2: 4}] and everything[1].lost.tolist() == [4, 4, 4]


@pytest.mark.parametrize("inner", [single(2, group=2), rounds(2, group=2, most=4, wants=lambda forest: np.zeros(2, bool))])
def test_a_draw_that_is_lost_whole_is_not_asked_again(inner):
    assert asked(follow(inner, loses=lambda *_: True)[0]) == [2, {0: 2, 1: 2}]
    topology = refill(inner, 2, keep=lambda part: part.draw > 0, attempts=5)
    plans, forest = follow(topology, loses=lambda problem, number: problem in (2, 3))
    assert asked(plans) == [2, {0: 2, 1: 2}, 2, {2: 2, 3: 2}, 2, {4: 2, 5: 2}] and forest.lost.tolist() == [0, 0, 2, 2, 0, 0]
    assert topology.choose(forest).tolist() == [False] * 4 + [True] * 2  # prompts without a trajectory do not pass
    budget = budgets(2, prompts=2, group=2, most=4, utility="per_rollout")
    assert len(follow(budget, expected=[0.5, 0.5], loses=lambda *_: True)[0]) == 2


def test_a_filter_sees_each_draw_once():
    seen = []

    def keep(part):
        seen.append(part.draw.tolist())
        return disagree(part)

    topology = refill(single(2, group=2), 2, keep=keep, attempts=9)
    for _ in range(2):  # what is known of a batch is not of the next
        del seen[:]
        _, forest = follow(topology, lambda problem, number: float(problem > 3 and number))
        assert topology.choose(forest).tolist() == [False] * 4 + [True] * 2 and topology.metrics(forest)["filter/kept"] == 1 / 3
        assert seen == [[0, 0], [1, 1], [2, 2]]


def test_a_plan_is_complete_without_draws_and_acts():
    assert Plan().complete and not Plan(draw=1).complete and not Plan(acts=groups([0], 1)).complete


def test_blocks_of_uids_are_of_one_prompt():
    """Groups of four: counts of four have consecutive uids; five take two blocks, and acts at one prompt share a block."""
    acts = [Begin(3, 1), Begin(3, 3), *groups([5, 3], [5, 4]), Stop(7), *groups([1, 2, 2], [0, 2, 4])]
    assert [act.at for act in acts if isinstance(act, Begin)] == [3, 3, 5, 3, 2, 2]
    found, after = numbered(acts, 8, 4)
    assert [(uids[0], len(uids)) for _, uids in found] == [(8, 1), (9, 3), (12, 5), (20, 4), (24, 2), (26, 4)]
    assert after == 32 and numbered(groups(range(3), 4), 0, 4)[1] == 12


def test_a_group_and_the_rollout_of_its_median():
    topology = one_more(2, group=4)
    assert asked(follow(topology)[0]) == [2, {0: 5, 1: 5}] and topology.most == 5


def test_a_topology_remembers_what_a_checkpoint_gives_back():
    topology = Topology(lambda forest: Plan(), everyone, memory={"tried": [1, 2.5], "of": {"a": None}})
    kept = remembered(topology)
    assert kept == topology.memory and kept["tried"] is not topology.memory["tried"]
    for memory, said in (({3: 1}, "{3: 1}, and a checkpoint would give back {'3': 1}"),
                         ({"a": (1,)}, "keep lists and dicts with texts as keys"),
                         ({"a": np.int64(1)}, "which no checkpoint can have")):
        with pytest.raises(ValueError, match=said):
            remembered(topology._replace(memory=memory))
