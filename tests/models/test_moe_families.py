"""Mixtures of experts as published: the numbers of transformers, files in and out, refusals."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from test_parity import NEW, greedy, padded_rows, reference
from test_weights import assert_same_bits, copy_of

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.models import Experts, weights
from jaxrl_llm.models.check import gguf_files

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what takes time


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_packed_states_and_gradients_equal_transformers(pair, name):
    """Of the gradients, those of a router and of an expert's last matrix, which all others pass through."""
    p = pair(name)
    tokens, mask = padded_rows()
    expected, hidden = reference(p.torch, tokens, mask)
    scale, pull = np.abs(expected[mask]).max(), np.random.default_rng(1).normal(size=expected.shape) * mask[..., None]
    p.torch.zero_grad()
    out = p.torch(torch.tensor(tokens), attention_mask=torch.tensor(mask).long(),
                  position_ids=torch.tensor(np.maximum(mask.cumsum(-1) - 1, 0)))
    (out.logits * torch.tensor(pull, dtype=torch.float32)).sum().backward()

    @jit
    def run(params):
        def loss(params):
            states, _, pooled = p.model.hidden_states(params, jnp.asarray(tokens), jnp.asarray(mask), pool=lambda x: x)
            logits = p.model.logits(params, states)
            return (logits * pull).sum(), (logits, pooled)

        packed, _ = p.model.packed_states(params, jnp.asarray(tokens[:1, :9]), jnp.ones((1, 9), bool),
                                          jnp.asarray(tokens[:1, None, 9:]))
        return jax.grad(loss, has_aux=True)(params), p.model.logits(params, packed)

    (gradients, (logits, pooled)), packed = run(p.params)
    assert scale > 1.0
    np.testing.assert_allclose(np.asarray(logits)[mask], expected[mask], atol=1e-4 * scale, rtol=0)
    np.testing.assert_allclose(packed[0, 0], expected[0, 8:-1], atol=1e-4 * scale, rtol=0)
    for ours, theirs in zip(pooled[:-1], hidden[1:-1], strict=True):
        np.testing.assert_allclose(np.asarray(ours)[mask], theirs[mask], atol=1e-4 * np.abs(theirs[mask]).max(), rtol=0)
    for i, layer in enumerate(p.torch.model.layers):
        def of(name):
            return gradients["layers"][name]["kernel"][i].swapaxes(-1, -2)
        for ours, theirs in ((of("router"), layer.mlp.gate.weight.grad),
                             (of("experts_down"), layer.mlp.experts.down_proj.grad)):
            assert theirs.abs().max() > 1e-3
            np.testing.assert_allclose(ours, theirs, atol=2e-4 * float(theirs.abs().max()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_continuations_equal_transformers(pair, name):
    p = pair(name)
    tokens = np.random.default_rng(1).integers(0, 64, (3, 9))
    left = np.arange(9) >= 9 - np.array([9, 6, 2])[:, None]
    chosen = greedy(p.model, p.params, tokens, left, NEW)
    rows, mask = np.concatenate([tokens, chosen], axis=1), np.pad(left, ((0, 0), (0, NEW)), constant_values=True)
    np.testing.assert_array_equal(chosen, reference(p.torch, rows, mask)[0].argmax(-1)[:, 8:-1])
    assert len(np.unique(chosen)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ("mixtral", "qwen3_moe"))
def test_recorded_routes_equal_those_of_transformers(pair, name):
    p = pair(name)
    tokens, mask = np.random.default_rng(1).integers(0, 64, (2, 9)), np.arange(9) >= np.array([[0], [4]])
    made = generate(p.model, p.params, tokens, mask, row_keys(jax.random.key(0), np.arange(4).reshape(2, 2)), Sampling(1.0),
                    max_tokens=8, stop_ids=(), columns=("routes",))
    rows, there = (np.concatenate([np.repeat(x, 2, axis=0), y.reshape(4, 8)], 1) for x, y in ((tokens, made.tokens),
                                                                                          (mask, made.mask)))
    with torch.no_grad():
        out = p.torch(torch.tensor(rows), attention_mask=torch.tensor(there).long(), output_router_logits=True,
                      position_ids=torch.tensor(np.maximum(there.cumsum(-1) - 1, 0)))
    chosen = np.stack([np.argsort(-x.numpy().reshape(4, 17, -1))[:, 9:-1, :p.model.config.experts.per_token]
                       for x in out.router_logits], axis=2)
    np.testing.assert_array_equal(np.sort(np.asarray(made.columns["routes"]).reshape(4, 8, *chosen.shape[2:])[:, :-1]),
                                  np.sort(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("name", (*FAMILIES, "qwen2_moe_unbiased"))
def test_export_and_reload_is_bit_equal_and_transformers_reads_it(pair, tmp_path, name):
    p = pair(name)
    weights.save_hf(tmp_path / "out", p.model.config, p.params, shard_bytes=40_000)
    config, params = weights.load(tmp_path / "out")
    assert config == p.model.config
    assert_same_bits(params, p.params)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        np.testing.assert_array_equal(again(tokens).logits, p.torch(tokens).logits)


def test_hyper_parameters_come_from_the_checkpoint(pair):
    def of(name):
        return pair(name).model.config
    assert of("mixtral").experts == Experts(4, 2, 48, normalize=True)
    assert of("mixtral").window == 6 and of("mixtral").local_layers == (True,) * 3 and of("mixtral").rope_theta == 1e6
    assert of("qwen2_moe").experts == Experts(4, 2, 24, normalize=False, shared_size=20) and of("qwen2_moe").qkv_bias
    assert of("qwen3_moe").experts == Experts(4, 2, 24, normalize=True) and of("qwen3_moe").qk_norm
    assert of("olmoe").experts == Experts(5, 3, 48, normalize=False)
    assert of("olmoe").qk_norm_whole and pair("olmoe").params["layers"]["k_norm"]["scale"].shape == (3, 16)
    state = pair("qwen3_moe").torch.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(pair("qwen3_moe").params["layers"]["experts_up"]["kernel"][1, 3], state[3, 24:].T)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_gives_the_model_that_safetensors_give(pair, tmp_path, name):
    config, params = weights.load(gguf_files.write(tmp_path / "tiny.gguf", pair(name).torch))
    expected = pair(name).model.config
    if name == "mixtral":  # no file of this format gives its window
        expected = dataclasses.replace(expected, window=None, local_layers=(False,) * 3, rope_local_theta=1e4)
    assert dataclasses.replace(config, norm_eps=expected.norm_eps) == expected
    assert_same_bits(params, pair(name).params)


def test_gguf_may_say_how_weights_are_normalized(pair, tmp_path):
    config, _ = weights.load(gguf_files.write(
        tmp_path / "tiny.gguf", pair("olmoe").torch, {"olmoe.expert_weights_norm": True}))
    assert config.experts == Experts(5, 3, 48, normalize=True)


def test_configs_of_older_releases_mean_the_same(pair, tmp_path):
    old = dict(num_local_experts=..., num_experts=4, rope_parameters=..., rope_theta=1e4, dtype=..., max_window_layers=2,
               sliding_window=4096)
    assert weights.load(copy_of(pair, "qwen3_moe", tmp_path, **old))[0] == pair("qwen3_moe").model.config


@pytest.mark.parametrize(("name", "change", "message"), (
    ("qwen3_moe", dict(mlp_only_layers=[0]), r"mlp_only_layers=\[0\], decoder_sparse_step=1 leave layers without experts"),
    ("qwen2_moe", dict(decoder_sparse_step=2), "decoder_sparse_step=2 leave layers without experts"),
    ("qwen2_moe", dict(layer_types=..., use_sliding_window=True, sliding_window=4), "without layer_types is not supported"),
    ("olmoe", dict(clip_qkv=8.0), "clip_qkv=8.0 is not supported for olmoe"),
    ("mixtral", dict(num_experts_per_tok=7), "experts.per_token=7 of experts.count=4"),
))
def test_unsupported_configs_are_refused(pair, tmp_path, name, change, message):
    with pytest.raises(ValueError, match=message):
        weights.load(copy_of(pair, name, tmp_path, **change))
