"""Every family against transformers, a row of `models.check.tiny` each; all features at once, and off; refusals."""
import dataclasses
import functools
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from jaxrl_llm.engines.sampler import generate, row_keys
from jaxrl_llm.engines.sampling import Sampling
from jaxrl_llm.models import ModelConfig, RopeScaling, Transformer, families, lora, weights
from jaxrl_llm.models.check import __main__ as check_command
from jaxrl_llm.models.check import comparisons, gguf_files, tiny
from jaxrl_llm.models.weights import layout
from jaxrl_llm.models.weights.config_json import config_from
from jaxrl_llm.parallel.rules import path_name, spec_of
from jaxrl_llm.planning import plan

PAGE = Path(__file__).parents[2] / "docs/guides/model.md"
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what takes time


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(name)`: the model in transformers, and as loaded from the directory in which it was saved."""

    @functools.cache
    def make(name):
        directory = tmp_path_factory.mktemp(name)
        theirs = tiny.make(name, directory)
        config, params = weights.load(directory)
        return theirs, comparisons.LoadedCheckpoint(directory, Transformer(config), params, comparisons.torch_logits(theirs))

    return make


def pulls(shape):
    """Weights that differ between all tokens."""
    return np.sin(1.0 + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)




def torch_update(theirs, prompt_tokens, prompt_mask, tokens):
    """Log-probs of completions in plain rows, and the gradient of their weighted sum by name of the parameter."""
    rows, mask = map(torch.tensor, comparisons.as_rows(prompt_tokens, prompt_mask, tokens))
    logits = theirs(rows, attention_mask=mask.long(), position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    logprobs = logits.log_softmax(-1)[:, prompt_tokens.shape[1] - 1:-1].gather(
        -1, torch.tensor(tokens).reshape(len(rows), -1, 1))[..., 0].reshape(tokens.shape)
    theirs.zero_grad()
    (logprobs * torch.tensor(pulls(tokens.shape))).sum().backward()
    result = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    if theirs.config.model_type in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"):  # one parameter for all experts of a layer
        result = revert_weight_conversion(theirs, result)
    return logprobs.detach().numpy(), {name.replace("model.language_model.", "model."): gradient.numpy()
                                       for name, gradient in result.items()}


@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_logits_export_and_gguf_equal_transformers(checkpoint, name, tmp_path):
    theirs, ours = checkpoint(name)
    tokens, mask = comparisons.padded_rows(64)
    expected = ours.reference(tokens, mask)
    assert np.abs(expected[mask]).max() > 1.0 and np.unique(expected[mask].argmax(-1)).size > 5  # they distinguish models
    result = np.asarray(comparisons.plain_logits(ours.model, ours.params, tokens, mask))
    assert comparisons.difference(result[mask], expected[mask]) < 1e-4
    assert comparisons.export_difference(ours) == "equal"
    assert plan.parameters(ours.model.config) == sum(p.numel() for key, p in theirs.named_parameters() if "visual" not in key)
    if tiny.CHECKPOINTS[name].family.gguf is not None and tiny.CHECKPOINTS[name].gguf:
        config, params = weights.load(gguf_files.write(tmp_path / "model.gguf", theirs))
        assert jax.tree.structure(params) == jax.tree.structure(ours.params)
        assert max(jax.tree.leaves(jax.tree.map(comparisons.difference, params, ours.params))) < 1e-6  # norms less one
        assert_same_config(config, ours.model.config)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_decoding_and_the_update_with_its_gradient_equal_transformers(checkpoint, name):
    theirs, ours = checkpoint(name)
    assert comparisons.greedy_agreement(ours) == (128, 128)
    batch = comparisons.groups(64)

    def loss(params):
        logprobs = comparisons.packed_logprobs(ours.model, params, *batch)
        return (logprobs * pulls(batch[2].shape)).sum(), logprobs

    (_, logprobs), gradient = jit(jax.value_and_grad(loss, has_aux=True))(ours.params)
    expected, gradients = torch_update(theirs, *batch)
    assert comparisons.difference(logprobs, expected) < 1e-4
    def read(place, index):
        return place.hf.read(gradients[place.hf.name], place.shape[0], index)
    expected = layout.assemble(ours.model.config, read, jnp.float32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        assert np.abs(leaf).max() > 0, path
    assert max(jax.tree.leaves(jax.tree.map(comparisons.difference, gradient, expected))) < 1e-4


@pytest.mark.parametrize("name", ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3_longrope"))
def test_transformers_reads_the_same_weights_from_the_gguf_files(checkpoint, name, tmp_path):
    """`check.gguf_files` writes the published format, and not only one that this library reads."""
    theirs, ours = checkpoint(name)
    gguf_files.write(tmp_path / "model.gguf", theirs)
    again = type(theirs).from_pretrained(tmp_path, gguf_file="model.gguf", config=theirs.config, dtype="float32").eval()
    tokens, mask = comparisons.padded_rows(64)
    np.testing.assert_array_equal(comparisons.torch_logits(again)(tokens[:1], mask[:1]), ours.reference(tokens[:1], mask[:1]))


def assert_same_config(result: ModelConfig, expected: ModelConfig):
    """Equal but for numbers that one format keeps in single precision."""
    differ = {field.name for field in dataclasses.fields(ModelConfig)
              if getattr(result, field.name) != getattr(expected, field.name)}
    for name in differ:
        a, b = (jax.tree.leaves(dataclasses.asdict(x)[name]) for x in (result, expected))
        assert len(a) == len(b) and all(x == y or isinstance(x, float) and np.isclose(x, y, rtol=1e-6)
                                        for x, y in zip(a, b)), (name, a, b)


def test_every_family_has_a_sample_and_every_sample_a_row_in_the_guide():
    assert {checkpoint.family.name for checkpoint in tiny.CHECKPOINTS.values()} == set(families.families())
    table = PAGE.read_text().split("<!-- parity")[1].split("<!-- end of parity")[0].splitlines()[3:]
    assert [row.split(" | ")[:2] for row in table] == [
        [f"| {checkpoint.title}", f"`{checkpoint.model_type}`"] for checkpoint in tiny.CHECKPOINTS.values()]


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["check", *map(str, arguments)])
    check_command.main()


@pytest.mark.slow
def test_the_command_compares_a_directory(checkpoint, tmp_path, monkeypatch, capsys):
    directory = shutil.copytree(checkpoint("llama")[1].directory, tmp_path / "mine")
    command(monkeypatch, directory)
    *cells, last = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert cells[:2] == ["mine", "`llama`"] and cells[4] == "128 of 128" and cells[6] == "equal" and last == "–"
    assert all(cell.startswith("< 1e-") and int(cell[5:]) >= 5 for cell in (cells[2], cells[3], cells[5]))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] += 1.0  # of the directory, and so of both sides
    gguf_files.write(directory / "other.gguf", checkpoint("llama")[0])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    monkeypatch.setitem(sys.modules, "transformers", None)  # not installed: the plain path is what others are compared with
    command(monkeypatch, directory)
    cells = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert cells[2:5] == ["equal", "equal", "128 of 128"] and cells[6] == "equal"
    assert cells[7] in ("< 1e0", "< 1e1")  # the GGUF file beside it is of the model before the change


def test_the_command_refuses_in_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    with pytest.raises(SystemExit):
        command(monkeypatch, tmp_path)
    assert "refused: " in (error := capsys.readouterr().err) and "'qwen3_next' is not supported (its layers" in error
    for arguments in ((), (tmp_path, "--all"), (tmp_path, "--write=x.md"), (tmp_path / "nowhere",)):
        with pytest.raises(SystemExit):
            command(monkeypatch, *arguments)


@pytest.mark.parametrize("name", families.families())
def test_an_empty_config_means_the_defaults_of_transformers(name):
    if name == "qwen2_5_vl_text":
        theirs = transformers.Qwen2_5_VLConfig().text_config
    else:
        theirs = transformers.AutoConfig.for_model(name)
    assert config_from({"model_type": name}) == config_from(theirs.to_dict())


# --- all features at once ---------------------------------------------------------------------------------------------

YARN = RopeScaling("yarn", 4.0, 1.0, 32.0, 32, attention_factor=1.1)
EVERYTHING = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=48, max_positions=64,
    pre_norms=False, post_norms=True, qk_norm=True, qk_norm_whole=True, qkv_bias=True, o_bias=True, mlp_bias=True,
    tie_embeddings=False, embedding_scale=3.0, residual_scale=0.6, attention_softcap=1.5, logit_softcap=2.0, logit_divisor=1.5,
    rope_scaling=YARN, rope_local_theta=100.0, rotary_factor=0.75, window=4, local_layers=(True, False, True),
    rotary_layers=(True, True, False))


@functools.cache
def everything():
    model = Transformer(EVERYTHING)
    shapes, keys = model.abstract_params(), iter(jax.random.split(jax.random.key(1), 40))
    return model, jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.4, shapes)


def plain_logprobs(model, params, prompt_tokens, prompt_mask, tokens):
    """Log-probs without packing, caches, chunks and their hand-written gradients: `jax.grad` derives it all."""
    rows, mask = comparisons.as_rows(prompt_tokens, prompt_mask, tokens)
    logits = model.logits(params, model.hidden_states(params, rows, mask)[0])[:, prompt_tokens.shape[1] - 1:-1]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens.reshape(len(rows), -1, 1), axis=-1)
    return chosen.reshape(tokens.shape)


@pytest.mark.slow
def test_all_features_hold_in_unpadded_updates_with_their_gradient():
    model, params = everything()
    prompts, prompt_mask, tokens = comparisons.groups(64)
    mask = np.arange(7) < np.array([[3, 2, 1], [4, 3, 2]])[..., None]
    assert mask.sum() <= 0.75 * mask.size

    def unpadded(params):
        states, _ = model.packed_states(params, prompts, prompt_mask, tokens, mask=mask, filled=3)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(model.logits(params, states)), tokens[..., None], -1)[..., 0]
        return jnp.where(mask, logprobs * pulls(tokens.shape), 0.0).sum()

    def plain(params):
        return jnp.where(mask, plain_logprobs(model, params, prompts, prompt_mask, tokens) * pulls(tokens.shape), 0.0).sum()

    result, expected = jit(lambda p: (jax.grad(unpadded)(p), jax.grad(plain)(p)))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        assert np.abs(leaf).max() > 0, path
    assert max(jax.tree.leaves(jax.tree.map(comparisons.difference, result, expected))) < 1e-5


@pytest.mark.slow
def test_sampled_logprobs_with_all_features_are_those_of_the_update():
    model, params = everything()
    prompts, prompt_mask, _ = comparisons.groups(64)
    keys = row_keys(jax.random.key(0), jnp.arange(6).reshape(2, 3))
    drawn = generate(model, params, prompts, prompt_mask, keys, Sampling(), max_tokens=20, stop_ids=())
    expected = jit(functools.partial(comparisons.packed_logprobs, model))(params, prompts, prompt_mask, drawn.tokens)
    np.testing.assert_allclose(drawn.logprobs, expected, atol=1e-5)
    assert np.unique(drawn.tokens).size > 10


@pytest.mark.slow
def test_adapters_beside_biases_are_the_merged_model():
    model, params = everything()
    batch, adapters = comparisons.groups(64), lora.init(jax.random.key(2), params, rank=2, alpha=4.0)
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    run = jit(lambda params, adapters: comparisons.packed_logprobs(model, params, *batch, lora=adapters))
    beside, merged = run(params, adapters), run(lora.merge(params, adapters), None)
    assert comparisons.difference(beside, merged) < 1e-5
    assert comparisons.difference(beside, run(params, None)) > 1e-2


def test_every_matrix_and_its_bias_are_spread_over_the_mesh():
    sizes, leaves = {"data": 1, "fsdp": 2, "tensor": 2}, jax.tree.leaves_with_path(Transformer(EVERYTHING).abstract_params())
    whole = {path_name(path) for path, leaf in leaves if not any(spec_of(path_name(path), leaf.shape, sizes))}
    assert whole == {"final_norm/scale", "layers/attention_post_norm/scale", "layers/mlp_post_norm/scale",
                     "layers/q_norm/scale", "layers/k_norm/scale", "layers/o/bias", "layers/down/bias"}


@pytest.mark.slow
def test_features_that_are_off_leave_no_trace():
    plain = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48)
    batch = comparisons.groups(64)

    def program(config):
        model = Transformer(config)
        return str(jax.make_jaxpr(jax.grad(lambda p: comparisons.packed_logprobs(model, p, *batch).sum()))(
            model.abstract_params()))

    assert "tanh" not in program(plain)
    assert program(dataclasses.replace(plain, attention_softcap=3.0)).count("tanh") > 0
    for off in (dict(residual_scale=1.0), dict(logit_divisor=1.0), dict(rotary_layers=(True, True)), dict(rotary_factor=1.0),
                dict(rope_local_theta=1e6)):
        assert program(dataclasses.replace(plain, **off)) == program(plain)


# --- rope scalings that depend on the length ---------------------------------------------------------------------------


@pytest.mark.parametrize("name, most", [("llama_dynamic", 128), ("phi3_longrope", 96), ("ministral3", 96)])
def test_rows_beyond_the_original_length_are_refused(checkpoint, name, most):
    model, params = checkpoint(name)[1].model, checkpoint(name)[1].params
    tokens, mask = np.ones((1, most), int), np.ones((1, most), bool)
    jax.eval_shape(model.hidden_states, params, tokens, mask)
    message = rf"a sequence of {most + 1} tokens: .* beyond {most}, .* prompts.max_tokens \+ sampling.max_tokens <= {most}"
    one = np.ones((1, 1), int)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.hidden_states, params, np.pad(tokens, ((0, 0), (0, 1))), np.pad(mask, ((0, 0), (0, 1))))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.packed_states, params, tokens, mask, one[None])
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: model.empty_completions(model.prefill(p, tokens, mask)[0], 1, 1), params)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ("qwen3_next", "qwen3_5", "qwen3_5_moe", "falcon_h1", "bamba"))
def test_hybrids_are_refused_with_the_reason(model_type):
    with pytest.raises(ValueError, match=f"model_type '{model_type}' is not supported .*linear attention or a state space"):
        config_from({"model_type": model_type})
    with pytest.raises(ValueError, match="architecture 'qwen3next' is not supported .*linear attention"):
        families.of_gguf({"general.architecture": "qwen3next"}, "x.gguf")


def test_mistral_with_windows_in_some_layers_is_refused():
    kinds = ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer_types full_attention not supported for mistral; supported: sliding_attention"):
        config_from({"model_type": "mistral", "num_hidden_layers": 2, "layer_types": kinds})
    assert config_from({"model_type": "mistral", "sliding_window": None}).window is None
    assert config_from({"model_type": "mistral"}).window == 4096


def test_text_models_inside_multimodal_ones():
    text = {"model_type": "mistral", "sliding_window": None, "hidden_size": 5120}
    config = config_from({"model_type": "mistral3", "text_config": text, "vision_config": {}})
    assert config.family == "mistral" and config.hidden_size == 5120
    for outer, inner, tied in ((True, False, True), (False, True, True), (False, False, False)):
        text = {"model_type": "gemma3_text", "tie_word_embeddings": inner}
        whole = {"model_type": "gemma3", "tie_word_embeddings": outer, "text_config": text}
        assert config_from(whole).tie_embeddings == tied
    assert config_from({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}).tie_embeddings
    flat = {"model_type": "qwen2_5_vl", "hidden_size": 2048, "num_attention_heads": 16, "tie_word_embeddings": True,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    config = config_from(flat)
    assert config.family == "qwen2" and config.rope_scaling is None and config.tie_embeddings and config.head_dim == 128


def test_gemma2_takes_its_scale_and_caps_from_the_config():
    config = config_from({"model_type": "gemma2", "query_pre_attn_scalar": 144, "attn_logit_softcapping": None})
    assert config.attention_scale == 1 / 12 and config.attention_softcap is None and config.logit_softcap == 30.0
