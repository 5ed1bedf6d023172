"""Published models in a run: vocabularies larger than the embedding, prompts, the longest sequence, exported tokenizers."""
import json

import jax
import pytest
import tokenizers as hugging_face

from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.models import ModelConfig, Transformer, weights
from jaxrl_llm.setup import setup, start
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tokenizers import ByteTokenizer


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A tiny Gemma of 259 rows; its tokenizer has one token more, as the text models of that family have."""
    directory = tmp_path_factory.mktemp("gemma")
    config = ModelConfig(vocab_size=259, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=16,
                         max_positions=64, activation="gelu_tanh", norm_offset=1.0, post_norms=True, qk_norm=True,
                         embedding_scale=4.0, norm_eps=1e-6, window=8, local_layers=(True,), family="gemma3_text")
    weights.save_hf(directory, config, jax.device_get(Transformer(config).init(jax.random.key(0))))
    ByteTokenizer("{{ messages[0].content }}").save(directory)
    backend = hugging_face.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<image_soft_token>"])
    backend.save(str(directory / "tokenizer.json"))
    return directory


def config_of(directory, **changes):
    config = default_config()
    config.update_from_flattened_dict({"model.path": str(directory), "task": "arithmetic(level=digit)"} | changes)
    return config


def problems(path, prompt):
    rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(20)] + [{"prompt": prompt, "answer": "5"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl(path='{path}')"


def test_a_vocabulary_with_a_token_that_the_model_does_not_embed(gemma, tmp_path):
    run, params = setup.build(config_of(gemma))
    assert params["embed"].shape == (259, 16) and run.source.stream.tokenizer.vocab_size == 259
    assert run.source.stream.tokenizer.encode("7+5=") == [*b"7+5="] and run.source.stream.prompt_tokens == 8
    task = problems(tmp_path / "image.jsonl", "what is <image_soft_token>?")
    with pytest.raises(ValueError, match="prompt 1?[0-9]+: the text holds '<image_soft_token>', token 259, but the model"):
        setup.build(config_of(gemma, task=task))


def test_the_tokenizer_of_another_model_is_refused(gemma, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    backend = hugging_face.Tokenizer.from_file(str(gemma / "tokenizer.json"))
    backend.add_special_tokens(["<end>"])
    backend.save(str(other / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"model embeds 259 tokens, .* ids \[260\]; use the tokenizer that the model"):
        setup.build(config_of(gemma, **{"model.tokenizer": str(other)}))


def test_sequences_longer_than_the_model_was_made_for(gemma):
    assert setup.build(config_of(gemma, **{"sampling.max_tokens": 56}))[0].source.stream.prompt_tokens == 8
    for changes in ({"sampling.max_tokens": 57}, {"sampling.max_tokens": 32, "prompts.max_tokens": 33}):
        with pytest.raises(ValueError, match=r"make 65, but the model was made for 64; lower sampling.max_tokens"):
            setup.build(config_of(gemma, **changes))


def test_where_the_tokenizer_files_of_an_export_come_from(gemma, tmp_path):
    def source(path="", tokenizer=""):
        return start.tokenizer_source(config_of(path, **{"model.tokenizer": str(tokenizer)}).model)
    assert source(gemma) == source("", gemma) == source("", gemma / "tokenizer.json") == gemma
    assert source() is source("", "bytes") is source(gemma, "bytes") is None  # written by the tokenizer itself
    (tmp_path / "m.gguf").write_bytes(b"")
    assert source(tmp_path / "m.gguf") is source(tmp_path) is source(gemma, tmp_path / "m.gguf") is None


def test_sampling_that_cannot_work_is_refused_before_it_compiles(gemma):
    run, params = setup.build(config_of(gemma))
    with pytest.raises(ValueError, match="temperature=-1.0; give 0 or more"):
        run.source.stream.publish(Snapshot(0, params, None, jax.random.key(0), {"temperature": -1.0}))
    run.source.stream.publish(Snapshot(0, params, None, jax.random.key(0), {"temperature": 0.0}))
