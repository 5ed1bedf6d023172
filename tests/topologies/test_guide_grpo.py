"""Groups under hints: who gets one, what it replaces, the worked example of the loss, and refusals."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from played import play, rewards_of, uids_of

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.forest import outcomes, select
from jaxrl_llm.data.rollouts import from_lists
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.topologies import TOPOLOGIES, refill, single
from jaxrl_llm.topologies.guide_grpo import guide_grpo, mixed_in
from jaxrl_llm.topologies.hints import begun, hint_of, tells

HARD = Problem(({"role": "user", "content": "3+4="},), "7", 5, extra={"hint": "Count on from 3."})
EASY = Problem("1+1=", "2", 2, extra={"solution": "One and one are 2."})
BARE = Problem("9*9=", "", 9)


def earns(problem, act, number):
    """Hard problems are solved under a hint alone, by the second rollout; the easy one always by the first."""
    return float(number == 1) if act.reads != () else float(problem.id == 2 and number == 0)


def test_a_group_under_a_hint_replaces_one_that_failed():
    topology = guide_grpo(single(3, group=2), group=2)
    plans, forest = play(topology, [HARD, EASY, BARE], earns, uid=40)
    assert [plan.draw for plan in plans] == [3, 0, 0] and topology.most is None
    (act,) = plans[2].acts
    assert act.reads.prompt == ({"role": "user", "content": "3+4=\n\nHint: Count on from 3."},) and act.count == 2
    assert act.at.id == -6 and act.at.prompt == HARD.prompt and act.at.extra["first_uid"] == 40
    assert rewards_of(forest) == {5: [0, 0], 2: [1, 0], 9: [0, 0], -6: [0, 1]}
    assert topology.choose(forest).tolist() == [False, True, True, True]
    assert topology.metrics(forest) == {"hint/prompts": 1 / 3, "hint/rescued": 1, "hint/answer": 0}


def test_a_hint_that_does_not_fit_leaves_the_first_group():
    topology = guide_grpo(single(1, group=2), group=2)
    plans, forest = play(topology, [HARD], lambda problem, act, number: None if act.reads != () else 0.0)
    assert len(plans) == 3 and topology.choose(forest).tolist() == [True, False]
    assert topology.metrics(forest) == {"hint/prompts": 0}


def test_both_groups_may_be_one():
    topology = guide_grpo(single(2, group=2), group=2, join="add")
    _, forest = play(topology, [HARD, EASY], earns)
    assert rewards_of(forest) == {5: [0, 0, 0, 1], 2: [1, 0]} and topology.most == 4 and topology.choose(forest).all()
    plans, forest = play(topology, [HARD], lambda problem, act, number: None if act.reads != () else 0.0)
    assert len(plans) == 3 and rewards_of(forest) == {5: [0, 0]}


def test_filters_see_the_groups_that_replace_others():
    """Of four problems two are solved by some: the hard one under its hint."""
    def disagree(forest):
        rewards, _ = outcomes(forest, 2)
        return rewards.min(1) < rewards.max(1)

    topology = refill(guide_grpo(single(2, group=2), group=2), 2, keep=disagree, attempts=3)
    plans, forest = play(topology, [BARE, HARD, EASY, BARE], earns)
    assert [plan.draw for plan in plans] == [2, 0, 0, 2, 0] and [one.id for one in forest.problems] == [9, 5, -6, 2, 9]
    assert [one.id for one in select(forest, topology.choose(forest)).problems] == [-6, 2]
    metrics = topology.metrics(forest)
    assert metrics["hint/prompts"] == 0.25 and metrics["filter/draws"] == 2
    plans, forest = play(topology, [BARE, HARD, HARD, BARE], earns)  # drawn twice: each has a group of its own
    assert [one.id for one in forest.problems] == [9, 5, -6, 5, 9, -6] and topology.choose(forest).sum() == 2


def test_wrong_rollouts_under_hints_give_way_to_wrong_ones_without():
    """The first rollout stays where it is, since the group is known by it."""
    topology = guide_grpo(single(1, group=3), group=3, mixin=True)
    _, forest = play(topology, [HARD], earns, uid=10)
    whole = topology.finish(forest)
    assert uids_of(forest) == {5: [10, 11, 12], -6: [13, 14, 15]} and uids_of(whole) == {5: [10], -6: [14, 11, 12]}
    assert rewards_of(whole)[-6] == [1, 0, 0] and topology.choose(whole).tolist() == [False, True]
    _, failed = play(topology, [HARD], lambda problem, act, number: 0.0)
    assert mixed_in(failed) is failed


def test_hints_are_columns_or_first_parts_of_traces():
    assert hint_of(HARD, 0.5) == "Count on from 3." and hint_of(EASY, 0.5) == "One and"
    talk = [{"role": "assistant", "content": "Add them."}, {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": "It is 7."}]
    traces = Problem("3+4=", "7", 0, extra={"traces": [{"text": "It is 8.", "correct": False}, {"messages": talk}]})
    assert hint_of(traces, 1.0) == "Add them.\nIt is 7." and hint_of(BARE, 0.0) == ""
    assert [begun("123456", share) for share in (0.5, 1.0)] == ["123", "123456"]
    assert tells(HARD, "The sum is 7.") and not tells(HARD, "It is below 17.") and not tells(Problem("", "", 0), "7")


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Unknown join 'replcae'. Did you mean 'replace'"):
        guide_grpo(single(1, group=2), group=2, join="replcae")
    with pytest.raises(ValueError, match="without 'hint'; write {hint} where it belongs"):
        guide_grpo(single(1, group=2), group=2, template="Try again: {prompt}")
    (conflict,) = TOPOLOGIES["guide_grpo"].conflicts
    nothing = Task("games", [Problem("Play.", "", 0, extra={"seed": 3})], [], "exact")
    assert "the problems of task 'games' have neither" in conflict.why(nothing) and conflict.why(
        Task("sums", [BARE, EASY], [], "exact")) == ""
    assert hint_of(Problem("9*9=", "81", 9), 0.5) == "8"


# --- the loss -----------------------------------------------------------------------------------------------------------

BATCH = from_lists([[1, 0]]).replace(extras={"written_logprobs": jnp.log(jnp.float32([[[0.4], [0.3]]]))})
NEW = jnp.log(jnp.float32([[[0.1], [0.3]]]))


def loss_of(batch=BATCH, new=NEW, **numbers):
    """`(loss, gradient)` with the advantages of GRPO."""
    objective = objectives.make("guide_grpo", **numbers)
    values, _ = advantages.make("grpo").update(BATCH, ())
    A = jnp.broadcast_to(values[..., :1], new.shape)
    np.testing.assert_allclose(values[0, :, 0], [0.707106, -0.707106], atol=1e-6)
    (loss, _), gradient = jax.value_and_grad(objective.update, has_aux=True)(new, batch, A, ())
    return float(loss), np.asarray(gradient)[0].tolist()


@pytest.mark.parametrize(("numbers", "loss", "gradient"), [
    ({"over": "batch", "aggregation": "token_mean"}, 0.108440, [[-0.059219], [0.088254]]),
    ({"shaping": "none", "aggregation": "token_mean"}, 0.265165, [[-0.088388], [0.353553]]),
    ({}, 0.0, [[-0.088388], [0.088388]]),  # of one token the quantile is its own ratio: f = 1/2, slope 1/4
    ({"shaping": "constant", "gamma": 0.25}, 0.106066, [[-0.088388], [0.056569]]),
    ({"shaping": "power", "gamma": 0.5}, 0.176777, [[-0.088388], [0.176777]])])
def test_the_worked_example(numbers, loss, gradient):
    found, slopes = loss_of(**numbers)
    np.testing.assert_allclose(found, loss, atol=2e-6)
    np.testing.assert_allclose(slopes, gradient, atol=2e-6)


def test_tokens_without_a_hint_have_the_clipped_loss():
    """A ratio of 3 is clipped with A > 0, and one far below 1 with A < 0; under the hint both go on."""
    batch = BATCH.replace(old_logprobs=jnp.log(jnp.float32([[[0.1], [0.5]]])))
    new = jnp.log(jnp.float32([[[0.3], [0.1]]]))
    own = batch.replace(extras={"written_logprobs": jnp.full((1, 2, 1), jnp.nan)})
    loss, gradient = loss_of(own, new)
    np.testing.assert_allclose(loss, (-1.2 + 0.8) * 0.707106 / 2, atol=1e-6)
    assert gradient == [[0], [0]] and np.all(np.array(loss_of(batch, new)[1]) != 0)
    objective = objectives.make("guide_grpo", over="batch")
    assert objective.whole_batch and not objectives.make("guide_grpo").whole_batch
