"""Traces by plans: who gets plans, what enters a group that failed, the cache of the worked example, and the loss."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from played import play, rewards_of, uids_of

from jaxrl_llm import advantages, objectives, replay
from jaxrl_llm.data.forest import outcomes, select
from jaxrl_llm.data.rollouts import Role, from_lists
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies import single
from jaxrl_llm.topologies.base import recall, remember
from jaxrl_llm.topologies.bepa import bepa

PLANNED = Problem("3+4=", "7", 5, extra={"plan": "Count on from 3."})
EASY = Problem("1+1=", "2", 2, extra={"plan": "Add."})
BARE = Problem("9*9=", "", 9)


def earns(problem, act, number):
    """By a plan the second and third rollouts are right, and without one the first of the easy problem."""
    return float(number in (1, 2)) if act.reads != () else float(problem.id == 2 and number == 0)


def test_the_first_success_by_a_plan_takes_the_last_place_of_a_group_that_failed():
    topology = bepa(single(3, group=2), tries=4)
    plans, forest = play(topology, [PLANNED, EASY, BARE], earns, uid=40)
    (act,) = plans[2].acts
    assert act.reads.prompt == "3+4=\n\nFollow this plan: Count on from 3." and act.count == 4 and act.at.id == -6
    whole = topology.finish(forest)
    assert uids_of(forest) == {5: [40, 41], 2: [42, 43], 9: [44, 45], -6: [46, 47, 48, 49]}
    assert uids_of(whole) == {5: [40, 47], 2: [42, 43], 9: [44, 45], -6: [46, 48, 49]}
    assert rewards_of(whole)[5] == [0, 1] and whole.role[whole.uid == 47].tolist() == [Role.ELSEWHERE]
    assert topology.choose(whole).tolist() == [True, True, True, False]
    assert topology.metrics(whole) == {"plan/prompts": 1 / 3, "plan/solved": 1, "plan/answer": 0}


def test_a_problem_gets_plans_once_and_not_after_it_was_solved():
    """Those without plans are asked for them again, which costs nothing; a resumed run remembers all of it."""
    topology = bepa(single(3, group=2), tries=2)
    play(topology, [PLANNED, EASY, BARE], lambda *_: 0.0)
    assert topology.memory == {"settled": [2, 5]}
    other = bepa(single(3, group=2), tries=2)
    remember(other, topology.memory)
    plans, forest = play(other, [PLANNED, EASY, BARE], lambda *_: 0.0)
    assert len(plans) == 2 and other.finish(forest) is forest and other.metrics(forest) == {"plan/prompts": 0}
    solved = bepa(single(1, group=2))
    play(solved, [EASY], earns)
    assert solved.memory == {"settled": [2]}


def test_a_checkpoint_of_another_topology_leaves_the_memory_as_it_begins():
    topology = bepa(single(1, group=2), tries=2)
    recall(topology, {"groups": 7})
    play(topology, [PLANNED], lambda *_: 0.0)
    assert topology.memory == {"groups": 7, "settled": [5]}
    recall(topology, {"settled": [9]})
    assert topology.memory["settled"] == [9]
    recall(topology, None)
    assert topology.memory["settled"] == [9]


def test_the_cache_of_the_worked_example():
    """Four rollouts and three visits: nothing is right, then the second and the fourth, then nothing again."""
    rule, rng = replay.make("latest_success", place="last"), np.random.default_rng(0)
    topology, buffer, seen, found = bepa(single(1, group=4), tries=1), None, [], []
    visits = [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]
    for visit, earned in enumerate(visits):
        first = 1 + 10 * visit
        _, forest = play(topology, [PLANNED], lambda problem, act, number: 1.0 if act.reads != () else float(earned[number]),
                         uid=first)
        whole = topology.finish(forest)
        whole = select(whole, topology.choose(whole))
        buffer = select(whole, np.zeros(1, bool)) if buffer is None else buffer
        nothing = select(buffer, np.zeros(len(buffer.problems), bool))
        mixed = buffers.mix(rule, whole, nothing, buffer, visit, 4, rng)
        buffer = mixed.buffer
        rewards, valid = outcomes(mixed.forest, 4)
        values, _ = advantages.make("grpo").update(from_lists(rewards.tolist()), ())
        seen.append(mixed.forest.uid[mixed.forest.ends].tolist())
        found.append(np.asarray(values)[0, :, 0])
        assert valid.all()
    assert seen == [[1, 2, 3, 5], [11, 12, 13, 14], [21, 22, 23, 14]]  # 5 is the trace by the plan, 14 the latest success
    one = [-0.499999, -0.499999, -0.499999, 1.499997]
    np.testing.assert_allclose(found, [one, [-0.866024, 0.866024, -0.866024, 0.866024], one], atol=2e-6)


def test_what_is_injected_has_the_loss_of_its_shaped_probability():
    """p = 1/2 of a replayed token, 1/20 of one that was written elsewhere, and PPO's clip at a ratio of 1.5."""
    new, old = jnp.log(jnp.float32([[[0.5], [0.05], [0.3]]])), jnp.log(jnp.float32([[[0.4], [0.04], [0.2]]]))
    batch = from_lists([[1, 1, 0]]).replace(
        role=jnp.int8([[[Role.POLICY], [Role.ELSEWHERE], [Role.POLICY]]]), old_logprobs=old,
        extras={"replayed": jnp.array([[True, False, False]])})
    objective, A = objectives.make("bepa"), jnp.float32([[[0.5], [0.5], [1.0]]])
    (loss, (metrics, _)), gradient = jax.value_and_grad(objective.update, has_aux=True)(new, batch, A, ())
    np.testing.assert_allclose(loss, (-0.5 * 0.5 / 0.6 - 0.5 * 0.05 / 0.15 - 1.2) / 3, rtol=1e-5)
    np.testing.assert_allclose(gradient[0, :, 0], [-0.5 * 0.05 / 0.36 / 3, -0.5 * 0.005 / 0.0225 / 3, 0], rtol=1e-5)
    assert metrics["injected_fraction"] == pytest.approx(2 / 3) and metrics["rare_fraction"] == pytest.approx(1 / 3)


def test_the_last_of_a_group_gives_way():
    rule = replay.make("latest_success", place="last")
    rewards, valid = np.float32([[0, 0, 0], [0, 0, 0], [0, 1, 0]]), np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], bool)
    assert rule.gives_way(rewards, valid, np.random.default_rng(0)).tolist() == [2, 1, -1]
    with pytest.raises(ValueError, match="Unknown place 'lats'. Did you mean 'last'"):
        replay.make("latest_success", place="lats")
