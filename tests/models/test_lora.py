"""Adapters: nothing at the start, the gradient is theirs alone, merging them changes nothing."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import torch

from jaxrl_llm.learning.optimizers import make_optimizer
from jaxrl_llm.models import lora
from jaxrl_llm.models.linear import Dense

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what takes time
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 9)))
MASK = jnp.ones((2, 9), bool)


def trained(adapters):
    """Adapters as after some steps: b no longer zero."""
    return jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), adapters)


def test_fresh_adapters_change_nothing_and_have_the_papers_scale(pair):
    model, params = pair("llama").model, pair("llama").params
    adapters = lora.init(jax.random.key(0), params, rank=4, alpha=8.0)
    assert set(adapters) == {"q", "k", "v", "o", "gate", "up", "down"}
    assert adapters["down"]["a"].shape == (3, 48, 4) and adapters["down"]["b"].shape == (3, 4, 32)
    assert adapters["k"]["b"].shape == (3, 4, 16)
    wide = {"layers": {"q": {"kernel": jnp.zeros((8, 400, 4))}}}
    a = lora.init(jax.random.key(1), wide, rank=4, alpha=8.0, targets=("q",))["q"]["a"]
    np.testing.assert_allclose(a.std(), 1 / 400**0.5, rtol=0.03)  # whatever the scale
    assert adapters.scale == 2.0
    assert not any(adapter["b"].any() for adapter in adapters.values())
    run = jit(lambda p, t: model.hidden_states(p, TOKENS, MASK, lora=t)[0])
    np.testing.assert_array_equal(run(params, adapters), jit(lambda p: model.hidden_states(p, TOKENS, MASK)[0])(params))


@pytest.mark.slow
def test_merged_parameters_equal_adapters_in_every_path(pair):
    model, params, targets = pair("gemma3").model, pair("gemma3").params, ("q", "v", "down")
    adapters = trained(lora.init(jax.random.key(0), params, rank=2, alpha=4.0, targets=targets))
    prompt, completions = TOKENS[:, :5], TOKENS[:, None, 5:]

    @jit
    def run(params, adapters):
        plain, _, _ = model.hidden_states(params, TOKENS, MASK, lora=adapters)
        packed, _ = model.packed_states(params, prompt, MASK[:, :5], completions, lora=adapters)
        cache, first = model.prefill(params, prompt, MASK[:, :5], lora=adapters)
        layers = model.unstack_layers(params, adapters)
        decoded, _ = model.decode_step(params, layers, completions[:, :, 0], jnp.int32(0), cache,
                                       model.empty_completions(cache, 1, 4))
        return plain, packed, first, decoded

    merged = lora.merge(params, adapters)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), params["layers"], merged["layers"])
    assert {name for name, module in changed.items() if any(module.values())} == set(targets)
    with_adapters, with_merged = run(params, adapters), run(merged, None)
    for a, b in zip(with_adapters, with_merged, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), rtol=0)
    plain, packed, first, decoded = with_adapters  # and the paths agree with each other
    np.testing.assert_allclose(packed[:, 0], plain[:, 4:8], atol=2e-5 * np.abs(plain).max(), rtol=0)
    np.testing.assert_allclose(first, plain[:, 4], atol=2e-5 * np.abs(plain).max(), rtol=0)
    np.testing.assert_allclose(decoded[:, 0], plain[:, 5], atol=2e-5 * np.abs(plain).max(), rtol=0)


def test_gradient_of_adapters_is_the_projected_gradient_of_the_matrices(pair):
    """dL/dA = s dL/dW B^T and dL/dB = s A^T dL/dW of W + s A B, with the parameters themselves left alone."""
    model, params = pair("llama").model, pair("llama").params
    adapters = trained(lora.init(jax.random.key(0), params, rank=2, alpha=3.0))

    def loss(params, adapters):
        states, _, _ = model.hidden_states(params, TOKENS, MASK, lora=adapters)
        return jnp.sum(jnp.sin(3.0 * states))

    of_params, of_adapters = jit(jax.grad(loss, argnums=(0, 1)))(params, adapters)
    for target in lora.TARGETS:
        of_kernel = np.asarray(of_params["layers"][target]["kernel"], np.float64)
        a, b = (np.asarray(adapters[target][leaf], np.float64) for leaf in "ab")
        for actual, expected in ((of_adapters[target]["a"], 1.5 * of_kernel @ b.swapaxes(1, 2)),
                                 (of_adapters[target]["b"], 1.5 * a.swapaxes(1, 2) @ of_kernel)):
            assert np.abs(expected).max() > 1e-3
            np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_wrong_adapters_are_refused(pair):
    with pytest.raises(ValueError, match="target 'gates'; allowed: q, k, v, o, gate, up, down; nearest: 'gate'"):
        lora.init(jax.random.key(0), pair("llama").params, rank=2, alpha=2.0, targets=("q", "gates"))
    with pytest.raises(ValueError, match="rank=0; it must be at least 1"):
        lora.init(jax.random.key(0), pair("llama").params, rank=0, alpha=2.0)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 32), (64, 16)])
def test_training_is_that_of_peft(rank, alpha):
    """AdamW on a least-squares loss of one linear layer, from the same first A: the update of W after 30 steps, in float64."""
    rng = np.random.default_rng(0)
    kernel, x, y = (rng.normal(size=shape) for shape in ((24, 16), (32, 24), (32, 16)))
    layer = torch.nn.Sequential(torch.nn.Linear(24, 16, bias=False))
    layer[0].weight.data = torch.tensor(kernel.T)
    theirs = peft.get_peft_model(layer, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["0"])).double()
    adapter = theirs.base_model.model[0]
    first = adapter.lora_A["default"].weight.detach().numpy().T.copy()
    torch_adam = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(30):
        torch_adam.zero_grad()
        ((theirs(torch.tensor(x)) - torch.tensor(y)) ** 2).mean().backward()
        torch_adam.step()
    wanted = adapter.get_delta_weight("default").detach().numpy().T

    with jax.enable_x64(True):
        params = {"layers": {"q": {"kernel": jnp.asarray(kernel)[None]}}}
        adapters = jax.tree.map(lambda x: x.astype(jnp.float64), lora.init(jax.random.key(0), params, rank, alpha))
        adapters["q"]["a"] = jnp.asarray(first)[None]
        optimizer, _ = make_optimizer(1e-2, 30, weight_decay=0.1)

        def loss(adapters):
            matrices = {name: matrix[0] for name, matrix in lora.scaled(adapters)["q"].items()}
            predicted = Dense(16, jnp.float64).apply({"params": {"kernel": jnp.asarray(kernel)}, "lora": matrices}, x)
            return jnp.mean((predicted - y) ** 2)

        def step(carry, _):
            adapters, state = carry
            updates, state = optimizer.update(jax.grad(loss)(adapters), state, adapters)
            return (optax.apply_updates(adapters, updates), state), None

        (adapters, _), _ = jit(lambda carry: jax.lax.scan(step, carry, None, 30))((adapters, optimizer.init(adapters)))
        update = np.asarray(lora.merge(params, adapters)["layers"]["q"]["kernel"][0]) - kernel
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(update, wanted, atol=1e-6 * np.abs(wanted).max(), rtol=0)


def test_one_adapter_holds_two(pair):
    """W + s1 A1 B1 + s2 A2 B2, with other ranks, scales and targets."""
    params = pair("llama").params
    first = trained(lora.init(jax.random.key(0), params, rank=2, alpha=6.0, targets=("q", "v")))
    second = trained(lora.init(jax.random.key(1), params, rank=3, alpha=1.0, targets=("q", "down")))
    both = lora.joined(first, second)
    assert both.scale == 1.0 and {one["a"].shape[-1] for one in both.values()} == {5}
    result, wanted = lora.merge(params, both), lora.merge(lora.merge(params, first), second)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, wanted)
