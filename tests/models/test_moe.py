"""Experts: sorted rows against the plain reference, values and gradients; routing; what padding must not do."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import grouped
from jaxrl_llm.models import ModelConfig, Transformer, lora, moe
from jaxrl_llm.models.attention import grouped_attention, rotations
from jaxrl_llm.models.config import Experts

N, D, M, E, K = 24, 8, 12, 5, 2


def layer(dtype=np.float32, seed=0):
    """Rows and kernels."""
    random = np.random.default_rng(seed)
    shapes = (N, D), (E, D, M), (E, D, M), (E, M, D)
    return tuple(jnp.asarray(random.normal(size=shape) / np.sqrt(shape[-2]), dtype) for shape in shapes)


def routing(kind):
    """`(weights f32[N, K], experts i32[N, K])` of difficult routers."""
    random = np.random.default_rng(1)
    experts = np.argsort(random.random((N, E)))[:, :K]
    if kind == "empty":  # no token chooses experts 0 and 3
        experts = np.array([1, 2, 4])[np.argsort(random.random((N, 3)))[:, :K]]
    elif kind == "one":
        experts = np.tile([3, 1], (N, 1))
    return jnp.asarray(random.uniform(0.1, 1, size=(N, K)), jnp.float32), jnp.asarray(experts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("mixed", "empty", "one"))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16), ids=("float32", "bfloat16"))
def test_sorted_experts_equal_all_experts_in_values_and_gradients(kind, dtype):
    rows, (weights, experts) = layer(dtype), routing(kind)
    target = np.random.default_rng(2).normal(size=(N, D))

    def loss(way, x, weights, *kernels):
        out = way(x, weights, experts, *kernels, jax.nn.silu)
        return (out.astype(jnp.float32) * target).sum(), out

    def run(way):
        return jax.jit(jax.value_and_grad(functools.partial(loss, way), argnums=range(5), has_aux=True))
    both = [run(way)(rows[0], weights, *rows[1:]) for way in (moe.sorted_experts, moe.all_experts)]
    tolerance = dict(rtol=1e-5, atol=1e-6) if dtype == jnp.float32 else dict(rtol=0.05, atol=0.03)
    for result, wanted in zip(*map(jax.tree.leaves, both), strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_allclose(result.astype(jnp.float32), wanted.astype(jnp.float32), **tolerance)
    assert both[0][0][1].dtype == dtype


@pytest.mark.parametrize(
    "sizes", ((0, 40, 0, 3, 27), (70, 0, 0, 0, 0), (0, 0, 0, 0, 70), (14, 14, 14, 14, 14), (1, 2, 3, 63, 1)))
def test_blocks_equal_ragged_dot(sizes):
    random = np.random.default_rng(3)
    x, dy = random.normal(size=(70, D)).astype(np.float32), random.normal(size=(70, M)).astype(np.float32)
    kernels, sizes = random.normal(size=(E, D, M)).astype(np.float32), jnp.asarray(sizes)
    np.testing.assert_allclose(
        jax.jit(grouped.times_by_blocks)(x, kernels, sizes), jax.lax.ragged_dot(x, kernels, sizes), rtol=1e-5, atol=1e-5)
    ends = np.cumsum(sizes)
    wanted = [x[a:b].T @ dy[a:b] for a, b in zip(ends - sizes, ends)]
    np.testing.assert_allclose(jax.jit(grouped.sums_by_blocks)(x, dy, sizes), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_programs_of_accelerators_equal_the_blocks(monkeypatch):
    rows, (weights, experts) = layer(), routing("empty")
    def loss(*arrays):
        return (moe.sorted_experts(arrays[0], weights, experts, *arrays[1:], jax.nn.silu) ** 2).sum()
    blocks = jax.value_and_grad(loss, argnums=range(4))(*rows)
    def choose(*arrays, default, cpu):
        return default(*arrays)
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)
    ragged = jax.value_and_grad(loss, argnums=range(4))(*rows)
    for result, wanted in zip(*map(jax.tree.leaves, (blocks, ragged)), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", (True, False))
def test_a_router_takes_the_largest_of_a_softmax_in_float32(normalize):
    logits = np.array([[2.0, 0.0, 1.0, -1.0], [0.0, 0.5, 3.0, 2.0]])
    router = moe.Router(Experts(4, 2, 8, normalize=normalize))
    weights, experts = router.apply({"params": {"kernel": jnp.eye(4)}}, jnp.asarray(logits, jnp.bfloat16))
    np.testing.assert_array_equal(experts, [[0, 2], [2, 3]])
    odds = np.exp(logits)
    wanted = np.take_along_axis(odds, np.asarray(experts), 1)
    wanted /= (wanted if normalize else odds).sum(1, keepdims=True)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)
    assert weights.dtype == jnp.float32


def test_a_router_reports_its_choices_and_all_probabilities():
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 6)), jnp.float32)
    router = moe.Router(Experts(4, 2, 8))
    variables = {"params": {"kernel": jnp.asarray(np.random.default_rng(5).normal(size=(6, 4)), jnp.float32)}}
    (_, experts), seen = router.apply(variables, x, mutable=["routing"])
    np.testing.assert_array_equal(seen["routing"]["experts"], experts)
    np.testing.assert_allclose(seen["routing"]["probs"].sum(-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(np.argsort(-seen["routing"]["probs"])[:, :2], experts)


def test_given_experts_are_weighed_by_the_router():
    """Logits 1, 2, 0, -1 choose 1 and 0; given 0 and 2, or 3 and 2, these share 1: the example of arXiv 2512.01374."""
    router = moe.Router(Experts(4, 2, 8))
    x, variables = jnp.ones((4, 1)), {"params": {"kernel": jnp.array([[1.0, 2.0, 0.0, -1.0]])}}
    given = jnp.array([[0, 2], [-1, -1], [3, 2], [-1, 3]], jnp.int16)
    weights, experts = router.apply(variables, x, given)
    assert experts.tolist() == [[0, 2], [1, 0], [3, 2], [1, 3]]
    np.testing.assert_allclose(weights[:3], [[0.731059, 0.268941]] * 2 + [[0.268941, 0.731059]], atol=1e-6)
    slope = jax.grad(lambda kernel: router.apply({"params": {"kernel": kernel}}, x[:1], given[:1])[0][0, 0])(
        variables["params"]["kernel"])
    np.testing.assert_allclose(slope, [[0.196612, 0, -0.196612, 0]], atol=1e-6)


def test_a_token_does_not_depend_on_others():
    rows, (weights, experts) = layer(), routing("mixed")
    def run(x):
        return moe.sorted_experts(x, weights, experts, *rows[1:], jax.nn.silu)
    other = rows[0].at[5:].set(np.nan)
    np.testing.assert_allclose(run(other)[:5], run(rows[0])[:5], rtol=1e-6)
    assert np.isnan(run(other)[5:]).all()


def test_more_experts_than_there_are_is_refused():
    with pytest.raises(ValueError, match="experts.per_token=5 of experts.count=4"):
        Experts(4, 5, 8)


@pytest.mark.parametrize(("platform", "ragged"), (("tpu", True), ("cuda", True), ("cpu", False)))
def test_accelerators_are_given_ragged_dot(platform, ragged):
    x, kernels, sizes = jnp.ones((16, D)), jnp.ones((4, D, M)), jnp.full(4, 4)
    loss = jax.jit(jax.grad(lambda x, kernels: grouped.grouped_matmul(x, kernels, sizes).sum(), argnums=(0, 1)))
    assert ("ragged_dot" in loss.trace(x, kernels).lower(lowering_platforms=(platform,)).as_text()) == ragged


P, G, S, T = 2, 3, 5, 4
MODEL = Transformer(ModelConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
                                mlp_size=8, experts=Experts(4, 2, 12, normalize=False, shared_size=8)))


@functools.cache
def params():
    """Fresh ones, so large that experts differ."""
    return jax.tree.map(lambda x: x * 12 if x.ndim > 2 else x, MODEL.init(jax.random.key(0)))


@functools.cache
def batch():
    """`(prompt_tokens, prompt_mask, tokens, mask)`: padding on both sides, one rollout that is only padding."""
    random = np.random.default_rng(6)
    prompt_mask = np.ones((P, S), bool)
    prompt_mask[0, :2], prompt_mask[1, 3:] = False, False
    mask = np.arange(T) < np.array([[4, 2, 1], [3, 0, 4]])[..., None]
    return random.integers(0, 32, (P, S)), prompt_mask, random.integers(0, 32, (P, G, T)), mask


def plain_rows():
    """The same as P * G rows of their own: `(tokens, mask)`, `[P * G, S + T]` each."""
    prompt_tokens, prompt_mask, tokens, mask = batch()
    def joined(a, b):
        return np.concatenate([np.repeat(a, G, 0), b.reshape(P * G, T)], 1)
    return joined(prompt_tokens, tokens), joined(prompt_mask, mask)


def predicting(states):
    """Of plain rows `[P * G, S + T, ...]` the states that predict completion tokens, `[P, G, T, ...]`."""
    last = S - 1 - np.argmax(np.repeat(batch()[1], G, 0)[:, ::-1], 1)
    first = np.take_along_axis(np.asarray(states), last[:, None, None], 1)
    return np.concatenate([first, states[:, S:-1]], 1).reshape(P, G, T, -1)


@pytest.mark.slow
@pytest.mark.parametrize("remat", (False, True))
def test_packed_rows_with_and_without_padding_equal_plain_ones(remat):
    prompt_tokens, prompt_mask, tokens, mask = batch()
    model = dataclasses.replace(MODEL, remat=remat)
    pull = np.random.default_rng(7).normal(size=(P, G, T, 16)) * mask[..., None]

    def plain(params):
        states = model.hidden_states(params, *plain_rows())[0]
        last = S - 1 - np.argmax(np.repeat(prompt_mask, G, 0)[:, ::-1], 1)
        first = jnp.take_along_axis(states, last[:, None, None], 1)
        return (jnp.concatenate([first, states[:, S:-1]], 1).reshape(P, G, T, -1) * pull).sum()

    def packed(filled, params):
        return (model.packed_states(params, prompt_tokens, prompt_mask, tokens, mask=mask, filled=filled)[0] * pull).sum()

    wanted = jax.jit(jax.value_and_grad(plain))(params())
    for filled in (4, 3):
        result = jax.jit(jax.value_and_grad(functools.partial(packed, filled)))(params())
        for (path, a), b in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(wanted), strict=True):
            assert np.abs(b).max() > 0, path
            np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), rtol=0, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("transposed", (True, False))
def test_decoding_equals_plain_rows(transposed):
    prompt_tokens, prompt_mask, tokens, mask = batch()

    @jax.jit
    def decoded(params):
        prompt, first = MODEL.prefill(params, prompt_tokens, prompt_mask)
        layers = MODEL.unstack_layers(params, transposed=transposed)

        def step(cache, t):
            token = jnp.asarray(tokens)[:, :, t]
            state, cache = MODEL.decode_step(params, layers, token, t, prompt, cache, transposed=transposed)
            return cache, state

        _, states = jax.lax.scan(step, MODEL.empty_completions(prompt, G, T), jnp.arange(T - 1))
        return jnp.concatenate([jnp.broadcast_to(first[:, None, None], (P, G, 1, 16)), jnp.moveaxis(states, 0, 2)], 2)

    wanted = predicting(MODEL.hidden_states(params(), *plain_rows())[0])
    np.testing.assert_allclose(decoded(params())[mask], wanted[mask], atol=1e-4)


@pytest.mark.slow
def test_routers_stay_in_float32_where_all_else_is_bfloat16():
    layers = dataclasses.replace(MODEL, dtype=jnp.bfloat16).unstack_layers(params())
    for weights, _ in layers:
        assert weights["router"]["kernel"].dtype == jnp.float32 and weights["router"]["kernel"].shape == (16, 4)
        gate = weights["experts_gate"]["kernel"]
        assert gate.dtype == jnp.bfloat16 and gate.shape == (4, 16, 12)
        assert weights["q"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("filled", (4, 3))
def test_loads_count_every_token_that_is_computed_once(filled):
    """Against the routers of plain rows, without tokens that are padding, repeated, or predict nothing."""
    prompt_tokens, prompt_mask, tokens, mask = batch()
    loads = jax.jit(lambda p: MODEL.packed_states(p, prompt_tokens, prompt_mask, tokens, mask=mask, filled=filled,
                                                  return_loads=True)[2])(params())
    rows, rows_mask = plain_rows()
    counted = rows_mask.reshape(P, G, S + T).copy()
    counted[:, 1:, :S] = False  # a prompt counts once
    for row, n in zip(counted.reshape(P * G, -1), mask.sum(-1).reshape(-1)):
        row[S + max(n - 1, 0):] = False
    x, seen = MODEL.embed(params(), rows), []
    order, positions = np.arange(S + T), np.maximum(rows_mask.cumsum(1) - 1, 0)
    visible = (order[:, None] >= order) & rows_mask[:, None]
    tables = rotations(MODEL.config, positions)

    def attend(q, k, v):
        k, v = (jnp.moveaxis(y, -2, 1)[:, :, None] for y in (k, v))
        return grouped_attention(q[:, None], k, v, visible[:, None], scale=MODEL.config.attention_scale)[:, 0], None

    for i in range(2):
        weights = jax.tree.map(lambda w, i=i: w[i], params()["layers"])
        (x, _), state = MODEL.block.apply({"params": weights}, x, tables.full, attend, mutable=["routing"])
        seen.append(state["routing"]["router"])
    for result, name in zip(loads, ("experts", "probs")):
        for layer, routing in enumerate(seen):
            of_tokens = routing[name] if name == "probs" else jax.nn.one_hot(routing[name], 4).sum(-2)
            wanted = (np.asarray(of_tokens).reshape(P, G, S + T, 4) * counted[..., None]).sum((1, 2))
            np.testing.assert_allclose(result[layer], wanted, rtol=1e-4, atol=1e-5)
    assert loads.chosen.shape == (2, P, 4) and float(loads.chosen.sum()) == 2 * 2 * counted.sum()


@pytest.mark.slow
def test_adapters_are_for_attention_alone():
    adapters = lora.init(jax.random.key(1), params(), rank=2, alpha=4.0)
    assert set(adapters) == {"q", "k", "v", "o"}
    with pytest.raises(ValueError, match="LoRA target 'up' is a layer of experts in this model.* allowed: q, k, v, o"):
        lora.init(jax.random.key(1), params(), rank=2, alpha=4.0, targets=("q", "up"))
    merged = lora.merge(params(), jax.tree.map(jnp.ones_like, adapters))
    assert jax.tree.structure(merged) == jax.tree.structure(params())
