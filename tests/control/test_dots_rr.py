"""DOTS-RR: predictions from measured problems, the choice of problems, and the worked example of buffer and loss."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_replay_buffer import EMPTY, batch, step, uids

from jaxrl_llm import control, objectives
from jaxrl_llm.control.dots_rr import attention, calibrated, calibration, networks, predictions, projected, selection
from jaxrl_llm.data.rollouts import from_lists
from jaxrl_llm.tasks.loader import drawn

Q, R = np.float32([[1, 0], [0, 1]]), np.float32([[1, 0], [0, 1], [1, 1]])


def test_the_worked_example_of_predictions():
    weights = attention(Q, R)
    np.testing.assert_allclose(weights, [[0.401112, 0.197776, 0.401112], [0.197776, 0.401112, 0.401112]], atol=1e-6)
    base = weights @ np.float32([0.25, 0.75, 0.5])
    np.testing.assert_allclose(base, [0.449166, 0.550834], atol=1e-6)
    temperature, bias = calibration(jnp.float32([0.5, -0.1]))
    np.testing.assert_allclose([temperature, bias], [0.974077, -0.099668], atol=1e-6)
    result = calibrated(base, temperature, bias)
    np.testing.assert_allclose(result, [0.423325, 0.527423], atol=1e-6)
    np.testing.assert_allclose(selection(result, tau=0.1), [0.3793, 0.6207], atol=5e-5)


def test_before_it_learns_the_predictor_averages_over_similar_problems():
    """Both networks begin alike and the calibration with 1 and 0: by the outputs of one of them, without the problem's own."""
    own = networks(jax.random.key(0), 4, width=16)
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    rates, read = np.float32([0.1, 0.9, 0.4, 0.5, 0.2, 0.7]), ~np.eye(6, dtype=bool)
    read[:, 5] = False
    h = np.asarray(projected(own["query"], x))
    np.testing.assert_allclose((h**2).mean(1), 1, rtol=1e-3)
    weights = np.where(read, np.exp(h @ h.T / 4), 0)
    base = weights @ rates / weights.sum(1)
    np.testing.assert_allclose(predictions(own, x, x, rates, read), base, rtol=1e-4)
    changed = np.append(rates[:5], np.float32(0))  # of a problem that nobody reads
    np.testing.assert_allclose(predictions(own, x, x, changed, read), base, rtol=1e-4)


@pytest.mark.slow
def test_the_predictor_learns_which_direction_is_difficulty():
    """One of eight directions of the embeddings decides; what was never measured is then predicted better than at the start."""
    x = np.random.default_rng(2).normal(size=(400, 8)).astype(np.float32)
    rates, results = (1 / (1 + np.exp(-3 * x[:, 0]))).astype(np.float32), {}
    for epochs in (0, 20):
        made = control.make("dots_rr", reference=48, every=1, width=32, epochs=epochs)
        state, observe = made.init(x, jax.random.key_data(jax.random.key(3))), jax.jit(made.observe)
        unseen = np.ones(400, bool)
        for _ in range(6):
            ids = np.asarray(state.next_ids)
            unseen[ids] = False
            state = observe(state, {"reference_rates": rates[ids]})
        predicted = np.asarray(state.predicted)
        results[epochs] = np.corrcoef(predicted[unseen], rates[unseen])[0, 1]
        entropy = -(rates * np.log(predicted) + (1 - rates) * np.log(1 - predicted))[unseen].mean()
        results[f"entropy {epochs}"] = entropy
    assert results[20] > results[0] + 0.1 and results[20] > 0.7 and results["entropy 20"] < results["entropy 0"], results


@pytest.mark.parametrize("tau", (1e-3, 0.1, 10.0))
def test_probabilities_sum_to_one_and_none_vanishes(tau):
    """At any distance from the target a problem has a weight that the loader can draw; equal predictions have equal weights."""
    predicted = np.float32([0.0, 0.3, 0.5, 0.5, 1.0, 0.5001])
    result = np.asarray(selection(predicted, tau=tau))
    assert result.sum() == pytest.approx(1) and result.min() > 0 and result[2] == result[3] == result.max()
    np.testing.assert_allclose(selection(np.full(7, 0.2, np.float32), tau=tau), 1 / 7, rtol=1e-6)
    assert sorted(drawn(np.array([3]), 6, result).tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_controller_measures_in_every_second_step_and_keeps_its_last_predictions():
    made = control.make("dots_rr", reference=3, every=2, width=8)
    x = np.random.default_rng(1).normal(size=(10, 4)).astype(np.float32)
    state = made.init(x, jax.random.key_data(jax.random.key(0)))
    np.testing.assert_allclose(made.propose(state)["prompt_weights"], 0.1, rtol=1e-6)
    asked, predicted, observe = [], [np.asarray(state.predicted)], jax.jit(made.observe)
    for _ in range(4):
        asked.append(np.asarray(made.propose(state)["reference_ids"]))
        rates = np.where(asked[-1] >= 0, [0.0, np.nan, 1.0], np.nan).astype(np.float32)
        state = observe(state, {"reference_rates": rates})
        predicted.append(np.asarray(state.predicted))
    assert [(one >= 0).all() for one in asked] == [True, False, True, False] and (asked[1] == -1).all()
    assert len({*asked[0].tolist()}) == 3 and asked[0].tolist() != asked[2].tolist()
    assert [(a != b).any() for a, b in zip(predicted, predicted[1:])] == [True, False, True, False]
    assert all(((0 < one) & (one < 1)).all() for one in predicted)
    unmeasured = observe(state._replace(next_ids=jnp.int32([0, 1, 2])), {"reference_rates": np.full(3, np.nan, np.float32)})
    np.testing.assert_array_equal(unmeasured.predicted, predicted[-1])
    with pytest.raises(ValueError, match="reference=1 problems every=2 steps"):
        control.make("dots_rr", reference=1)
    with pytest.raises(ValueError, match="width=1, epochs=20"):
        control.make("dots_rr", width=1)


def test_the_worked_example_of_the_buffer():
    """Problems 1 and 2 are stored; 2 returns, 3 is solved by all, 4 is new: 1, the new 2 and 4 stay."""
    from jaxrl_llm import replay
    rule = replay.make("dots_rr")
    first = step(rule, EMPTY, batch([1, 2], [[1, 0, 1, 0], [1, 0, 0, 0]], version=0), 0)
    assert uids(first.buffer) == [(1, [0, 1, 2, 3]), (2, [4, 5, 6, 7])]
    fresh = batch([2, 3, 4], [[1, 1, 0, 0], [1] * 4, [1, 1, 1, 0]], version=1, first_uid=8)
    second = step(rule, first.buffer, fresh, 1, prompts=1)
    assert uids(second.buffer) == [(1, [0, 1, 2, 3]), (2, [8, 9, 10, 11]), (4, [16, 17, 18, 19])]


def test_a_problem_that_is_solved_leaves_the_buffer():
    """The newest group of problem 2 has no spread, so its older one goes; a problem that was lost keeps its group."""
    from jaxrl_llm import replay
    rule = replay.make("dots_rr")
    first = step(rule, EMPTY, batch([1, 2], [[1, 0, 1, 0], [1, 0, 0, 0]], version=0), 0)
    second = step(rule, first.buffer, batch([2, 5], [[1] * 4, [1, 0, 0, 0]], version=1, first_uid=8), 1, prompts=1)
    assert uids(second.buffer) == [(1, [0, 1, 2, 3]), (5, [12, 13, 14, 15])]
    twice = step(rule, first.buffer, batch([2, 2], [[1, 0, 0, 0], [0] * 4], version=1, first_uid=8), 1, prompts=1)
    assert uids(twice.buffer) == [(1, [0, 1, 2, 3])]


def test_a_full_buffer_loses_whole_groups():
    from jaxrl_llm import replay
    rule = replay.make("dots_rr", capacity=6)
    buffer = step(rule, EMPTY, batch([1, 2], [[1, 0, 1, 0], [1, 0, 0, 0]], version=0), 0).buffer
    assert uids(buffer) == [(2, [4, 5, 6, 7])]


@pytest.mark.parametrize("fresh, sampled", [(0.5, 4), (0.3, 3), (1.0, 8), (0.0, 1)])
def test_a_share_of_the_batch_is_replayed(fresh, sampled):
    """Eight prompts: at least one is always sampled, and the buffer may have too few."""
    from jaxrl_llm import replay
    from jaxrl_llm.replay import buffer as buffers
    rule = replay.make("dots_rr", fresh=fresh)
    buffer = step(rule, EMPTY, batch(range(9), [[1, 0]] * 9, version=0), 0).buffer
    stored, left = buffers.take(rule, buffer, 1, 8, np.random.default_rng(0))
    assert 8 - len(stored.problems) == sampled and len(left.problems) == 9
    with pytest.raises(ValueError, match="fresh=1.5"):
        replay.make("dots_rr", fresh=1.5)


def test_the_worked_example_of_the_loss():
    """Two one-token rollouts; the second ratio, 2.0, is above 1.6 * 1.2."""
    rollouts = from_lists([[1.0, 1.0]], behavior_logprobs=np.log(np.float32([[[0.4], [0.25]]])),
                          old_logprobs=np.log(np.float32([[[0.4], [0.4]]])))
    made, new = objectives.make("dots_rr"), np.log(np.float32([[[0.45], [0.5]]]))

    def loss(logprobs):
        return made.update(logprobs, rollouts, np.ones((1, 2, 1), np.float32), made.init())[0]

    value, gradient = jax.value_and_grad(loss)(new)
    np.testing.assert_allclose(value, -1.5225, atol=1e-6)
    np.testing.assert_allclose(gradient[0, :, 0], [-0.5625, 0], atol=1e-6)
