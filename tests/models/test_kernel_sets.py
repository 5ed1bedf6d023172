"""Models by every set of kernels against the plain one, and the memory of long rows."""
import importlib.util
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import cudnn, flash, splash
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.models import attention as attention_of_models
from jaxrl_llm.models.config import Experts

P, G, S, T = 2, 3, 6, 12
SMALL = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, mlp_size=48)
MODELS = {"plain": ModelConfig(**SMALL), "experts": ModelConfig(**SMALL, experts=Experts(4, 2, 32)),
          "windows": ModelConfig(**SMALL, window=5, local_layers=(True, False), attention_softcap=20.0)}
BATCH = np.random.default_rng(0)
PROMPTS, TOKENS = BATCH.integers(0, 64, (P, S)), BATCH.integers(0, 64, (P, G, T))
PROMPT_MASK = np.arange(S) >= np.array([[2], [0]])  # padded on either side
PROMPT_MASK[1, 4:] = False
MASK = np.arange(T) < np.array([[12, 4, 1], [3, 9, 2]])[..., None]


def params_of(config):
    keys = iter(jax.random.split(jax.random.key(0), 40))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.3, Transformer(config).abstract_params())


def gradients(config, kernels, filled=4):
    """States and gradients, of packed groups and of plain rows."""
    model, params = Transformer(config, kernels=kernels), params_of(config)

    def packed(params):
        states, _ = model.packed_states(params, PROMPTS, PROMPT_MASK, TOKENS, mask=MASK, filled=filled)
        real = jnp.where(MASK[..., None], states, 0)
        return jnp.sin(real).sum(), real

    def plain(params):
        states = jnp.where(PROMPT_MASK[..., None], model.hidden_states(params, PROMPTS, PROMPT_MASK)[0], 0)
        return jnp.sin(states).sum(), states

    return [jax.jit(jax.value_and_grad(f, has_aux=True))(params) for f in (packed, plain)]


def assert_same(result, wanted):
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-4 * max(1, float(np.abs(theirs).max())))


@pytest.mark.slow
@pytest.mark.parametrize("filled", (4, 3))
@pytest.mark.parametrize("name", ("plain", "windows"))
def test_long_rectangular_rows_are_computed_in_blocks_of_keys(monkeypatch, name, filled):
    wanted = gradients(MODELS[name], "plain", filled)
    monkeypatch.setattr(attention_of_models, "BLOCK", 4)
    monkeypatch.setattr(flash, "BLOCK", 4)
    assert attention_of_models.in_blocks(S, "plain") and not attention_of_models.in_blocks(3, "plain")
    assert_same(gradients(MODELS[name], "plain", filled), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_by_the_kernels_of_tpus(monkeypatch, name):
    """Their programs interpreted."""
    real, products = splash.kernel(interpret=True), dict(times=0)
    monkeypatch.setattr(splash, "kernel", lambda: real)
    from jaxrl_llm.kernels import grouped
    for what in ("times_on_tpu", "sums_on_tpu"):
        def interpreted(*arguments, f=getattr(grouped, what)):
            products["times"] += 1
            return f(*arguments, interpret=True)
        monkeypatch.setattr(grouped, what, interpreted)
    assert_same(gradients(MODELS[name], "tpu"), gradients(MODELS[name], "plain"))
    assert (products["times"] > 0) == (name == "experts")


@pytest.mark.slow
def test_models_by_cudnn(monkeypatch):
    """With XLA in place of its kernels."""
    called = []
    for what in ("forward", "backward"):
        def by_xla(implementation, *arguments, f=getattr(cudnn, what)):
            called.append(implementation)
            return f("xla", *arguments)
        monkeypatch.setattr(cudnn, what, by_xla)
    monkeypatch.setattr(cudnn, "serves", lambda queries, softcap: softcap is None)
    for name in ("plain", "windows"):
        called.clear()
        assert_same(gradients(MODELS[name], "cuda"), gradients(MODELS[name], "plain"))
        assert ("cudnn" in called) == (name == "plain")


@pytest.mark.parametrize("lost", ("module", "function"))
def test_kernels_that_jax_no_longer_has_are_refused(monkeypatch, lost):
    if lost == "module":
        monkeypatch.setitem(sys.modules, "jax._src.cudnn.fused_attention_stablehlo", None)
        spec = importlib.util.spec_from_file_location("jaxrl_llm.kernels.cudnn_elsewhere", cudnn.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.fused is None
        monkeypatch.setattr(cudnn, "fused", module.fused)
    else:
        monkeypatch.delattr(cudnn.fused, "check_cudnn_version")
    config = ModelConfig(**SMALL)
    model, params = Transformer(config, jnp.bfloat16, kernels="cuda"), params_of(config)
    with pytest.raises(NotImplementedError, match="lacks .*check_cudnn_version.*; set model.kernels=plain"):
        jax.eval_shape(lambda params: model.packed_states(params, PROMPTS, PROMPT_MASK, TOKENS, mask=MASK), params)
    other = Transformer(config, kernels="cuda")  # 32-bit numbers, which cuDNN has no kernel for
    assert jax.eval_shape(lambda params: other.packed_states(params, PROMPTS, PROMPT_MASK, TOKENS, mask=MASK), params)


@pytest.mark.slow
def test_memory_of_rectangular_rows_is_linear_in_their_length():
    model = Transformer(ModelConfig(**SMALL))
    params = model.abstract_params()

    def temporaries(length):
        def loss(params, *batch):
            return model.packed_states(params, *batch)[0].sum()
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in
                  (((1, 64), jnp.int32), ((1, 64), bool), ((1, 2, length), jnp.int32))]
        return jax.jit(jax.grad(loss)).lower(params, *shapes).compile().memory_analysis().temp_size_in_bytes

    short, middle, long = (temporaries(length) for length in (2048, 4096, 8192))
    assert long - middle < 2.2 * (middle - short)  # twice for what is linear, four times for what is quadratic
    chex.assert_scalar_positive(middle - short)


LONG_ROW = """
import pathlib, re, jax, numpy as np, optax
from jaxrl_llm import methods
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.data.packing import of_groups, pack
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning import state as states
from jaxrl_llm.learning.accumulate import make_parts, update
from jaxrl_llm.learning.policy import Policy
model = Transformer(ModelConfig(vocab_size=32768, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
                                mlp_size=768, tie_embeddings=True))
S, T = 64, 8128
estimator, objective = methods.build("grpo", max_len=T)
optimizer, rng = optax.adamw(1e-3), np.random.default_rng(0)
params = model.init(jax.random.key(0))
before = np.asarray(params["layers"]["q"]["kernel"])
state = states.create(params, None, optimizer, estimator, objective, jax.random.key(0))
prompts, tokens = rng.integers(0, 32768, (1, S), np.int32), rng.integers(0, 32768, (1, 1, T), np.int32)
mask = np.ones((1, 1, T), bool)
packed = pack(*of_groups(prompts, np.ones((1, S), bool), tokens, mask), mask, [S + T])
rollouts = Rollouts(mask=mask, valid=np.ones((1, 1), bool), rewards=np.ones((1, 1), np.float32),
                    behavior_logprobs=np.full(mask.shape, -10.4, np.float32))
parts = make_parts(Policy(model), objective, optimizer)
state, metrics = update(parts, 1, state, packed, rollouts, np.ones(mask.shape, np.float32))
moved = float(np.abs(np.asarray(state.params["layers"]["q"]["kernel"]) - before).max())
status = pathlib.Path("/proc/self/status").read_text()  # what getrusage says begins with the peak of the parent
print(packed.node.shape, moved, int(re.search("VmHWM:\\s+([0-9]+) kB", status)[1]) * 1024 / 1e9)
"""


@pytest.mark.slow
def test_a_row_of_8k_tokens_trains_within_2_gb():
    """A step of all weights of two layers, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", LONG_ROW], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    *shape, moved, gigabytes = done.stdout.split()
    assert shape == ["(1,", "8192)"] and float(moved) > 1e-4 and 0.1 < float(gigabytes) < 2.0
