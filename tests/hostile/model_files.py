"""A tiny checkpoint with its tokenizer, written without a model in PyTorch, for attacks on its files."""
import dataclasses
import json

import jax
import numpy as np

from jaxrl_llm.models import ModelConfig, Transformer, weights

CONFIG = ModelConfig(vocab_size=64, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, mlp_size=12)
TOKENIZER = {
    "version": "1.0", "added_tokens": [{"id": 3, "content": "<end>", "special": True, "single_word": False, "lstrip": False,
                                        "rstrip": False, "normalized": False}],
    "normalizer": {"type": "NFC"}, "pre_tokenizer": None, "decoder": {"type": "Fuse"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}
TOKENIZER_CONFIG = {"eos_token": "<end>", "pad_token": {"content": "<end>"}, "chat_template": "{{ messages }}",
                    "added_tokens_decoder": {"3": {"content": "<end>", "special": True}}, "add_bos_token": False}
GENERATION = {"eos_token_id": [3], "temperature": 0.6}
FILES = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG, "generation_config.json": GENERATION,
         "special_tokens_map.json": {"eos_token": "<end>"}, "added_tokens.json": {"<end>": 3}}


def write(directory, **changes):
    """The checkpoint; `changes` are those of the architecture."""
    config = dataclasses.replace(CONFIG, **changes)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, np.float32), Transformer(config).abstract_params())
    weights.save_hf(directory, config, params)
    for name, content in FILES.items():
        (directory / name).write_text(json.dumps(content))
    return directory
