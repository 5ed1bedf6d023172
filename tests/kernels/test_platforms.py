"""Kernels of accelerators against plain references: TPU programs interpreted, cuDNN's part of a merge computed by XLA."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_flash import FAR, case, flash

from jaxrl_llm.kernels import choice, cudnn, grouped, paged, rows, splash
from jaxrl_llm.models.attention import grouped_attention


def found_by(attend, arrays):
    def loss(arrays):
        out = attend(*arrays)
        return (jnp.sin(out.astype(jnp.float32)) * (jnp.arange(out.size).reshape(out.shape) % 7)).sum(), out
    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return [out, *jax.tree.leaves(gradients)]


def assert_same(attend, reference, arrays, atol=5e-5):
    for ours, theirs in zip(found_by(attend, arrays), found_by(reference, arrays), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=atol)


def assert_attends(kernel, softcap, arrays, where, fits=True):
    arrays = arrays[0] * arrays[0].shape[-1]**-0.5, *arrays[1:]
    assert bool(kernel.fits(arrays[0], where)) == fits
    assert_same(lambda *a: rows.by_kernel(kernel, softcap, *a, where),
                lambda *a: flash.plain_flash_attention(softcap, *a, where), arrays)


@pytest.mark.slow
@pytest.mark.parametrize("softcap, reach, filled, fits", (
    (None, FAR, (300, 170), True), (3.0, 40, (300, 0), True), (None, FAR, (300, 170), False)))
def test_splash_attention(monkeypatch, softcap, reach, filled, fits):
    """Forests over several blocks, padding, an empty row; where masks have no room, blocks of XLA's own."""
    monkeypatch.setattr(splash, "BLOCK", 128)
    if not fits:
        monkeypatch.setattr(splash, "_most", lambda slots, size: 1)
    arrays, where = case(300, filled, (1, 2), reach, d=64)
    assert splash.serves(arrays[0])
    assert_attends(splash.kernel(interpret=True), softcap, arrays, where, fits)


@pytest.mark.slow
def test_splash_attention_of_some_queries(monkeypatch):
    """The queries of a shard of the slots against the keys of all; the first shard ends within a block of keys."""
    monkeypatch.setattr(splash, "BLOCK", 128)
    (queries, keys, values), where = case(300, (300, 170), (1, 2), 90, d=64)
    for begin in (0, 150):
        part = queries[..., begin:begin + 150, :]
        assert_attends(splash.kernel(interpret=True), None, (part, keys, values), where._replace(begin=jnp.int32(begin)))


def path(lengths, N):
    end = jnp.where(jnp.arange(N) < jnp.asarray(lengths)[:, None], jnp.asarray(lengths)[:, None], 0)
    return flash.RowMask(end, jnp.broadcast_to(jnp.arange(N), end.shape), jnp.int32(FAR))


@pytest.mark.parametrize("lengths, fits", (((23, 17), True), (None, False)))
def test_cudnn_takes_rows_of_one_path(lengths, fits):
    arrays, where = case()
    where = where if lengths is None else path(lengths, 23)
    assert_attends(cudnn.kernel("xla"), None, arrays, where, fits)
    windows = path((23, 17), 23)._replace(reach=jnp.int32(4))
    assert not cudnn.one_path(arrays[0], windows) and not cudnn.one_path(arrays[0], path((23, 0), 23))


def group(dtype=jnp.float32):
    """Queries, own and shared keys and values, and lengths of two prompts with three completions."""
    rng = np.random.default_rng(0)
    P, G, T, S, H, K, d = 2, 3, 5, 4, 4, 2, 8
    shapes = (P, G, T, H, d), (P, G, T, K, d), (P, G, T, K, d), (P, S, K, d), (P, S, K, d)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes], jnp.asarray([4, 2])


def test_own_and_shared_keys_are_merged():
    arrays, lengths = group()

    def merged(queries, *pairs):
        return cudnn.group_attention("xla", queries, pairs[:2], pairs[2:], lengths)

    def reference(queries, own_k, own_v, k, v):
        own, shared = ([jnp.moveaxis(y, -2, 1) for y in pair] for pair in ((own_k, own_v), (k, v)))
        seen = (jnp.arange(4) < lengths[:, None])[:, None, None]
        return grouped_attention(queries, *own, jnp.tril(jnp.ones((5, 5), bool))[None, None], (*shared, seen), scale=1.0)

    assert_same(merged, reference, arrays)


def lowered(f, *arrays, platform):
    return jax.jit(jax.grad(lambda arrays: f(*arrays).astype(jnp.float32).sum())).trace(list(arrays)).lower(
        lowering_platforms=(platform,)).as_text()


def test_programs_for_gpus_call_cudnn(monkeypatch):
    """Forward and backward, once for own and once for shared keys; and rows of one path, with blocks beside them."""
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 91_000)
    arrays, lengths = group(jnp.bfloat16)
    text = lowered(lambda q, a, b, c, d: cudnn.group_attention("cudnn", q, (a, b), (c, d), lengths), *arrays, platform="cuda")
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 2
    arrays, where = case(dtype=jnp.bfloat16)
    assert cudnn.serves(arrays[0], None) and not cudnn.serves(arrays[0], 30.0)
    text = lowered(lambda *a: rows.attention("cuda", None, *a, where), *arrays, platform="cuda")
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1


def test_a_version_of_jax_with_another_gradient_is_refused(monkeypatch):
    monkeypatch.setattr(cudnn.fused, "_dot_product_attention_bwd_rule", lambda scale, saved, d_out: None)
    with pytest.raises(NotImplementedError, match="with the parameters scale, saved, d_out; set model.kernels=plain"):
        cudnn.serves(jnp.zeros((1, 16, 2, 64), jnp.bfloat16), None)
    assert not cudnn.serves(jnp.zeros((1, 16, 2, 64)), None)  # float32 has no kernel, whatever the version


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_programs_for_tpus_hold_splash_attention(dtype):
    arrays, where = case(700, (700, 650), (2, 2), dtype=dtype, d=128)
    text = lowered(lambda *a: rows.attention("tpu", None, *a, where), *arrays, platform="tpu")
    assert text.count("tpu_custom_call") >= 3  # forward, and backward in queries and in keys


def test_programs_for_cpus_hold_neither():
    arrays, where = case()
    assert choice.chosen("auto") == choice.of_platform("cpu") == "plain"
    texts = [jax.jit(lambda *a, k=kernels: rows.attention(k, None, *a, where)).lower(*arrays).as_text()
             for kernels in ("auto", "plain")]
    assert texts[0] == texts[1] and "custom_call" not in texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ((0, 130, 0, 70), (200, 0, 0, 0)))
def test_grouped_products_of_tpus(sizes):
    """Interpreted: rows of several tiles, groups without rows, and products the other way around."""
    rng, sizes = np.random.default_rng(0), jnp.asarray(sizes, jnp.int32)
    x, dy, kernels = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((200, 96), (200, 160), (4, 96, 160)))
    for given, axis in ((x, 1), (dy, 2)):
        result = grouped.times_on_tpu(given, kernels, sizes, axis, interpret=True)
        np.testing.assert_allclose(result, grouped.times_by_blocks(given, kernels, sizes, axis=axis), rtol=1e-4, atol=1e-4)
    result = grouped.sums_on_tpu(x, dy, sizes, interpret=True)
    np.testing.assert_allclose(result, grouped.sums_by_blocks(x, dy, sizes), rtol=1e-4, atol=1e-3)
    text = lowered(lambda x, kernels: grouped.grouped_matmul(x, kernels, sizes, "tpu"), x, kernels, platform="tpu")
    assert text.count("tpu_custom_call") >= 2 and "ragged_dot" not in text


def paged_case(dtype=jnp.float32, d=64, page=16):
    """Queries of three rows, pages of keys and values, tables in which rows share a page, and lengths."""
    rng = np.random.default_rng(0)
    queries, keys, values = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((3, 8, d), *[(9, page, 2, d)] * 2))
    table = jnp.asarray([[3, 1, 4, 0], [3, 5, 2, 6], [7, 8, 0, 0]], jnp.int32)
    return queries * d**-0.5, keys, values, table, jnp.asarray([4 * page - 3, page + 1, 1], jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", (None, 3.0))
def test_paged_attention_of_gpus(softcap):
    queries, keys, values, *where = paged_case()
    result = paged.paged_attention("cuda", softcap, queries, paged.laid("cuda", keys, values), *where, interpret=True)
    wanted = paged.paged_attention("plain", softcap, queries, paged.laid("plain", keys, values), *where)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_paged_attention_of_tpus():
    """By JAX's own reference of the kernel, whose program can neither be interpreted nor lowered without a TPU."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
    queries, keys, values, table, lengths = paged_case(d=128)
    cache, = paged.laid("tpu", keys, values)
    result = ref_ragged_paged_attention(queries, cache, lengths, table, jnp.arange(4), jnp.array([3]))
    wanted = paged.plain_paged_attention(None, queries, keys, values, table, lengths)
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)
