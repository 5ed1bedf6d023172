"""Games in one compiled loop: restarts, the published facts of episodes, and independent games."""
import counting_game
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.environments import episodes, games

COUNTER = games.Game(
    words=("0", "1"), reset=lambda key, heldout: jnp.int32(0), legal=lambda state: jnp.ones(2, bool), seen=None, text=None,
    step=lambda state, action, key: (state + action, games.Move(action.astype(jnp.float32), state + action >= 2)))


def test_a_worked_example():
    running, steps = episodes.begin(COUNTER, jax.random.key(0)), []
    states = []
    for number in range(3):
        running, made = episodes.step(COUNTER, running, jnp.int32(1), jax.random.key(number))
        states.append(int(running.state))
        steps.append(jax.device_get(made))
    assert states == [1, 0, 1] and [step.reward for step in steps] == [1, 1, 1]
    assert [bool(step.done) for step in steps] == [False, True, False]
    assert [float(step.total) for step in steps] == [0, 2, 0] and [int(step.length) for step in steps] == [0, 2, 0]


def test_a_game_does_not_depend_on_how_many_there_are():
    game, key = counting_game.GAMES[False], jax.random.key(4)
    _, few = episodes.rollout(game, key, 3, 25)
    _, many = episodes.rollout(game, key, 17, 25)
    for a, b in zip(few, many):
        np.testing.assert_array_equal(a, b[:, :3])
    assert len({tuple(column) for column in np.asarray(many.length).T.tolist()}) > 8, "each has chance of its own"


def test_episodes_add_up():
    game = counting_game.GAMES[False]
    running, steps = jax.device_get(episodes.rollout(game, jax.random.key(1), 8, 40))
    assert steps.reward.shape == (40, 8)
    np.testing.assert_allclose(steps.total.sum(0) + running.total, steps.reward.sum(0))
    np.testing.assert_array_equal(steps.length.sum(0) + running.length, 40)
    np.testing.assert_array_equal(steps.done, steps.length > 0)
    assert set(steps.total[steps.done].tolist()) == {1.0}, "legal moves count to five"
    assert 2 <= steps.length[steps.done].min() and steps.length.max() <= 5


def test_episodes_end_with_their_turns_and_policies_are_asked():
    stays = games.Game(
        words=("stay",), reset=lambda key, heldout: jnp.int32(7), legal=lambda state: jnp.ones(1, bool), seen=None, text=None,
        step=lambda state, action, key: (state, games.Move(jnp.float32(0.5), jnp.bool_(False))), turns=4)
    _, steps = episodes.rollout(stays, jax.random.key(0), 2, 9, lambda game, state, key: jnp.int32(0))
    np.testing.assert_array_equal(np.asarray(steps.done)[:, 0], [0, 0, 0, 1, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(np.asarray(steps.total)[:, 1], [0, 0, 0, 2, 0, 0, 0, 2, 0])


@pytest.mark.slow
def test_random_games_of_pgx():
    """X moves first and wins more often than O; at most a third of the games have no winner."""
    pytest.importorskip("pgx")
    from jaxrl_llm import environments
    game = environments.make("pgx_game", opening=0).reset.game
    _, steps = jax.device_get(episodes.rollout(game, jax.random.key(0), 64, 60))
    totals = steps.total[steps.done]
    assert len(totals) > 500 and 0.5 < (totals == 1).mean() < 0.68 and 0.2 < (totals == -1).mean() < 0.38
    assert steps.length[steps.done].max() == 5 and steps.length[steps.done].min() == 3
