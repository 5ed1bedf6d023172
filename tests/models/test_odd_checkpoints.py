"""Checkpoints with odd configurations load as transformers and llama.cpp read them, or are refused before weights are read."""
import json
import shutil

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from test_weights import copy_of, rewrite

from jaxrl_llm.models import Transformer, weights
from jaxrl_llm.models.check.gguf_files import write as write_gguf


def logits_of(directory, tokens):
    config, params = weights.load(directory)
    model = Transformer(config)
    states, _, _ = model.hidden_states(params, jnp.asarray(tokens), jnp.ones(np.shape(tokens), bool))
    return np.asarray(model.logits(params, states))


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


def test_adapters_give_the_logits_of_peft(pair, tmp_path):
    peft = pytest.importorskip("peft")
    write_adapter(tmp_path / "adapter", pair("llama").directory)
    base = transformers.AutoModelForCausalLM.from_pretrained(pair("llama").directory)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits_of(tmp_path / "adapter", TOKENS), theirs, atol=1e-4)


@pytest.mark.parametrize(("changes", "message"), [
    ({"use_dora": True}, "use_dora=True is not supported; supported: False"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*lm_head"), ({"bias": "all"}, "bias='all' is not supported"),
    ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; supported: 'LORA'"),
    ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
])
def test_adapters_that_do_more_are_refused(pair, tmp_path, changes, message):
    write_adapter(tmp_path / "adapter", pair("llama").directory, changes)
    with pytest.raises(ValueError, match=rf"adapter_config.json: {message}"):
        weights.load(tmp_path / "adapter")


def test_an_adapter_without_its_base_says_which_is_missing(tmp_path):
    write_adapter(tmp_path / "adapter", "Qwen/Qwen2.5-0.5B")
    with pytest.raises(FileNotFoundError, match="a PEFT adapter of the model .*, which is not on this machine"):
        weights.load(tmp_path / "adapter")
