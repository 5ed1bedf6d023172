"""Where an exported model ends a completion, as transformers reads it."""
import json

import jax
import numpy as np
import pytest
from transformers import GenerationConfig

from jaxrl_llm import tokenizers
from jaxrl_llm.models import ModelConfig, Transformer, weights

CONFIG = ModelConfig(vocab_size=300, hidden_size=4, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, mlp_size=4)
CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("own", [{}, {"config": {"eos_token_id": 256}, "generation_config": {"eos_token_id": 256, "top_p": 0.9}}])
def test_all_ends_of_the_policy_are_written(tmp_path, own):
    """`<|endoftext|>` by the files, `<|im_end|>` by the chat template; also from a folder of tokenizer files alone."""
    from tokenizers import Tokenizer, models

    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    backend = Tokenizer(models.BPE(vocab={chr(i): i for i in range(256)}, merges=[]))
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": CHATML}))
    for name, content in own.items():
        (source / f"{name}.json").write_text(json.dumps(content))
    tokenizer = tokenizers.load(source)
    assert tokenizer.stop_ids == (256, 258)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), Transformer(CONFIG).abstract_params())
    for _ in range(2):  # a second export replaces the first
        weights.save_hf(out, CONFIG, params, source, stop_ids=tokenizer.stop_ids)
        assert GenerationConfig.from_pretrained(out).eos_token_id == [256, 258]
        assert GenerationConfig.from_pretrained(out).top_p == own.get("generation_config", {}).get("top_p")
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == [256, 258]
        assert tokenizers.load(out).stop_ids == (256, 258)


def test_a_secret_that_a_tokenizer_file_links_to_is_not_copied(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "source" / "tokenizer.txt").symlink_to(tmp_path / "secret")
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), Transformer(CONFIG).abstract_params())
    with pytest.raises(ValueError, match="tokenizer.txt lies outside of its folder"):
        weights.save_hf(tmp_path / "out", CONFIG, params, tmp_path / "source")
