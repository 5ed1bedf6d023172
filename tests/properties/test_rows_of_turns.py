"""Estimators of turns, agents and games on trajectories with words of others: none of these words has an influence."""
import functools

import jax
import numpy as np
import property_inputs as inputs
import pytest
from hypothesis import given, settings, strategies

from jaxrl_llm import advantages, objectives
from jaxrl_llm.advantages.turns import of_contexts, of_environment
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.methods import provision
from jaxrl_llm.objectives.turns import of_turns

P, G, T, K = 3, 6, 10, 4  # at most K turns in a trajectory
AGENTS = 2


def rows_of(names):
    """`(slug, case)` of each estimator that reads one of these fields, by the table of all estimators, and their ids."""
    every = zip(*inputs.parameters("ESTIMATORS", advantages.names()))
    chosen = [(row, name) for row, name in every if {*advantages.make(row[0], **row[1].hyper).needs} & {*names}]
    return [row for row, _ in chosen], [name for _, name in chosen]


ROWS, IDS = rows_of({*provision.TURNS, *provision.AGENTS})
OF_AGENTS, OF_AGENTS_IDS = rows_of(provision.AGENTS)
each = inputs.each("slug, case", ROWS, ROWS, IDS)
each_of_agents = inputs.each("slug, case", OF_AGENTS, OF_AGENTS, OF_AGENTS_IDS)
few = settings(max_examples=3, deadline=None, derandomize=True)
seeds = given(seed=strategies.integers(0, 2**20))


def trajectories(seed, apart=False):
    """Trajectories of 0 to K turns; `apart`: each is what one agent read and said in a game of two, in any order."""
    rng = np.random.default_rng(seed)
    count, valid = rng.integers(0, K + 1, (P, G, 1)), rng.random((P, G)) < 0.85
    there = np.arange(T) < rng.integers(0, T + 1, (P, G, 1))
    mask = there & (rng.random((P, G, T)) < 0.6) & (count > 0)
    turn = np.arange(K) < count
    place = rng.permuted(np.tile(np.arange(G), (P, 1)), axis=1)  # of a context: its game, and its agent in it
    agent = np.repeat(place[..., None] % AGENTS, K, axis=2) if apart else rng.integers(0, AGENTS, (P, G, K))
    game = place // AGENTS if apart else np.arange(G)[None]
    traj = game if apart else np.broadcast_to(np.arange(G)[:, None], (P, G, K))

    def of_games(values):
        return np.take_along_axis(values, np.broadcast_to(game, (P, G)), axis=1)

    extras = {name: np.where(turn, rng.integers(0, 2, (P, G, K)), -1) for name in ("obs", "act", "next_obs")}
    extras |= {name: rng.normal(size=(P, G, K, 2)) for name in ("turn_q", "turn_v")}
    extras |= {"step": np.where(turn, np.arange(K), -1), "traj": traj, "agent": np.where(turn, agent, -1),
               "functional_group": np.where(turn, agent, -1), "match": turn & (rng.random((P, G, K)) < 0.7),
               "step_rewards": turn * rng.choice([0.0, 0.5, 1.0], (P, G, K)),
               "agent_returns": turn * rng.normal(size=(P, G, K)),
               "game": of_games(rng.integers(0, 2, (P, G))), "settled": of_games(rng.random((P, G)) < 0.7)}
    last = np.flip(np.cumsum(np.flip(mask, -1), axis=-1), -1) > 0
    role = np.where(mask, Role.POLICY, np.where(last, Role.ENVIRONMENT, Role.PADDING))
    numbers = np.sort(rng.integers(0, np.maximum(count, 1), (P, G, T)), axis=-1)
    extras["values"] = rng.normal(size=(P, G, T))
    return Rollouts(**jax.tree.map(inputs.as_array, dict(
        mask=mask, valid=valid, role=role, rewards=rng.choice([-1.0, 0.0, 1.0], (P, G)), step_ids=numbers, extras=extras,
        old_logprobs=-rng.gamma(1.0, size=(P, G, T)))))


@functools.lru_cache(2)  # the properties of a row follow one another
def compiled(slug, case, apart):
    """`rollouts -> (advantages, state)` of the estimator as runs adapt it to trajectories."""
    estimator = of_environment(advantages.make(slug, **case.hyper))
    estimator = of_contexts(estimator, AGENTS) if apart else estimator
    return jax.jit(lambda rollouts: estimator.update(rollouts, estimator.init()))


def check(credit, rollouts, seed):
    """Holes get exactly 0 and have no influence, whatever is recorded of them; tokens are worth the same without them."""
    trained = np.asarray(rollouts.token_mask)
    values, state = credit(rollouts)
    assert inputs.finite(values) and not np.asarray(values)[~trained].any()
    jax.tree.map(np.testing.assert_array_equal, credit(inputs.spoil(rollouts, trained, seed)), (values, state))
    inputs.same(inputs.squeeze((values, state), trained), credit(inputs.squeeze(rollouts, trained)))


@each
@few
@seeds
def test_what_others_wrote_between_turns_changes_nothing(slug, case, seed):
    check(compiled(slug, case, False), trajectories(seed), seed)


@each_of_agents
@few
@seeds
def test_what_others_wrote_in_the_contexts_of_agents_changes_nothing(slug, case, seed):
    check(compiled(slug, case, True), trajectories(seed, apart=True), seed)


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_turns_in_a_loss_do_not_depend_on_what_others_wrote(seed):
    objective = of_turns(objectives.make("ppo_clip", aggregation="seq_mean_token_mean"))
    rollouts, rng = trajectories(seed), np.random.default_rng(seed)
    logprobs, values = (rng.normal(-1, 0.3, rollouts.mask.shape).astype(np.float32) for _ in range(2))
    trained = np.asarray(rollouts.token_mask)
    differentiate = jax.jit(jax.value_and_grad(objective.update, has_aux=True))

    def learned(*given):
        (loss, _), gradient = differentiate(*given, objective.init())
        return loss, np.asarray(gradient)

    given = logprobs, rollouts, values
    loss, gradient = learned(*given)
    assert gradient.any() and not gradient[~trained].any()
    jax.tree.map(np.testing.assert_array_equal, learned(*inputs.spoil(given, trained, seed)), (loss, gradient))
    inputs.same((loss, inputs.squeeze(gradient, trained)), learned(*(inputs.squeeze(x, trained) for x in given)))
