"""Checkpoints in and out: every family's files, configs of old and new releases, every refusal."""
import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from jaxrl_llm.models import ModelConfig, RopeScaling, Transformer, lora, weights

FAMILIES = ("llama", "llama_untied", "llama_llama3_rope", "llama_linear_rope", "qwen2", "qwen2_sliding", "qwen3",
            "gemma3")


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


def copy_of(pair, name, tmp_path, **config_changes):
    """A writable copy of a tiny checkpoint with some keys of its config changed (`...` removes a key)."""
    directory = shutil.copytree(pair(name).directory, tmp_path / "copy")
    raw = json.loads((directory / "config.json").read_text()) | config_changes
    (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    return directory


def rewrite(directory, change):
    """Replaces the stored tensors by `change(tensors)`."""
    save_file(change(load_file(directory / "model.safetensors")), directory / "model.safetensors", {"format": "pt"})


# --- Hugging Face directories ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hyper_parameters_come_from_the_checkpoint(pair):
    assert pair("gemma3").model.config == ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=48,
        max_positions=128, activation="gelu_tanh", norm_eps=1e-6, norm_offset=1.0, post_norms=True, qk_norm=True,
        tie_embeddings=True, embedding_scale=32**0.5, attention_scale=24**-0.5, rope_theta=1000.0,
        rope_local_theta=100.0, rope_scaling=RopeScaling("linear", 8.0), window=4,
        local_layers=(True, False, True), family="gemma3_text")
    llama = pair("llama_llama3_rope").model.config
    assert llama.rope_scaling == RopeScaling("llama3", 4.0, 1.0, 4.0, 64) and llama.rope_theta == 500.0
    assert llama.head_dim == 8 and llama.attention_scale == 8**-0.5 and llama.activation == "silu"
    assert not pair("llama_untied").model.config.tie_embeddings and "unembed" in pair("llama_untied").params
    qwen2 = pair("qwen2_sliding").model.config
    assert qwen2.qkv_bias and qwen2.local_layers == (False, True, True) and qwen2.window == 3
    assert pair("qwen3").model.config.qk_norm and pair("qwen3").model.config.head_dim == 16


def test_layers_are_stacked_and_transposed(pair):
    params, state = pair("llama").params, pair("llama").torch.state_dict()
    assert params["layers"]["gate"]["kernel"].shape == (3, 32, 48)
    np.testing.assert_array_equal(params["layers"]["gate"]["kernel"][2], state["model.layers.2.mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(params["embed"], state["model.embed_tokens.weight"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, pair("llama").model.abstract_params())


OLD = dict(rope_parameters=..., layer_types=..., dtype=..., torch_dtype="float32")


@pytest.mark.parametrize("name, old", [
    ("llama_linear_rope", dict(rope_theta=100.0, rope_scaling={"type": "linear", "factor": 2.0})),
    ("llama_llama3_rope", dict(rope_theta=500.0, rope_scaling=dict(
        type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64))),
    ("qwen2_sliding", dict(rope_theta=10000.0, rope_scaling=None)),
    ("qwen2", dict(rope_theta=10000.0, sliding_window=4096, use_sliding_window=False, max_window_layers=0)),
    ("gemma3", dict(rope_theta=1000.0, rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
                    sliding_window_pattern=2)),
])
def test_configs_of_older_releases_mean_the_same(pair, tmp_path, name, old):
    config, _ = weights.load(copy_of(pair, name, tmp_path, **OLD | old))
    assert config == pair(name).model.config


def test_gemma3_config_that_leaves_out_defaults():
    text = dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34,
                rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024)
    config = weights.hf.config_from({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope_theta == 1e6 and config.rope_local_theta == 1e4
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    assert [i for i, local in enumerate(config.local_layers) if not local] == [5, 11, 17, 23, 29]
    assert config.tie_embeddings and config.window == 1024 and config.attention_scale == 1 / 16
    theirs = transformers.Gemma3TextConfig(**text)
    assert theirs.num_attention_heads == 8 and theirs.num_key_value_heads == 4
    assert theirs.head_dim == 256 and theirs.vocab_size == 262208
    assert [kind == "sliding_attention" for kind in theirs.layer_types] == list(config.local_layers)


@pytest.mark.parametrize("prefix", ("language_model.model.", "model.language_model.", ""))
def test_text_part_under_other_prefixes(pair, tmp_path, prefix):
    directory = copy_of(pair, "gemma3", tmp_path)
    rewrite(directory, lambda tensors: {name.replace("model.", prefix, 1): x for name, x in tensors.items()}
            | {"vision_tower.vision_model.embeddings.patch_embedding.bias": np.zeros(3, np.float32)})
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": raw}))
    config, params = weights.load(directory)
    assert config == pair("gemma3").model.config
    assert_same_bits(params, pair("gemma3").params)


def test_bfloat16_files_become_float32_masters_or_what_is_asked(pair, tmp_path):
    directory = copy_of(pair, "llama", tmp_path, dtype="bfloat16")
    rewrite(directory, lambda tensors: {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), pair("llama").params)
    assert_same_bits(weights.load(directory)[1], jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    assert_same_bits(weights.load(directory, dtype=jnp.bfloat16)[1], rounded)


@pytest.mark.parametrize("change, message", [
    (dict(model_type="mamba"), "model_type 'mamba' is not supported; supported: gemma2, gemma3_text, glm"),
    (dict(model_type="qwen2", attention_bias=True), "attention_bias=True is not supported for qwen2"),
    (dict(model_type="qwen3", mlp_bias=True), "mlp_bias=True is not supported"),
    (dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0 is not supported"),
    (dict(quantization_config={"bits": 4}), "quantization_config"),
    (dict(hidden_act="relu2"), "hidden_act='relu2' is not supported; supported: silu"),
    (dict(rope_parameters=dict(rope_type="axial", rope_theta=1e4)), "rope type 'axial' is not supported; supported: 'default'"),
    (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
     "partial_rotary_factor=0.5 is not supported"),
    (dict(rope_parameters=..., rope_scaling=dict(type="dynamic")), "factor is missing from the rope parameters"),
    (dict(layer_types=["full_attention", "chunked_attention", "full_attention"]),
     "layer_types chunked_attention not supported for llama"),
    (dict(layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=4),
     "layer_types sliding_attention not supported for llama; supported: full_attention"),
    (dict(intermediate_size=...), r"expected shape \(32, 11008\), found \(32, 48\)"),
])
def test_unsupported_configs_are_refused(pair, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        weights.load(copy_of(pair, "llama", tmp_path, **change))


def test_scaled_sliding_layers(pair, tmp_path):
    scaled = dict(rope_type="linear", factor=2.0, rope_theta=1e4)
    config, _ = weights.load(copy_of(pair, "qwen2_sliding", tmp_path, rope_parameters=scaled))
    assert config.rope_local_scaling == config.rope_scaling == RopeScaling("linear", 2.0)


def test_window_keys_of_qwen_mean_nothing_to_llama(pair, tmp_path):
    window = dict(use_sliding_window=True, sliding_window=3, max_window_layers=0)
    config, _ = weights.load(copy_of(pair, "llama", tmp_path, layer_types=..., **window))
    assert config == pair("llama").model.config and config.window is None
    config, _ = weights.load(copy_of(pair, "qwen2", tmp_path / "qwen2", layer_types=..., **window))
    assert config.window == 3 and config.local_layers == (True,) * 3


def test_an_unembedding_beside_tied_embeddings_is_read_if_it_differs(pair, tmp_path):
    directory = copy_of(pair, "llama", tmp_path)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(directory, lambda tensors: tensors | {"lm_head.weight": embedding.copy()})
    config, params = weights.load(directory)
    assert config == pair("llama").model.config
    assert_same_bits(params, pair("llama").params)
    own = embedding.copy()
    own[63, 31] += 1.0  # the last number of all
    rewrite(directory, lambda tensors: tensors | {"lm_head.weight": own})
    config, params = weights.load(directory)
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["unembed"], own)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)  # unties them as well
    np.testing.assert_array_equal(theirs.lm_head.weight.detach(), own)
    np.testing.assert_array_equal(theirs.model.embed_tokens.weight.detach(), embedding)


@pytest.mark.parametrize("dtype", (np.int8, ml_dtypes.float8_e4m3fn))
def test_quantised_tensors_without_a_word_in_the_config_are_refused(pair, tmp_path, dtype):
    directory, name = copy_of(pair, "llama", tmp_path), "model.layers.1.mlp.up_proj.weight"
    tensors = {key: torch.tensor(x) for key, x in load_file(directory / "model.safetensors").items()}
    tensors[name] = tensors[name].to(torch.int8 if dtype == np.int8 else torch.float8_e4m3fn)
    save_torch(tensors, directory / "model.safetensors")
    kind = "I8" if dtype == np.int8 else "F8_E4M3"
    with pytest.raises(ValueError, match=f"'{name}' in .*model.safetensors holds {kind}, .*supported: F64, F32, F16, BF16"):
        weights.load(directory)


def test_quantised_multimodal_models_are_refused():
    text = dict(model_type="gemma3_text", hidden_size=64)
    whole = {"model_type": "gemma3", "text_config": text, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(ValueError, match="config.json: quantization_config=.*gptq.* is not supported for gemma3_text"):
        weights.hf.config_from(whole)


def test_configs_of_llama_without_keys_take_its_defaults():
    config = weights.hf.config_from({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4})
    assert (config.norm_eps, config.max_positions, config.head_dim, config.num_kv_heads) == (1e-6, 2048, 16, 4)
    assert not config.tie_embeddings and config.rope_theta == 10_000.0 and config.vocab_size == 32_000


@pytest.mark.parametrize("change, message", [
    (lambda t: {k: v for k, v in t.items() if k != "model.layers.1.mlp.up_proj.weight"},
     "tensor 'model.layers.1.mlp.up_proj.weight' is missing from .*; .* holds 28 tensors"),
    (lambda t: {k: v for k, v in t.items() if "embed" not in k}, "'model.embed_tokens.weight' is missing"),
    (lambda t: t | {"model.layers.2.self_attn.q_proj.weight": np.zeros((16, 32), np.float32)},
     r"'model.layers.2.self_attn.q_proj.weight' in .*model.safetensors: expected shape \(32, 32\), found \(16, 32\)"),
    (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)},
     r"holds 1 tensors that this architecture does not read \(model.layers.0.self_attn.q_proj.bias\)"),
])
def test_wrong_tensors_are_refused(pair, tmp_path, change, message):
    directory = copy_of(pair, "llama", tmp_path)
    rewrite(directory, change)
    with pytest.raises(ValueError, match=message):
        weights.load(directory)


def test_files_that_are_not_there_or_cut_short(pair, tmp_path):
    directory = copy_of(pair, "llama", tmp_path)
    whole = (directory / "model.safetensors").read_bytes()
    for size in (len(whole) - 5, 100, 3):
        (directory / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"model.safetensors \({size} bytes\) is not a whole safetensors file"):
            weights.load(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor model.safetensors.index.json"):
        weights.load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no config.json"):
        weights.load(directory)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        weights.load(tmp_path / "nowhere.gguf")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="neither a directory"):
        weights.load(tmp_path / "model.bin")


# --- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_export_and_reload_is_bit_equal_and_transformers_reads_it(pair, tmp_path, name):
    p = pair(name)
    weights.save_hf(tmp_path / "out", p.model.config, p.params)
    config, params = weights.load(tmp_path / "out")
    assert config == p.model.config
    assert_same_bits(params, p.params)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    assert again.dtype == torch.float32
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        np.testing.assert_array_equal(again(tokens).logits, p.torch(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_exported_adapter_is_the_merged_model_to_peft(pair, tmp_path, name):
    """The adapter on its base, by PEFT, gives the logits of the merged export; other users may read both exports."""
    p, old = pair(name), os.umask(0o022)
    adapters = lora.init(jax.random.key(0), p.params, rank=2, alpha=8.0)
    adapters = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    try:
        weights.save_peft(tmp_path / "adapter", p.model.config, adapters, str(p.directory))
        weights.save_hf(tmp_path / "merged", p.model.config, lora.merge(p.params, adapters))
    finally:
        os.umask(old)
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        assert (tmp_path / file).stat().st_mode & 0o777 == 0o644
    base = transformers.AutoModelForCausalLM.from_pretrained(p.directory, attn_implementation="eager")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        before = base(tokens).logits
        adapted, wanted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits, merged(tokens).logits
    np.testing.assert_allclose(adapted, wanted, rtol=1e-4, atol=2e-5)
    assert not np.allclose(before, wanted, atol=1e-2)


@pytest.mark.slow
def test_an_adapter_of_fused_matrices_is_refused(tmp_path):
    config = ModelConfig(vocab_size=64, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, mlp_size=8,
                         family="phi3")
    adapters = lora.init(jax.random.key(0), Transformer(config).init(jax.random.key(0)), rank=2, alpha=2.0)
    with pytest.raises(ValueError, match="holds several matrices.*export the merged model instead"):
        weights.save_peft(tmp_path, config, adapters, "")


def test_shards_with_index_and_tokenizer_files(pair, tmp_path):
    p, source, out = pair("qwen2"), tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "additional_chat_templates").mkdir()
    more = "additional_chat_templates/rag.jinja"
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", more, "README.md"):
        (source / name).write_text(f'"{name}"')
    (source / "config.json").write_text('{"eos_token_id": [7, 9], "bos_token_id": 1}')
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p.params)
    weights.save_hf(out, p.model.config, half)  # an earlier save, of one file, which must not survive
    weights.save_hf(out, p.model.config, half, tokenizer_files_from=source, shard_bytes=10_000)
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(x.size for x in jax.tree.leaves(half))
    assert all(sum(x.nbytes for x in load_file(out / shard).values()) <= 10_000 for shard in shards)
    raw = json.loads((out / "config.json").read_text())
    assert raw["eos_token_id"] == [7, 9] and raw["bos_token_id"] == 1 and raw["pad_token_id"] is None
    assert (out / "tokenizer.json").read_text() == '"tokenizer.json"' and (out / "chat_template.jinja").exists()
    assert (out / more).exists()
    assert (out / "generation_config.json").exists() and not (out / "README.md").exists()
    assert_same_bits(weights.load(out, dtype=jnp.bfloat16)[1], half)
    (out / shards[1]).rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=f"{shards[1]} is named by the index but is not there"):
        weights.load(out)
    (tmp_path / "moved").rename(out / shards[1])
    index["weight_map"].pop("model.norm.weight")
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="tensor 'model.norm.weight' is missing"):
        weights.load(out)


def test_exports_that_would_lose_something_are_refused(pair, tmp_path):
    config, params = pair("llama").model.config, pair("llama").params
    for change, lost in ((dict(qk_norm=True), "qk_norm=True"), (dict(attention_scale=1.0), "attention_scale=1.0"),
                         (dict(rope_local_theta=77.0), "rope_local_theta=77.0"), (dict(logit_softcap=9.0), "logit_softcap=9.0"),
                         (dict(rotary_factor=0.5), "rotary_factor=0.5"), (dict(residual_scale=0.5), "residual_scale=0.5")):
        with pytest.raises(ValueError, match=f"format of family 'llama' cannot say {lost}"):
            weights.save_hf(tmp_path / "a", dataclasses.replace(config, **change), params)
    with pytest.raises(ValueError, match="format of family 'llama' cannot say window=4, local_layers="):
        local = dataclasses.replace(config, local_layers=(True, False, False), window=4)
        weights.save_hf(tmp_path / "a", local, params)
    with pytest.raises(ValueError, match="family 'mine' has no export format; supported: gemma2"):
        weights.save_hf(tmp_path / "a", dataclasses.replace(config, family="mine"), params)
    with pytest.raises(ValueError, match="parameter unembed is missing"):
        weights.save_hf(tmp_path / "a", dataclasses.replace(config, tie_embeddings=False), params)
    with pytest.raises(ValueError, match=r"'embed' in params: expected shape \(65, 32\), found \(64, 32\)"):
        weights.save_hf(tmp_path / "a", dataclasses.replace(config, vocab_size=65), params)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no tokenizer files"):
        weights.save_hf(tmp_path / "a", config, params, tokenizer_files_from=tmp_path / "empty")
    assert not (tmp_path / "a" / "config.json").exists()
