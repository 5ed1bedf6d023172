"""Rows of turns, agents or games from trajectories: the worked examples of the methods, with holes and padding."""
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages, methods
from jaxrl_llm.advantages.turns import of_environment
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.environments.skill_chain import skill_rewards


def trajectories(agents, returns, group, **extras):
    """Trajectories from the agents and rewards of their turns; turns have 1, 2, 3 ... tokens, with answers between turns."""
    K = max(map(len, agents))
    rows = [[(k, own) for k in range(len(turns)) for own in [True] * (k + 1) + [False]][:-1] for turns in agents]
    T = max(map(len, rows)) + 1
    step = np.array([[k for k, _ in row] + [0] * (T - len(row)) for row in rows]).reshape(-1, group, T)
    mask = np.array([[own for _, own in row] + [False] * (T - len(row)) for row in rows]).reshape(-1, group, T)

    def padded(values, fill):
        return np.array([list(row) + [fill] * (K - len(row)) for row in values]).reshape(-1, group, K)

    named = {"agent": padded(agents, -1), "agent_returns": padded(returns, 0.0).astype(np.float32),
             "step": padded([range(len(turns)) for turns in agents], -1),
             "settled": np.ones((len(agents) // group, group), bool),
             **{name: padded(values, -1) for name, values in extras.items()}}
    valid = np.array([bool(turns) for turns in agents]).reshape(-1, group)
    return jax.tree.map(jnp.asarray, Rollouts(mask=mask, valid=valid, rewards=np.zeros(valid.shape, np.float32), step_ids=step,
                                             extras=named))


def credited(name, rollouts, state=None, **hyper):
    """`(advantages of each turn by trajectory, state)`; all tokens of a turn have its advantage, other tokens have none."""
    estimator = of_environment(advantages.make(name, **hyper))
    result, state = estimator.update(rollouts, estimator.init() if state is None else state)
    result, mask, step = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (result, rollouts.token_mask, rollouts.step_ids))
    assert not result[~mask].any()
    turns = []
    for row, own, number in zip(result, mask, step):
        values = [row[own & (number == k)] for k in range(number.max() + 1) if (own & (number == k)).any()]
        assert all(len({*value.tolist()}) == 1 for value in values)
        turns.append([value[0] for value in values])
    return turns, state


def close(turns, expected):
    assert [len(row) for row in turns] == [len(row) for row in expected]
    for row, other in zip(turns, expected):
        np.testing.assert_allclose(row, other, atol=1e-5)


def test_dr_mas_compares_all_calls_of_an_agent():
    rollouts = trajectories([[0, 1, 1], [0, 1]], [[1, 1, 0.9], [0, 0]], 2)
    close(credited("dr_mas", rollouts)[0], [[0.7071058, 0.6657491, 0.4841811], [-0.7071058, -1.1499302]])


def test_worked_example_of_sage():
    """Four chains of two tasks: their rewards, and the z-scores of each task over the chains, also if tasks alternate."""
    paid = [skill_rewards(*one) for one in ((1, 1, True), (1, 1, False), (0, 1, True), (1, 0, True))]
    assert paid == [(2, 2), (1, 1), (0, 2), (1, 0)]
    tasks = [[0, 1], [0, 0, 1], [0, 1, 1], [0, 1]]
    rollouts = trajectories(tasks, [[pay[k] for k in turns] for pay, turns in zip(paid, tasks)], 4, functional_group=tasks)
    (name, hyper), first, second = methods.get("sage_skills").part("estimator"), [1.22474, 0, -1.22474, 0], [
        0.78335, -0.26112, 0.78335, -1.30558]
    close(credited(name, rollouts, **hyper)[0], [[first[g] if k == 0 else second[g] for k in turns]
                                                 for g, turns in enumerate(tasks)])


def test_agents_of_a_function_share_a_baseline_however_often_they_speak():
    group = [[0, 1, 1], [0, 1, 1]]
    once = trajectories([[0, 1, 2], [0, 1, 2]], [[1, 0, 0.5], [-1, 1, 0.5]], 2, functional_group=group)
    close(credited("advevo_baseline", once)[0], [[1, -0.5, 0], [-1, 0.5, 0]])
    often = trajectories([[0, 1, 2, 1, 0], [0, 1, 2]], [[1, 0, 0.5, 0, 1], [-1, 1, 0.5]], 2,
                         functional_group=[[0, 1, 1, 1, 0], [0, 1, 1]])
    close(credited("advevo_baseline", often)[0], [[1, -0.5, 0, -0.5, 1], [-1, 0.5, 0]])
    silent = trajectories([[0, 1], [0, 1, 2]], [[1, 0], [-1, 1, 0.5]], 2, functional_group=[[0, 1], [0, 1, 1]])
    close(credited("advevo_baseline", silent)[0], [[1, -0.5], [-1, 0.5, 0]])  # a silent agent has no cell


def test_games_of_a_prompt_come_one_after_another():
    rollouts = trajectories([[0, 1, 0], [0, 1, 1]], [[1, -1, 1], [-1, 1, 1]], 2)
    rollouts.extras["game"] = jnp.zeros((1, 2), int)
    turns, state = credited("spiral_rae", rollouts, gamma=0.9)
    close(turns, [[0.9, -1, 1], [-1.05, 0.945, 1.05]])
    np.testing.assert_allclose(state, [[-0.0025, 0.0025]], atol=1e-7)
    apart = jax.tree.map(lambda x: x.reshape(2, 1, *x.shape[2:]), rollouts)  # the same two games, of two prompts
    close(credited("spiral_rae", apart, gamma=0.9)[0], turns)


def test_turns_of_draws_leave_the_mean_over_tokens_by_their_tokens():
    rollouts = trajectories([[0, 1], [0, 1]], [[0, 0], [1, -1]], 2)  # turns of one and two tokens
    rollouts.extras["game"] = jnp.zeros((1, 2), int)
    close(credited("spiral_rae", rollouts)[0], [[0, 0], [2, -2]])
    uneven = trajectories([[0], [0, 1]], [[0], [1, -1]], 2)
    uneven.extras["game"] = jnp.zeros((1, 2), int)
    close(credited("spiral_rae", uneven)[0], [[0], [4 / 3, -4 / 3]])


def test_worked_example_of_a_game_that_was_cut():
    """Won, cut after three turns, lost: the cut one moves no baseline and gets no advantage, also not in the token mean.

    b before the third game is (0.05, -0.05); without a cut game between them it is the same, and the advantages are those of
    the worked example, here times 3 + 6 + 3 tokens over 3 + 3. A draw would have left b at 0.95 * (0.05, -0.05).
    """
    rollouts = trajectories([[0, 1], [0, 1, 0], [0, 1]], [[1, -1], [0, 0, 0], [-1, 1]], 3)
    rollouts.extras["game"], rollouts.extras["settled"] = jnp.zeros((1, 3), int), jnp.array([[True, False, True]])
    turns, state = credited("spiral_rae", rollouts)
    close(turns, [[2, -2], [0, 0, 0], [-2.1, 2.1]])
    np.testing.assert_allclose(state, [[-0.0025, 0.0025]], atol=1e-7)
    close(credited("spiral_rae", rollouts, filter_zero=False)[0], [[2, -2], [0, 0, 0], [-2.1, 2.1]])
    after, state = credited("spiral_rae", rollouts.replace(extras={**rollouts.extras, "settled": jnp.zeros((1, 3), bool)}),
                            jnp.array([[0.5, -0.5]]))
    close(after, [[0, 0], [0, 0, 0], [0, 0]])
    np.testing.assert_allclose(state, [[0.5, -0.5]])
    drawn = rollouts.replace(extras={**rollouts.extras, "settled": jnp.ones((1, 3), bool)})
    np.testing.assert_allclose(credited("spiral_rae", drawn)[0][1], [-0.05, 0.05, -0.05], rtol=1e-5)


def test_a_game_that_was_cut_is_in_no_baseline_of_a_function():
    """1, a cut game and 0.5 of function 0: the baseline is 0.75, and 0.5 if the cut game counted. 6 of 12 tokens count."""
    agents = [[0, 1], [0, 1, 0], [0, 1]]
    rollouts = trajectories(agents, [[1, -1], [0, 0, 0], [0.5, -0.5]], 3, functional_group=agents)
    settled = jnp.array([[True, False, True]])
    cut = rollouts.replace(extras={**rollouts.extras, "settled": settled})
    close(credited("advevo_baseline", cut)[0], [[0.5, -0.5], [0, 0, 0], [-0.5, 0.5]])
    close(credited("advevo_baseline", rollouts)[0], [[0.5, -0.5], [-0.5, 0.5, -0.5], [0, 0]])
    none = cut.replace(extras={**cut.extras, "settled": jnp.zeros((1, 3), bool)})
    close(credited("advevo_baseline", none)[0], [[0, 0], [0, 0, 0], [0, 0]])


def test_an_absent_game_changes_no_baseline():
    rollouts = trajectories([[0, 1], []], [[1, -1], []], 2)
    rollouts.extras["game"] = jnp.zeros((1, 2), int)
    turns, state = credited("spiral_rae", rollouts)
    close(turns, [[1, -1], []])
    np.testing.assert_allclose(state, [[0.05, -0.05]], atol=1e-7)
