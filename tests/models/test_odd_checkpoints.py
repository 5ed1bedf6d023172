"""Checkpoints with odd configurations load as transformers and llama.cpp read them, or are refused before weights are read."""
import dataclasses
import json
import re
import shutil

import gguf
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from test_weights import copy_of, rewrite

from jaxrl_llm.models import Transformer, weights
from jaxrl_llm.models.check.gguf_files import write as write_gguf
from jaxrl_llm.models.weights.peft import adapters


def logits_of(directory, tokens):
    config, params = weights.load(directory)
    model = Transformer(config)
    states, _, _ = model.hidden_states(params, jnp.asarray(tokens), jnp.ones(np.shape(tokens), bool))
    return np.asarray(model.logits(params, states))


NAME_OF_B = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
TOKENS = np.arange(12)[None] % 60


@pytest.mark.slow
def test_an_unembedding_of_its_own_is_used_though_the_config_ties_it(pair, tmp_path):
    directory = copy_of(pair, "llama_untied", tmp_path, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="tie_word_embeddings is true, but .*holds an unembedding 'lm_head.weight'"):
        config, params = weights.load(directory)
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["unembed"], pair("llama_untied").params["unembed"])
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        ours = logits_of(directory, TOKENS)
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_copy_of_the_embedding_stays_tied(pair, tmp_path, recwarn):
    directory = copy_of(pair, "llama", tmp_path)
    rewrite(directory, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    config, params = weights.load(directory)
    assert config.tie_embeddings and "unembed" not in params
    assert not [one for one in recwarn if "tie_word_embeddings" in str(one.message)]


def test_window_keys_of_another_family_switch_no_window_on(pair, tmp_path):
    directory = copy_of(pair, "llama", tmp_path, use_sliding_window=True, sliding_window=3, max_window_layers=1,
                        layer_types=...)
    config, _ = weights.load(directory)
    assert config.window is None and not any(config.local_layers)
    np.testing.assert_allclose(logits_of(directory, TOKENS), logits_of(pair("llama").directory, TOKENS), atol=1e-6)


@pytest.mark.parametrize(("name", "absent", "expected"), [
    ("llama", ("rms_norm_eps", "max_position_embeddings"), {"norm_eps": 1e-6, "max_positions": 2048}),
    ("qwen2", ("rms_norm_eps", "max_position_embeddings"), {"norm_eps": 1e-6, "max_positions": 32768}),
    ("qwen3", ("rms_norm_eps", "max_position_embeddings"), {"norm_eps": 1e-6, "max_positions": 32768}),
    ("gemma3", ("rms_norm_eps", "max_position_embeddings"), {"norm_eps": 1e-6, "max_positions": 131072}),
])
def test_absent_keys_have_the_defaults_of_transformers(pair, tmp_path, name, absent, expected):
    directory = copy_of(pair, name, tmp_path, **dict.fromkeys(absent, ...))
    config, _ = weights.load(directory)
    theirs = transformers.AutoConfig.from_pretrained(directory)
    assert (config.norm_eps, config.max_positions) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert {key: getattr(config, key) for key in expected} == expected


def test_a_missing_head_dimension_is_that_of_transformers(pair, tmp_path):
    directory = copy_of(pair, "qwen3", tmp_path, head_dim=...)
    with pytest.raises(ValueError, match=r"(q|k)_proj.*expected shape \((512|256), 32\)"):  # heads of 128
        weights.load(directory)


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (np.uint8, "U8")])
def test_quantised_codes_without_a_scale_are_refused(pair, tmp_path, dtype, name):
    directory = copy_of(pair, "llama", tmp_path)
    rewrite(directory, lambda tensors: tensors | {"model.layers.1.mlp.up_proj.weight": np.ones((48, 32), dtype)})
    with pytest.raises(ValueError, match=f"'model.layers.1.mlp.up_proj.weight' in .* holds {name}, numbers of"):
        weights.load(directory)


def test_float8_codes_are_refused(pair, tmp_path):
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    directory = copy_of(pair, "llama", tmp_path)
    tensors = load_torch(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_torch(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="'model.norm.weight' in .* holds F8_E4M3"):
        weights.load(directory)


def test_a_quantisation_that_a_multimodal_config_names_outside_is_refused(pair, tmp_path):
    directory = shutil.copytree(pair("gemma3").directory, tmp_path / "copy")
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(
        {"model_type": "gemma3", "text_config": text, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"config.json: quantization_config=\{'quant_method': 'fp8'\} is not supported"):
        weights.load(directory)


def split_in_two(path, reference):
    """The same model in two parts, as llama.cpp's gguf-split names and marks them."""
    whole = path / "whole.gguf"
    write_gguf(whole, reference)
    reader = gguf.GGUFReader(whole)
    files = [path / f"model-{number:05d}-of-00002.gguf" for number in (1, 2)]
    half = len(reader.tensors) // 2
    for number, (file, tensors) in enumerate(zip(files, (reader.tensors[:half], reader.tensors[half:]))):
        writer = gguf.GGUFWriter(file, "llama")
        for name, field in reader.fields.items() if number == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.asarray(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    whole.unlink()
    return files


def test_a_gguf_model_in_parts_is_read_whole(pair, tmp_path):
    first, second = split_in_two(tmp_path, pair("llama").torch)
    for given in (first, tmp_path):
        config, params = weights.load(given)
        np.testing.assert_array_equal(params["embed"], pair("llama").params["embed"])
        np.testing.assert_array_equal(params["layers"]["down"]["kernel"], pair("llama").params["layers"]["down"]["kernel"])
    with pytest.raises(ValueError, match="part 2 of 2; give the first, model-00001-of-00002.gguf"):
        weights.load(second)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="part 1 of 2, and model-00002-of-00002.gguf is not beside it"):
        weights.load(first)


def test_a_directory_with_one_gguf_file_is_that_model(pair, tmp_path):
    write_gguf(tmp_path / "model.gguf", pair("llama").torch)
    np.testing.assert_array_equal(weights.load(tmp_path)[1]["embed"], pair("llama").params["embed"])
    write_gguf(tmp_path / "other.gguf", pair("llama").torch)
    with pytest.raises(ValueError, match="holds 2 models: model.gguf, other.gguf; name one of them"):
        weights.load(tmp_path)


def test_other_paths_are_named(pair, tmp_path):
    directory = copy_of(pair, "llama", tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin is a pickle file, which runs code.*save_pretrained"):
        weights.load(directory)
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded here.*hf download Qwen/Qwen2.5-0.5B --local-dir"):
        weights.load("Qwen/Qwen2.5-0.5B")
    (directory / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(ValueError, match=r"config.json is no JSON file \(.*line 1"):
        weights.load(directory)
    (directory / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="config.json holds a list, expected a JSON object"):
        weights.load(directory)


def write_adapter(directory, base, changes=None, rank=2, skip=()):
    """An adapter of two targets in the format of PEFT, and the product that it adds to each matrix."""
    rng = np.random.default_rng(0)
    tensors, updates = {}, {}
    for layer in range(3):
        for target, (out, into) in {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 48)}.items():
            a, b = rng.normal(size=(rank, into)).astype(np.float32), rng.normal(size=(out, rank)).astype(np.float32)
            name = f"base_model.model.model.layers.{layer}.{target}"
            if layer not in skip:
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
                updates[layer, target] = b @ a
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none",
                 "base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", **(changes or {})}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return updates


@pytest.mark.parametrize(("changes", "message"), [
    ({"base_model_name_or_path": 3}, "adapter_config.json: base_model_name_or_path='3' is of type int; expected a text"),
    ({"lora_alpha": 1e300}, "adapter_model.safetensors holds ([0-9]+) values of \\1 that are NaN or infinite"),
    ({"lora_alpha": 1e38}, "adapter_model.safetensors: with this adapter, and lora_alpha in adapter_config.json, matrices of")])
def test_adapters_that_make_no_numbers_are_refused(pair, tmp_path, changes, message):
    write_adapter(tmp_path / "adapter", pair("llama").directory, changes)
    with pytest.raises(ValueError, match=message):
        weights.load(tmp_path / "adapter")


def test_an_adapter_is_a_whole_file(pair, tmp_path):
    write_adapter(tmp_path / "adapter", pair("llama").directory)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    for content in (b"", b"\xff" * 20, file.read_bytes()[:-1]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"adapter_model.safetensors \({len(content)} bytes\) is not a whole safetensors"):
            weights.load(tmp_path / "adapter")


@pytest.mark.parametrize(("changes", "scale"), [({}, 4.0), ({"use_rslora": True}, 8 / 2**0.5)])
def test_an_adapter_is_merged_into_its_base(pair, tmp_path, changes, scale):
    base = pair("llama").directory
    updates = write_adapter(tmp_path / "adapter", base, changes, skip=(1,))
    _, params = weights.load(tmp_path / "adapter")
    plain = load_file(base / "model.safetensors")
    for layer in range(3):
        for target, name in (("self_attn.q_proj", "q"), ("mlp.down_proj", "down")):
            expected = plain[f"model.layers.{layer}.{target}.weight"] + scale * updates.get((layer, target), 0)
            np.testing.assert_allclose(params["layers"][name]["kernel"][layer].T, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(params["layers"]["up"]["kernel"], pair("llama").params["layers"]["up"]["kernel"])


@pytest.mark.parametrize("settings", [
    {}, {"init_lora_weights": "gaussian", "use_rslora": True, "rank_pattern": {"down_proj": 4, r"layers\.1\..*q_proj": 3}},
    {"rank_pattern": {"q_proj": 1}, "alpha_pattern": {"model.layers.2.mlp.down_proj": 5, "layers.0.self_attn.q_proj": 16}}])
def test_adapters_give_the_logits_of_peft(pair, tmp_path, settings):
    """Of adapters that PEFT makes and saves, with random B."""
    base = transformers.AutoModelForCausalLM.from_pretrained(pair("llama").directory)
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], **settings))
    torch.manual_seed(0)
    for name, weight in theirs.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits_of(tmp_path / "adapter", TOKENS), wanted, atol=1e-4)


# A value of each field of PEFT's LoraConfig that makes more of an adapter than W + scale B A.
MORE = {
    "use_dora": True, "modules_to_save": ["lm_head"], "bias": "all", "peft_type": "IA3", "fan_in_fan_out": True,
    "init_lora_weights": "pissa", "megatron_config": {"a": 1}, "trainable_token_indices": [1], "velora_config": {"scale": 1.0},
    "alora_invocation_tokens": [1, 2], "use_qalora": True, "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 2], [1, 3]], "lora_bias": True, "target_parameters": ["mlp.experts.down_proj"],
    "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 2}, "kasa_config": {"beta": 1.0}}
# Those that are computed, or that only training or the choice of matrices reads.
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "task_type", "auto_mapping", "peft_version",
        "base_model_name_or_path", "revision", "inference_mode", "target_modules", "exclude_modules", "lora_dropout",
        "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config",
        "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"}


def test_every_field_of_peft_is_read_or_refused_by_name(pair, tmp_path):
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == MORE.keys() | READ
    inits = [{"init_lora_weights": name} for name in ("pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga")]
    for i, change in enumerate([*({key: value} for key, value in MORE.items()), *inits, {"a_field_of_tomorrow": 2}]):
        write_adapter(tmp_path / str(i), pair("llama").directory, change)
        (key, value), = change.items()
        with pytest.raises(ValueError, match=rf"config.json: {re.escape(f'{key}={value!r}')} is not supported; supported: "):
            adapters(tmp_path / str(i), pair("llama").model.config)
    off = {key: None if key == "init_lora_weights" else value for key, value in peft.LoraConfig(r=2).to_dict().items()
           if key not in ("peft_type", "base_model_name_or_path", "lora_alpha")}
    write_adapter(tmp_path / "plain", pair("llama").directory, off | {"lora_dropout": 0.1, "eva_config": {"rho": 2.0}})
    adapters(tmp_path / "plain", pair("llama").model.config)


def test_alpha_and_rank_that_are_absent_are_those_of_peft(pair, tmp_path):
    write_adapter(tmp_path / "adapter", pair("llama").directory, rank=8)
    file = tmp_path / "adapter" / "adapter_config.json"
    described = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("r", "lora_alpha")}
    with_both = adapters(tmp_path / "adapter", pair("llama").model.config)
    file.write_text(json.dumps(described))  # 8 and 8
    np.testing.assert_array_equal(adapters(tmp_path / "adapter", pair("llama").model.config)["q"]["a"], with_both["q"]["a"])


@pytest.mark.parametrize(("change", "words"), [
    ({"r": "2"}, "the rank '2'"), ({"r": 0}, "the rank 0"), ({"lora_alpha": float("inf")}, "lora_alpha inf"),
    ({"lora_alpha": None}, "lora_alpha None"), ({"rank_pattern": [2]}, "rank_pattern=.*expected an object"),
    ({"alpha_pattern": {"(a": 1}}, "a pattern that RE2 cannot read"),
    ({"rank_pattern": {"((l|a|y|e|r|s|.)+)+!": 1}, "r": 0}, "the rank 0")])  # backtracking would not end
def test_numbers_and_patterns_of_adapters_that_are_none(pair, tmp_path, change, words):
    write_adapter(tmp_path / "adapter", pair("llama").directory, change)
    with pytest.raises(ValueError, match=f"(?s)adapter_config.json.*{words}"):
        adapters(tmp_path / "adapter", pair("llama").model.config)


def test_numbers_of_adapters_that_are_none_and_links_are_refused(pair, tmp_path):
    write_adapter(tmp_path / "adapter", pair("llama").directory)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file) | {NAME_OF_B: np.full_like(load_file(file)[NAME_OF_B], np.nan)}, file)
    with pytest.raises(ValueError, match=f"(?s)tensor '{NAME_OF_B}' .*NaN"):
        adapters(tmp_path / "adapter", pair("llama").model.config)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="lies outside of its folder"):
        adapters(tmp_path / "adapter", pair("llama").model.config)


def test_half_an_adapter_is_refused(pair, tmp_path):
    write_adapter(tmp_path / "adapter", pair("llama").directory)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != NAME_OF_B}, file)
    with pytest.raises(ValueError, match="one of the two LoRA matrices of model.layers.1.mlp.down_proj.weight alone"):
        adapters(tmp_path / "adapter", pair("llama").model.config)


def test_the_base_of_an_adapter_is_no_adapter(pair, tmp_path):
    write_adapter(tmp_path / "first", pair("llama").directory)
    write_adapter(tmp_path / "second", tmp_path / "first")
    with pytest.raises(ValueError, match="first', which is an adapter itself; merge that one into its base"):
        weights.load(tmp_path / "second")


def test_an_adapter_without_its_base_says_which_is_missing(tmp_path):
    write_adapter(tmp_path / "adapter", "Qwen/Qwen2.5-0.5B")
    with pytest.raises(FileNotFoundError, match="a PEFT adapter of the model .*, which is not on this machine"):
        weights.load(tmp_path / "adapter")
