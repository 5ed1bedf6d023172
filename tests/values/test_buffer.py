"""The ring buffer against a plain list of groups."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.values import buffer as buffers

ROW = {"x": jax.ShapeDtypeStruct((), jnp.float32)}
append = jax.jit(buffers.append)


def contents(buffer):
    """Groups as lists, oldest first."""
    order = np.argsort(np.asarray(buffer.group), kind="stable")
    groups = {}
    for i in order[np.asarray(buffer.group)[order] >= 0]:
        groups.setdefault(int(buffer.group[i]), []).append(float(buffer.rows["x"][i]))
    return [sorted(groups[name]) for name in sorted(groups)]


def test_oldest_groups_leave_as_a_whole():
    buffer = buffers.empty(5, ROW)
    for step in range(3):  # groups of two in five rows: the third one pushes out all of the first
        buffer = append(buffer, {"x": jnp.array([[2.0 * step, 2 * step + 1]])}, jnp.ones((1, 2), bool))
    assert contents(buffer) == [[2, 3], [4, 5]]
    assert int(buffer.real.sum()) == 4 and int(buffer.seen) == 3


@pytest.mark.parametrize("capacity", [4, 7, 12])
def test_a_window_over_groups_of_all_sizes(capacity):
    rng, wanted, number = np.random.default_rng(capacity), [], 0
    buffer = buffers.empty(capacity, ROW)
    for _ in range(25):
        valid = rng.random((3, 4)) < rng.choice([0.2, 0.6, 1.0])
        x = number + np.arange(12.0).reshape(3, 4)
        number += 12
        buffer = append(buffer, {"x": jnp.asarray(x, jnp.float32)}, jnp.asarray(valid))
        arrived = [sorted(row[keep].tolist()) for row, keep in zip(x, valid) if keep.any()]
        while sum(map(len, arrived)) > capacity:
            arrived.pop(0)
        result = contents(buffer)
        assert result[len(result) - len(arrived):] == arrived
        older = result[:len(result) - len(arrived)]
        assert older == wanted[len(wanted) - len(older):]  # whole groups, the newest of them
        lost = wanted[:len(wanted) - len(older)]
        if lost:  # the last one to go lost a row, or there was no room: ring slots, gaps included, are `capacity`
            assert sum(map(len, older + arrived)) + len(lost[-1]) + 3 > capacity
        wanted = result
    assert int(buffer.cursor) < capacity


def test_a_group_that_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="groups of 4 rollouts do not fit into a buffer of capacity=3"):
        buffers.append(buffers.empty(3, ROW), {"x": jnp.ones((1, 4))}, jnp.ones((1, 4), bool))
    with pytest.raises(ValueError, match="capacity=0"):
        buffers.empty(0, ROW)
