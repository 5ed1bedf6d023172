"""The kernels of NVIDIA GPUs on a GPU, against plain references on the same one.

  JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION=highest XLA_FLAGS= python -m pytest tests/kernels/test_on_gpu.py
"""
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_flash import FAR, case, flash
from test_platforms import found_by, paged_case, path

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.kernels import cudnn, grouped, paged, rows
from jaxrl_llm.models import Experts, ModelConfig, Transformer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.environ["JAX_PLATFORMS"] == "cpu", reason="needs an NVIDIA GPU")]

V, P, G, S, T = 512, 3, 4, 24, 40
SHAPE = dict(vocab_size=V, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, mlp_size=192)
MODELS = {"dense": ModelConfig(**SHAPE), "wide heads": ModelConfig(**SHAPE | {"head_dim": 128}),
          "experts": ModelConfig(**SHAPE, experts=Experts(4, 2, 64))}
BFLOAT16 = 2.0**-8  # its relative rounding


def error(ours, wanted):
    """Of all numbers together, relative to their size."""
    ours, wanted = np.asarray(ours, np.float64), np.asarray(wanted, np.float64)
    assert ours.shape == wanted.shape and np.linalg.norm(wanted) > 0
    return np.linalg.norm(ours - wanted) / np.linalg.norm(wanted)


def assert_near(attend, reference, arrays, most=3 * BFLOAT16):
    """Values and gradients in 16 bits against the reference in 32."""
    wanted = found_by(reference, [x.astype(jnp.float32) for x in arrays])
    for ours, theirs in zip(found_by(attend, arrays), wanted, strict=True):
        assert ours.dtype == jnp.bfloat16 and error(ours, theirs) < most


@pytest.mark.parametrize("d", (64, 128))
def test_groups_by_cudnn(d):
    """Own keys and a shared prompt, one of a single token."""
    rng, lengths = np.random.default_rng(d), jnp.asarray([S, 1, 7])
    shapes = (P, G, T, 6, d), (P, G, T, 2, d), (P, G, T, 2, d), (P, S, 2, d), (P, S, 2, d)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    arrays[0] *= d**-0.5

    def by(implementation):
        return lambda q, a, b, c, e: cudnn.group_attention(implementation, q, (a, b), (c, e), lengths)
    assert_near(by("cudnn"), by("xla"), arrays)


@pytest.mark.parametrize("lengths", ((300, 170), None))
def test_rows_by_cudnn(lengths):
    """Rows of one path, and of trees, which cuDNN does not take."""
    arrays, where = case(300, (300, 170), (2, 3), FAR, dtype=jnp.bfloat16, d=64)
    where = where if lengths is None else path(lengths, 300)
    arrays = [arrays[0] * 64**-0.5, *arrays[1:]]
    real = (where.end > 0)[:, None, None, :, None]

    def of(attend):
        return lambda *arrays: jnp.where(real, attend(*arrays), 0)
    assert_near(of(lambda *a: rows.attention("cuda", None, *a, where)),
                of(lambda *a: flash.plain_flash_attention(None, *a, where)), arrays)


@pytest.mark.parametrize("softcap", (None, 3.0))
@pytest.mark.parametrize(("dtype", "most"), ((jnp.float32, 1e-3), (jnp.bfloat16, 3 * BFLOAT16)))
@pytest.mark.parametrize("d", (64, 128))
def test_paged_attention(softcap, dtype, most, d):
    queries, keys, values, *where = paged_case(dtype, d)
    result = jax.jit(lambda q, *cache: paged.paged_attention("cuda", softcap, q, cache, *where))(
        queries, *paged.laid("cuda", keys, values))
    wanted = paged.plain_paged_attention(softcap, *(x.astype(jnp.float32) for x in (queries, keys, values)), *where)
    assert error(result, wanted) < most


@pytest.mark.parametrize("sizes", ((0, 130, 0, 70), (200, 0, 0, 0)))
def test_grouped_products(sizes):
    rng, sizes = np.random.default_rng(0), jnp.asarray(sizes, jnp.int32)
    x, kernels = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((200, 96), (4, 96, 160)))
    ours = found_by(lambda x, kernels: grouped.grouped_matmul(x, kernels, sizes, "cuda"), [x, kernels])
    wanted = found_by(lambda x, kernels: grouped.plain_grouped_matmul(x, kernels, sizes), [x, kernels])
    assert max(map(error, ours, wanted)) < 1e-3


def params_of(config):
    keys = iter(jax.random.split(jax.random.key(0), 40))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.1, Transformer(config).abstract_params())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_models(name):
    """In 16 bits the GPU's kernels are about as far from plain ones in 32 as plain ones in 16 are."""
    params, rng = params_of(MODELS[name]), np.random.default_rng(0)
    prompts, tokens = rng.integers(0, V, (P, S)), rng.integers(0, V, (P, G, T))
    real = np.arange(S) >= np.array([[0], [5], [23]])
    mask = np.arange(T) < rng.integers(1, T, (P, G))[..., None]

    def found(kernels, dtype):
        model = Transformer(MODELS[name], dtype, kernels=kernels)

        def loss(params):
            states, _ = model.packed_states(params, prompts, real, tokens, mask=mask)
            states = jnp.where(mask[..., None], states, 0).astype(jnp.float32)
            return jnp.sin(states).sum(), states
        (_, states), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return states, np.concatenate([np.ravel(x) for x in jax.tree.leaves(slopes)])

    wanted = found("plain", jnp.float32)
    for ours, plain, exact in zip(found("cuda", jnp.bfloat16), found("plain", jnp.bfloat16), wanted, strict=True):
        assert error(ours, exact) < 1.5 * error(plain, exact) < 0.2


@pytest.mark.parametrize("paged_cache", (False, True))
def test_the_engine_gives_the_tokens_of_the_scan_sampler(paged_cache):
    """And both give the tokens of a CPU, with products in full float32."""
    model, params = Transformer(MODELS["dense"]), params_of(MODELS["dense"])
    rng, key, uids = np.random.default_rng(0), jax.random.key(1), np.arange(P * G).reshape(P, G)
    prompts = rng.integers(0, V, (P, S)).astype(np.int32)

    def scanned(device):
        with jax.default_device(device):
            made = generate(model, jax.device_put(params, device), prompts, np.ones(prompts.shape, bool), row_keys(key, uids),
                            Sampling(np.float32(1.0)), max_tokens=T, stop_ids=(1,))
            return {int(uid): np.asarray(made.tokens)[p, g][np.asarray(made.mask)[p, g]].tolist()
                    for (p, g), uid in np.ndenumerate(uids)}

    engine = SlotEngine(model, params, key, slots=8, slot_tokens=S + T, paged=paged_cache)
    engine.submit(*(Request(int(uid), T, prompts[p].tolist(), sampling=Sampling(1.0), stop_tokens=(1,))
                    for (p, g), uid in np.ndenumerate(uids)))
    nodes = {}
    while done := engine.collect():
        nodes |= {node.uid: node.tokens.tolist() for node in done}
    assert nodes == scanned(jax.devices()[0]) == scanned(jax.devices("cpu")[0])
