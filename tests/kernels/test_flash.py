"""Attention of long rows by blocks of keys against its plain reference, and its memory and products."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import flash
from jaxrl_llm.kernels.flash import FAR


def random_rows(rng, R, N, filled):
    """Rows of random forests in depth-first order with padding at their end, and the depth of each token."""
    end, depth = np.zeros((R, N), np.int32), np.zeros((R, N), np.int32)
    for r in range(R):
        stack = []
        for slot in range(filled[r]):
            while stack and rng.random() < 0.15:
                end[r, stack.pop()] = slot
            depth[r, slot] = len(stack)
            stack.append(slot)
        for slot in stack:
            end[r, slot] = filled[r]
    return end, depth


def case(N=23, filled=(23, 17), heads=(2, 3), reach=FAR, dtype=jnp.float32, seed=0, d=8):
    rng = np.random.default_rng(seed)
    R, (K, h) = len(filled), heads
    end, depth = random_rows(rng, R, N, filled)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((R, K, h, N, d), (R, K, N, d), (R, K, N, d))]
    return arrays, flash.RowMask(jnp.asarray(end), jnp.asarray(depth), jnp.int32(reach))


def both(arrays, rows, softcap):
    def of(attend):
        def loss(arrays):
            out = attend(softcap, *arrays, rows)
            return (jnp.sin(out.astype(jnp.float32)) * (jnp.arange(out.size).reshape(out.shape) % 7)).sum(), out
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
        return [out, *gradients]
    return of(flash.flash_attention), of(flash.plain_flash_attention)


@pytest.mark.parametrize("block, softcap, reach, filled", (
    (4, None, FAR, (23, 17)), (4, 3.0, FAR, (23, 0)), (5, None, 3, (23, 17)), (512, 3.0, 4, (20, 23)), (1, None, 2, (23, 5))))
def test_values_and_gradients(monkeypatch, block, softcap, reach, filled):
    """Trees, padding, empty rows, windows, soft caps and grouped heads; one block, several, and blocks of one slot."""
    monkeypatch.setattr(flash, "BLOCK", block)
    result, wanted = both(*case(filled=filled, reach=reach), softcap)
    for ours, theirs in zip(result, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
    padding = np.arange(23) >= np.array(filled)[:, None]
    assert not np.asarray(result[0]).transpose(0, 3, 1, 2, 4)[padding].any()


@pytest.mark.slow
@pytest.mark.parametrize("begin, count", ((0, 7), (7, 7), (16, 7), (5, 2)))
def test_queries_of_some_slots(monkeypatch, begin, count):
    """A shard of the slots, not a multiple of the block: what fills its last block up is no query."""
    monkeypatch.setattr(flash, "BLOCK", 4)
    (queries, keys, values), rows = case(reach=6)
    rows = rows._replace(begin=jnp.int32(begin))
    part = queries[..., begin:begin + count, :]
    result, wanted = both((part, keys, values), rows, None)
    for ours, theirs in zip(result, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
    large, _ = both((30 * part, keys, values), rows, None)  # exponentials without their maximum overflow
    assert all(np.isfinite(x).all() for x in large)


def test_holes_between_trees(monkeypatch):
    """Slots of padding inside a row neither see nor are seen, though trees follow."""
    monkeypatch.setattr(flash, "BLOCK", 4)
    arrays, rows = case(N=16, filled=(16,))
    end = jnp.asarray([[6, 6, 4, 4, 6, 6, 0, 0, 0, 0, 16, 16, 14, 14, 16, 16]])
    result, wanted = both(arrays, rows._replace(end=end), None)
    for ours, theirs in zip(result, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
    assert not np.asarray(result[0])[:, :, :, 6:10].any()


def test_bfloat16_in_and_float32_between(monkeypatch):
    monkeypatch.setattr(flash, "BLOCK", 4)
    arrays, rows = case(dtype=jnp.bfloat16)
    result, _ = both(arrays, rows, None)
    exact, _ = both([x.astype(jnp.float32) for x in arrays], rows, None)
    for ours, theirs in zip(result, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=0.02 * np.abs(theirs).max())


@pytest.mark.parametrize("ends, reach, visits", (
    ([16] * 16, FAR, [1, 2, 3, 4]),  # one path
    ([4] * 4 + [8] * 4 + [12] * 4 + [16] * 4, FAR, [1, 1, 1, 1]),  # four of them
    ([16] * 4 + [8] * 4 + [12] * 4 + [16] * 4, FAR, [1, 2, 2, 2]),  # three branches of one stem
    ([16] * 16, 4, [1, 2, 2, 2]),  # a window
    ([6] * 6 + [0] * 10, FAR, [1, 2, 0, 0]),  # padding
))
def test_blocks_that_no_query_sees_are_not_visited(ends, reach, visits):
    rows = flash.RowMask(jnp.asarray([ends]), jnp.arange(16)[None], jnp.int32(reach))
    order, counts = flash.visits(rows, 4)
    np.testing.assert_array_equal(counts, visits)
    seen = np.asarray(flash.seen_by(rows, jnp.arange(16), (rows.end, rows.positions), jnp.arange(16), rows.positions))[0, 0, 0]
    needed = seen.reshape(4, 4, 4, 4).any((1, 3))
    for i, count in enumerate(counts):
        assert set(np.flatnonzero(needed[i])) <= set(np.asarray(order[i, :count]))


def test_memory_is_linear_in_the_row():
    def temporaries(N):
        queries, keys = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1, 2, N, 16), (1, 1, N, 16)))
        rows = flash.RowMask(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, N), (1, N), ())))
        program = jax.jit(jax.grad(lambda arrays, rows: flash.flash_attention(None, *arrays, rows).sum()))
        return program.lower([queries, keys, keys], rows).compile().memory_analysis().temp_size_in_bytes

    short, middle, long = (temporaries(N) for N in (4096, 8192, 16384))
    assert long - middle < 2.1 * (middle - short)  # twice for what is linear, four times for what is quadratic
    assert long < 16384 * 16384 * 4 / 10  # a tenth of one head's scores
