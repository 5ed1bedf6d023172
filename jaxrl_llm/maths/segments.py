"""Groups of rows with equal ids, as boolean matrices of static shape: `group[p, i, j]`, is row i compared with row j?

An agent acts in turns, and each turn is a separate row: the G axis of a task holds all turns of all its trajectories,
in any order. Ids (`traj`, `step`, `obs`, `agent` ...) are i32[P, G] and mean something inside their task only; to split
a task further, fold the other id into them. Statistics are those of `jaxrl_llm.maths.masked` along j: exact for rows that are
all equal, and free of scatter-adds, whose order can vary. Memory grows as P * G^2: 39 MB for 16 tasks of 400 turns.
A rollout that holds its steps in one row has them by `step_totals`.
"""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.maths import masked

MODES = ("mean_norm", "mean_std_norm")


def same(valid_PG: Array, *keys_PG: Array) -> Array:
    """bool[P, G, G]: both rows are valid and agree in every key."""
    group = valid_PG[:, :, None] & valid_PG[:, None, :]
    for key in keys_PG:
        group &= key[:, :, None] == key[:, None, :]
    return group


def first(group_PGG: Array) -> Array:
    """bool[P, G]: the first row of each group, so that a group counts once in the statistics of a larger one."""
    rows = jnp.arange(group_PGG.shape[-1])
    before = (rows[None, :] < rows[:, None])[None]
    return jnp.any(group_PGG, axis=-1) & ~jnp.any(group_PGG & before, axis=-1)


def once(group_PGG: Array, unit_PGG: Array) -> Array:
    """bool[P, G, G]: `group` with only one row of each `unit`, e.g. one row per trajectory."""
    return group_PGG & first(unit_PGG)[:, None, :]


def count(group_PGG: Array) -> Array:
    """f32[P, G]: size of each row's group."""
    return masked.count(group_PGG, axis=-1)


def total(x_PG: Array, group_PGG: Array) -> Array:
    """[P, G]: sum of `x` over each row's group."""
    return masked.sum(_columns(x_PG, group_PGG), group_PGG, axis=-1)


def mean(x_PG: Array, group_PGG: Array) -> Array:
    """[P, G]: mean of `x` over each row's group, 0 where it is empty."""
    return masked.mean(_columns(x_PG, group_PGG), group_PGG, axis=-1)


def std(x_PG: Array, group_PGG: Array, *, ddof: int) -> Array:
    """[P, G]: standard deviation of `x` over each row's group, 0 where it has at most `ddof` rows."""
    return masked.std(_columns(x_PG, group_PGG), group_PGG, axis=-1, ddof=ddof)


def by_trajectory(x_PG: Array, valid_PG: Array, traj_PG: Array) -> tuple[Array, Array]:
    """([P, G] mean of `x` over the row's trajectory, bool[P, G, G] the task with one row of each trajectory)."""
    trajectory = same(valid_PG, traj_PG)
    return mean(x_PG, trajectory), once(same(valid_PG), trajectory)


def relative(x_PG: Array, group_PGG: Array, *, mode: str = "mean_std_norm", eps: float = 1e-6, ddof: int = 1,
             singleton: str = "zero") -> Array:
    """[P, G]: `(x - mean) / (std + eps)` over each row's group, or `x - mean` with `mode="mean_norm"`.

    A group of one gets 0, or with `singleton="raw"` the value for mean 0 and std 1; equal rows get exactly 0, and so does a
    row without a group.
    """
    size = count(group_PGG)
    alone = size == 1
    centred = jnp.where(size > 0, x_PG - mean(x_PG, group_PGG), 0)
    if singleton == "raw":
        centred = jnp.where(alone, x_PG, centred)
    if mode == "mean_norm":
        return centred
    scale = std(x_PG, group_PGG, ddof=ddof)
    if singleton == "raw":
        scale = jnp.where(alone, 1, scale)
    return centred / (scale + eps)


def previous(valid_PG: Array, traj_PG: Array, step_PG: Array) -> tuple[Array, Array]:
    """Row of the turn before in the same trajectory, i32[P, G], and whether there is one, bool[P, G] (else row 0)."""
    order, follows = _in_time(valid_PG, traj_PG, step_PG)
    before = jnp.where(follows, jnp.roll(order, 1, axis=1), 0)
    back = jnp.argsort(order, axis=1)
    return jnp.take_along_axis(before, back, axis=1), jnp.take_along_axis(follows, back, axis=1)


def discounted_return(x_PG: Array, valid_PG: Array, traj_PG: Array, step_PG: Array, *, gamma: float,
                      flows_PG: Array | None = None) -> Array:
    """[P, G]: `R_t = x_t + gamma * R_{t+1}` along each trajectory, in the order of `step`.

    Where `flows` is False, a turn neither receives return from its successor nor passes any to its predecessor.
    """
    order, follows = _in_time(valid_PG, traj_PG, step_PG)
    if flows_PG is not None:
        flows = jnp.take_along_axis(flows_PG, order, axis=1)
        follows &= flows & jnp.roll(flows, 1, axis=1)
    x = jnp.take_along_axis(jnp.where(valid_PG, x_PG, 0), order, axis=1)

    # One turn after the other: a parallel scan would round equal trajectories differently.
    def turn(following, inputs):
        reward, linked = inputs
        value = reward + gamma * following
        return jnp.where(linked, value, 0), value

    _, returns = lax.scan(turn, jnp.zeros_like(x[:, 0]), (x.T, follows.T), reverse=True)
    return jnp.take_along_axis(returns.T, jnp.argsort(order, axis=1), axis=1)


def step_totals(x_PGT: Array, step_ids_PGT: Array, mask_PGT: Array, mean: bool = False) -> tuple[Array, Array]:
    """([P, G, T] the sum of `x` over the token's step, on each token; bool[P, G, T] the last token of each step).

    With `mean` it is the sum over the number of the step's tokens. A step is a run of trained tokens with one id; ids do not
    decrease along a rollout. Tokens are added one after the other, so that equal steps have exactly equal sums at every
    position.
    """
    lowest, highest = jnp.iinfo(step_ids_PGT.dtype).min, jnp.iinfo(step_ids_PGT.dtype).max

    def add(before, inputs):
        (total, count, reached), (x, step, real) = before, inputs
        total, count = (jnp.where(real, more + jnp.where(step > reached, 0, so_far), so_far)
                        for more, so_far in ((x, total), (1, count)))
        return (total, count, jnp.where(real, step, reached)), total / jnp.maximum(count, 1) if mean else total

    def spread(after, inputs):
        (total, coming), (so_far, step, real) = after, inputs
        last = real & (step < coming)
        total = jnp.where(last, so_far, total)
        return (total, jnp.where(real, step, coming)), (total, last)

    x, step, real = (jnp.moveaxis(a, -1, 0) for a in (x_PGT, step_ids_PGT, mask_PGT))
    nothing = jnp.zeros_like(x[0])
    sums = lax.scan(add, (nothing, nothing, jnp.full_like(step[0], lowest)), (x, step, real))[1]
    _, (totals, last) = lax.scan(spread, (nothing, jnp.full_like(step[0], highest)), (sums, step, real), reverse=True)
    return jnp.moveaxis(totals, 0, -1), jnp.moveaxis(last, 0, -1)


def _columns(x_PG: Array, group_PGG: Array) -> Array:
    return jnp.broadcast_to(x_PG[:, None, :], group_PGG.shape)


def _in_time(valid_PG: Array, traj_PG: Array, step_PG: Array) -> tuple[Array, Array]:
    """Rows sorted by trajectory and step, padding last, i32[P, G]; and which of them continue the one before."""
    order = jnp.lexsort((step_PG, traj_PG, ~valid_PG), axis=-1)
    traj, valid = (jnp.take_along_axis(x, order, axis=1) for x in (traj_PG, valid_PG))
    follows = valid & (traj == jnp.roll(traj, 1, axis=1))
    return order, follows.at[:, 0].set(False)
