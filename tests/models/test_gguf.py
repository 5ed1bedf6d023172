"""GGUF files written here with the format's own conventions, and SmolLM2 as published, against transformers."""
import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from jaxrl_llm.models import RopeScaling, Transformer, weights
from jaxrl_llm.models.check import gguf_files

SMOLLM2 = Path(__file__).parents[2] / "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("llama", "llama_untied", "qwen2", "qwen3", "gemma3"))
def test_gguf_gives_the_model_that_safetensors_give(pair, tmp_path, name):
    config, params = weights.load(gguf_files.write(tmp_path / "tiny.gguf", pair(name).torch))
    expected = pair(name).model.config
    if name == "gemma3":  # this format does not store the scale: 1/sqrt(head_dim)
        expected = dataclasses.replace(expected, attention_scale=0.25)
    assert dataclasses.replace(config, norm_eps=expected.norm_eps) == expected
    np.testing.assert_allclose(config.norm_eps, expected.norm_eps, rtol=1e-6)  # stored in single precision
    assert jax.tree.structure(params) == jax.tree.structure(pair(name).params)
    tolerance = 2e-7 if name == "gemma3" else 0.0  # adding one to a norm rounds it
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=0), params, pair(name).params)


GEMMA3 = {"general.architecture": "gemma3", "gemma3.embedding_length": 32, "gemma3.block_count": 4,
          "gemma3.attention.head_count": 4, "gemma3.feed_forward_length": 48, "gemma3.context_length": 128,
          "gemma3.attention.layer_norm_rms_epsilon": 1e-6, "gemma3.attention.sliding_window": 8}


@pytest.mark.parametrize("pattern, local", [
    (2, (True, False, True, False)), ([True, True, False, False], (True, True, False, False)), (0, (False,) * 4),
    (None, (True,) * 4)])
def test_which_layers_of_gemma3_have_windows(pattern, local):
    metadata = GEMMA3 | ({} if pattern is None else {"gemma3.attention.sliding_window_pattern": pattern})
    config = weights.gguf.config_from(metadata, {"token_embd.weight": (64, 32)}, "x.gguf")
    assert config.local_layers == local and config.window == (8 if any(local) else None)


@pytest.mark.parametrize("keys, scaling", [
    ({"rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)), ({"rope.scale_linear": 2.0}, RopeScaling("linear", 2.0)),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None), ({}, None)])
def test_rope_scaling_keys(keys, scaling):
    metadata = GEMMA3 | {f"gemma3.{key}": value for key, value in keys.items()}
    assert weights.gguf.config_from(metadata, {"token_embd.weight": (64, 32)}, "x.gguf").rope_scaling == scaling


@pytest.mark.parametrize("key, value", [("attn_factor", 1.5), ("yarn_log_multiplier", 0.1), ("yarn_ext_factor", 0.5)])
def test_other_forms_of_yarn_are_refused(key, value):
    metadata = GEMMA3 | {"gemma3.rope.scaling.type": "yarn", "gemma3.rope.scaling.factor": 4.0}
    shapes = {"token_embd.weight": (64, 32)}
    assert weights.gguf.config_from(metadata, shapes, "x.gguf").rope_scaling.kind == "yarn"
    with pytest.raises(ValueError, match=f"x.gguf: gemma3.rope.scaling.{key}={value} is not supported; supported: "):
        weights.gguf.config_from(metadata | {f"gemma3.rope.scaling.{key}": value}, shapes, "x.gguf")


def test_half_precision_tensors_become_float32(pair, tmp_path):
    values = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, pair("llama").torch, tensors={"token_embd.weight": values.astype(np.float16)})
    _, params = weights.load(path)
    assert params["embed"].dtype == jnp.float32
    np.testing.assert_array_equal(params["embed"], values.astype(np.float16).astype(np.float32))


def test_llama3_scaling_is_recovered_from_its_divisors(pair, tmp_path):
    theta, factor = 5e5, 32.0
    waves = 2 * np.pi / theta ** -(np.arange(0, 8, 2) / 8)
    ramp = (8192 / waves - 1) / 3
    divisors = np.where(waves < 8192 / 4, 1.0, np.where(waves > 8192, factor, 1 / ((1 - ramp) / factor + ramp)))
    assert divisors[1] == 1.0 < divisors[2] < divisors[3] == 32.0
    path, rope = tmp_path / "tiny.gguf", dict(rope_type="default", rope_theta=theta)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **pair("llama").torch.config.to_diff_dict() | {"rope_parameters": rope}))
    gguf_files.write(path, reference, tensors={"rope_freqs.weight": divisors.astype(np.float32)})
    config, _ = weights.load(path)
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192) and config.rope_theta == theta
    for wrong in ([1, 2, 3, 4], [1, 1, 32]):
        gguf_files.write(path, reference, tensors={"rope_freqs.weight": np.array(wrong, np.float32)})
        with pytest.raises(ValueError, match="'rope_freqs.weight' in .* is not the frequency scaling of Llama 3.1"):
            weights.load(path)


@pytest.mark.parametrize("change, message", [
    (dict(metadata={"llama.rope.scaling.type": "su"}), "llama.rope.scaling.type='su' is not supported; supported: 'none'"),
    (dict(metadata={"llama.rope.scaling.type": "yarn"}), "metadata key 'llama.rope.scaling.factor' is missing"),
    (dict(metadata={"llama.rope.dimension_count": 4}), "llama.rope.dimension_count=4 is not supported"),
    (dict(skip=["blk.1.ffn_up.weight"]),
     "tensor 'blk.1.ffn_up.weight' is missing from .*tiny.gguf, which holds 28 tensors"),
    (dict(skip=["token_embd.weight"]),
     "tensor 'token_embd.weight' is missing from .*tiny.gguf, which holds 28 tensors"),
    (dict(tensors={"blk.0.attn_q.weight": np.zeros((16, 32), np.float32)}),
     r"'blk.0.attn_q.weight' in .*tiny.gguf: expected shape \(32, 32\), found \(16, 32\)"),
    (dict(tensors={"blk.0.attn_q_norm.weight": np.zeros(8, np.float32)}),
     r"holds 1 tensors that this architecture does not read \(blk.0.attn_q_norm.weight\)"),
    (dict(tensors={"blk.0.attn_q.bias": np.zeros(32, np.float32)}),
     "tensor 'blk.0.attn_k.bias' is missing from .*tiny.gguf|tensor 'blk.0.attn_output.bias' is missing"),
])
def test_unsupported_or_wrong_files_are_refused(pair, tmp_path, change, message):
    path = gguf_files.write(tmp_path / "tiny.gguf", pair("llama").torch, **change)
    with pytest.raises(ValueError, match=message):
        weights.load(path)


def test_other_refusals_from_metadata():
    with pytest.raises(ValueError, match="architecture 'mamba' is not supported; supported: gemma2, gemma3"):
        weights.gguf.config_from({"general.architecture": "mamba"}, {}, "x.gguf")
    some = {"general.architecture": "llama", "llama.embedding_length": 32, "llama.block_count": 1}
    shapes = {"token_embd.weight": (64, 32)}
    with pytest.raises(ValueError, match="x.gguf: metadata key 'llama.attention.head_count' is missing"):
        weights.gguf.config_from(some, shapes, "x.gguf")
    with pytest.raises(ValueError, match="'llama.attention.head_count' differs between layers"):
        weights.gguf.config_from(some | {"llama.attention.head_count": [4, 2]}, shapes, "x.gguf")


@pytest.mark.parametrize("keep", (0.9, 0.001))
def test_cut_files_are_refused(pair, tmp_path, keep):
    path = gguf_files.write(tmp_path / "tiny.gguf", pair("llama").torch)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ValueError, match=r"tiny.gguf is not a readable GGUF file of \d+ bytes"):
        weights.load(path)
    path.write_bytes(b"not gguf" * 100)
    with pytest.raises(ValueError, match="not a readable GGUF file of 800 bytes"):
        weights.load(path)


def torch_row(tokens, mask):
    """Arguments of a transformers model for padded rows."""
    mask = torch.tensor(mask)
    return dict(input_ids=torch.tensor(tokens), attention_mask=mask.long(),
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0))


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="models/smollm2 is absent; scripts/get_smollm2.sh fetches it")
def test_smollm2_equals_transformers():
    """In a process of its own: two copies of the model beside other tests' compiled programs take too much memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(compare_smollm2).result()


def compare_smollm2():
    """The published model: logits of padded rows, and 64 greedy tokens of an answer."""
    config, params = weights.load(SMOLLM2)
    model = Transformer(config)
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)).float().eval()
    reference.load_state_dict(load_gguf_checkpoint(SMOLLM2, return_tensors=True, model_to_load=reference)["tensors"],
                              strict=False)  # the tied unembedding is not stored
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    rows = [tokenizer(chat.format(q))["input_ids"] for q in ("What is the capital of France?", "12 + 7 =")]
    N = max(map(len, rows))
    mask = np.array([[False] * (N - len(row)) + [True] * len(row) for row in rows])
    tokens = np.array([[2] * (N - len(row)) + row for row in rows])
    with torch.no_grad():
        expected = reference(**torch_row(tokens, mask)).logits.numpy()[mask]
    logits = jax.jit(lambda p, *row: model.logits(p, model.hidden_states(p, *row)[0]))(params, tokens, mask)
    np.testing.assert_allclose(np.asarray(logits)[mask], expected, atol=1e-4 * np.abs(expected).max(), rtol=0)

    @jax.jit
    def greedy(params):
        prompt, state = model.prefill(params, jnp.asarray(tokens), jnp.asarray(mask))
        layers = model.unstack_layers(params)

        def step(carry, t):
            cache, state = carry
            chosen = jnp.argmax(model.logits(params, state), -1)
            state, cache = model.decode_step(params, layers, chosen, t, prompt, cache)
            return (cache, state), chosen[:, 0]

        return jax.lax.scan(step, (model.empty_completions(prompt, 1, 64), state[:, None]), jnp.arange(64))[1].T

    answers = np.asarray(greedy(params))
    rows, rows_mask = np.concatenate([tokens, answers], 1), np.pad(mask, ((0, 0), (0, 64)), constant_values=True)
    with torch.no_grad():  # each token is transformers' greedy choice after those before it: so is the whole
        choices = reference(**torch_row(rows, rows_mask)).logits.argmax(-1).numpy()
    np.testing.assert_array_equal(answers, choices[:, N - 1:-1])
    assert tokenizer.decode(answers[0]).startswith("The capital of France is Paris.")
