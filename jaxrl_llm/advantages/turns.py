"""Adapters that apply estimators of turns, agents or games to rollouts that are trajectories."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.tools.memo import remembered

VALUES = ("turn_q", "turn_v")  # [P, G, K, 2], from a critic of turns


@remembered(16)
def of_environment(estimator: Estimator) -> Estimator:
    """The estimator adapted to trajectories of an environment; its `needs` decide whether rows are games, agents or turns."""
    if "game" in estimator.needs:
        return of_games(estimator)
    return of_agents(estimator) if "functional_group" in estimator.needs else of_turns(estimator)


def rows_of_turns(rollouts: Rollouts) -> Rollouts:
    """Trajectories `[P, G, T]` with at most K turns as rows `[P, G K, 1]`, one for each turn.

    Reads the extras of `forest.turn_facts` and `turn_info.joined`, `[P, G, K]`: a turn exists where `step` is not negative.
    A row's reward is the return of the turn's agent (`agent_returns`), or the trajectory's reward. If rollouts are contexts,
    whose `traj` is i32[P, G], rows of one trajectory are those of all its contexts.
    """
    valid = _there(rollouts)
    P, G, K = valid.shape
    if (traj := rollouts.extras.get("traj")) is not None and traj.ndim == 2:
        rollouts = rollouts.replace(extras={**rollouts.extras, "traj": jnp.broadcast_to(traj[..., None], valid.shape)})

    def flat(x):
        return x.reshape(P, G * K)

    extras = {name: x.reshape(P, G * K, *x.shape[3:]) for name, x in rollouts.extras.items()
              if x.shape == valid.shape or name in VALUES}
    return Rollouts(mask=flat(valid)[..., None], valid=flat(valid), rewards=flat(_rewards(rollouts)), extras=extras)


def of_turns(estimator: Estimator) -> Estimator:
    """The estimator of trajectories that gives each token the advantage of its turn (`step_ids`).

    `estimator` compares rows that are turns, and has no functions besides `init` and `update`. It may need a critic of turns,
    and a baseline of tokens, whose `value_targets` are then the advantages of turns.
    """
    based = estimator.value_targets is not None

    def of_turn(rollouts, state):
        rows = rows_of_turns(rollouts)
        if based:
            rows = rows.replace(extras={**rows.extras, "values": jnp.zeros(rows.mask.shape, jnp.float32)})
        advantages, state = estimator.update(rows, state)
        return _to_tokens(advantages[..., 0].reshape(rollouts.extras["step"].shape), rollouts), state

    def of_token(rollouts, state):
        advantages, state = of_turn(rollouts, state)
        return jnp.where(rollouts.token_mask, advantages - rollouts.extras["values"], 0), state

    def targets(rollouts, monte_carlo):
        return of_turn(rollouts, estimator.init())[0]

    return _adapted(estimator, of_token)._replace(value_targets=targets) if based else _adapted(estimator, of_turn)


def of_agents(estimator: Estimator) -> Estimator:
    """As `of_turns`, for an estimator whose rows are the agents of each trajectory (`agent`), one row per agent.

    The first turn of an agent represents it; its other turns get the same advantage. Agents of a game that is not `settled`
    are not compared: their tokens get 0 and leave the mean over tokens.
    """
    def update(rollouts, state):
        rows, shape = rows_of_turns(rollouts), rollouts.extras["step"].shape
        agent = rollouts.extras["agent"]
        first = jnp.argmax(agent[..., :, None] == agent[..., None, :], axis=-1)  # for each turn, the first turn of its agent
        settled = rollouts.extras["settled"][..., None]
        stands = ((first == jnp.arange(shape[-1])) & settled).reshape(rows.valid.shape) & rows.valid
        advantages, state = estimator.update(rows.replace(valid=stands, mask=stands[..., None]), state)
        tokens = _to_tokens(jnp.take_along_axis(advantages[..., 0].reshape(shape), first, axis=-1), rollouts)
        return over_kept(tokens, rollouts.token_mask & settled, rollouts.token_mask), state

    return _adapted(estimator._replace(needs=(*estimator.needs, "agent", "settled")), update)


def of_games(estimator: Estimator) -> Estimator:
    """As `of_turns`, for an estimator that reads games in order of arrival on the P axis and turns on the G axis.

    Games of a prompt come one after another; rows have their own tokens.
    """
    def update(rollouts, state):
        valid, mask = _there(rollouts), rollouts.token_mask
        P, G, K = valid.shape
        tokens = mask[:, :, None, :] & (rollouts.step_ids[:, :, None, :] == jnp.arange(K)[:, None])
        extras = {name: rollouts.extras[name].reshape(P * G, K) for name in ("agent", "step")}
        rows = Rollouts(mask=tokens.reshape(P * G, K, -1), valid=valid.reshape(P * G, K),
                        rewards=_rewards(rollouts).reshape(P * G, K),
                        extras=extras | {name: rollouts.extras[name].reshape(P * G) for name in ("game", "settled")})
        advantages, state = estimator.update(rows, state)
        return advantages.reshape(tokens.shape).sum(axis=2), state

    return _adapted(estimator, update)


@remembered(16)
def of_contexts(estimator: Estimator, agents: int) -> Estimator:
    """The estimator of `of_environment` for rollouts that are the contexts of agents, at most one of each in a trajectory.

    The contexts of a trajectory (`traj`) are joined one after another, in the order of its agents 0 to `agents` - 1, and the
    estimator reads the result as a trajectory. Raises ValueError for groups that are no multiple of `agents`.
    """
    def update(rollouts, state):
        (P, R, T), K = rollouts.mask.shape, rollouts.extras["step"].shape[-1]
        if R % agents:
            raise ValueError(f"groups of {R} contexts do not split into trajectories of {agents} agents")
        mine = rollouts.extras["agent"][..., 0]
        place = jnp.where(rollouts.valid & (mine >= 0), rollouts.extras["traj"] * agents + mine, R)
        matches = place[:, None, :] == jnp.arange(R)[:, None]  # [P, place, context]
        source, there = jnp.argmax(matches, axis=-1), jnp.any(matches, axis=-1)

        def joined(x, fill):
            ordered = x[jnp.arange(P)[:, None], source]
            ordered = jnp.where(there.reshape(P, R, *(1,) * (x.ndim - 2)), ordered, jnp.asarray(fill, x.dtype))
            return ordered.reshape(P, R // agents, -1)

        first = jnp.arange(agents * K).reshape(agents, K)[:, :1]  # number of each agent's first turn
        own = {name: joined(rollouts.extras[name], -1) for name in ("agent", "functional_group", "step")
               if name in rollouts.extras}
        whole = {name: jnp.max(joined(rollouts.extras[name], 0), axis=-1) for name in ("game", "settled")
                 if name in rollouts.extras}
        own["traj"] = jnp.broadcast_to(jnp.arange(R // agents)[:, None], own["step"].shape)
        own["agent_returns"] = joined(rollouts.extras["agent_returns"], 0)
        numbers = joined(rollouts.step_ids, 0).reshape(P, -1, agents, T) + first
        played = Rollouts(mask=joined(rollouts.mask, False), valid=jnp.any(there.reshape(P, -1, agents), axis=-1),
                          rewards=joined(rollouts.rewards, 0)[..., 0], step_ids=numbers.reshape(P, -1, agents * T),
                          extras={**own, **whole})
        advantages, state = estimator.update(played, state)
        back = advantages.reshape(P, R, T)[jnp.arange(P)[:, None], jnp.minimum(place, R - 1)]
        return jnp.where(rollouts.token_mask, back, 0), state

    return estimator._replace(update=update, needs=(*estimator.needs, "traj", "step"))


def _adapted(estimator: Estimator, update) -> Estimator:
    return Estimator(estimator.init, update, (*estimator.needs, "step_ids"), turn_critic=estimator.turn_critic)


def _there(rollouts: Rollouts) -> Array:
    """bool[P, G, K]: turns that exist."""
    return rollouts.valid[..., None] & (rollouts.extras["step"] >= 0)


def _rewards(rollouts: Rollouts) -> Array:
    """f32[P, G, K]: the return of the agent of each turn, or the trajectory's reward."""
    whole = jnp.broadcast_to(rollouts.rewards[..., None], rollouts.extras["step"].shape)
    return rollouts.extras.get("agent_returns", whole)


def _to_tokens(turns_PGK: Array, rollouts: Rollouts) -> Array:
    """f32[P, G, T]: on each trained token, the value of its turn."""
    place = jnp.clip(rollouts.step_ids, 0, turns_PGK.shape[-1] - 1)
    return jnp.where(rollouts.token_mask, jnp.take_along_axis(turns_PGK, place, axis=-1), 0)
