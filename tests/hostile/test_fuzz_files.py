"""Damaged files of models: whatever a file says, it is read, or refused by one ValueError that names the file.

`JAXRL_LLM_FUZZ=300 python -m pytest tests/hostile/test_fuzz_files.py` tries so many times as many damages, see `fuzz.py`.
"""
import copy
import json
import random
import struct

import numpy as np
import pytest
from fuzz import SEED, TIMES
from model_files import FILES, write

from jaxrl_llm import tokenizers
from jaxrl_llm.models import families, weights
from jaxrl_llm.models.weights import config_checks
from jaxrl_llm.models.weights.config_json import config_from
from jaxrl_llm.tools import gguf_header

COUNT = 60 * TIMES
VALUES = [None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 10**30, -(10**400), 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"),
          "", "x", "a", "16", "silu", "full_attention", "\x00", "\ud800", "<end>", [], [0], [None], ["full_attention"] * 2,
          [[]], [1.0] * 2, {}, {"type": "x"}, {"factor": 2.0}, {"rope_type": "yarn", "factor": 0.5},
          {"rope_type": "llama3", "factor": 8},
          {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, {"content": "<end>"}, {"String": ""},
          {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_type": "linear", "factor": 2}}, "a" * 100_000,
          {"type": "Replace", "pattern": {"String": "a"}, "content": "aa" * 1000}, {"type": "Sequence", "normalizers": []},
          {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "a*"}, "content": "aa"}] * 30}]


def places(content, path=()):
    """All paths into a JSON value."""
    yield path
    for key, value in content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ():
        yield from places(value, (*path, key))


def damaged(rng, content, keys=()):
    """A copy in which one to three values are others, are gone, or have another key."""
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([*places(content)][1:] or [("x",)])
        if keys and rng.random() < 0.5:
            path = (rng.choice(keys),)
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        if rng.random() < 0.2 and (path[-1] in inner if isinstance(inner, dict) else True):
            del inner[path[-1]]
        else:
            inner[path[-1]] = copy.deepcopy(rng.choice(VALUES))
    return content


def cut(rng, data):
    """Bytes of which some are others, gone, or repeated."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 1, 4, 8, 100])
        data[at:at + rng.choice([0, length])] = rng.choice([b"", rng.randbytes(length), b"\xff" * length, bytes(length)])
    return bytes(data)


def refused(read, name):
    """Whether `read()` raises; fails for any error but a ValueError, or FileNotFoundError, that names the file."""
    try:
        read()
    except (ValueError, FileNotFoundError) as error:
        assert str(name) in str(error), f"{name} is missing from {error!r}"
        return True
    return False


def test_configs_of_all_families():
    rng, keys, count = random.Random(SEED), sorted(config_checks.KEYS), 0
    plain = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 32, "max_position_embeddings": 128, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
             "num_experts_per_tok": 2, "sliding_window": 8, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    names = sorted(families.families())
    for number in range(10 * COUNT):
        raw = damaged(rng, plain | {"model_type": names[number % len(names)]}, keys)
        count += refused(lambda raw=raw: config_from(raw, "/x/config.json"), "/x/config.json")
    assert COUNT < count < 10 * COUNT - 50


def test_checkpoints_with_damaged_configs(tmp_path):
    rng, folder, keys = random.Random(SEED), write(tmp_path / "model"), sorted(config_checks.KEYS)
    plain = json.loads((folder / "config.json").read_text())
    for number in range(COUNT):
        text = json.dumps(damaged(rng, plain, keys)) if number % 4 else cut(rng, json.dumps(plain).encode()).decode("latin-1")
        (folder / "config.json").write_text(text)
        refused(lambda: weights.opened(folder), folder)


@pytest.mark.parametrize("name", FILES)
def test_tokenizer_files(tmp_path, name):
    rng, folder, count = random.Random(SEED), write(tmp_path / "model"), 0
    texts = ["", "ab" * 20, "<end>a", "\x00é\ufdfa", "aaaa bbbb"]
    for number in range(COUNT):
        plain = json.dumps(FILES[name])
        text = json.dumps(damaged(rng, FILES[name])) if number % 4 else cut(rng, plain.encode()).decode("latin-1")
        (folder / name).write_text(text)

        def use():
            tokenizer = tokenizers.load(folder)
            for text in texts:
                assert len(tokenizer.encode(text)) < 10**6
            tokenizer.decode([0, 1, 2, 3])
            return tokenizer.control_tokens
        count += refused(use, folder)
    assert 0 < count


def test_headers_of_gguf_files(tmp_path):
    """Damages of a small file, and random bytes behind its first ones."""
    rng, path, written = random.Random(SEED), tmp_path / "x.gguf", tiny_gguf(tmp_path / "tiny.gguf")
    for read in (weights.opened, tokenizers.load):
        assert not refused(lambda read=read: read(tmp_path / "tiny.gguf"), "tiny.gguf")
    for number in range(COUNT):
        head = written[:rng.choice([4, 8, 24, 60])]
        path.write_bytes(cut(rng, written) if number % 3 else head + rng.randbytes(200))
        refused(lambda: gguf_header.reader(path), path)
        for read in (weights.opened, tokenizers.load):
            refused(lambda read=read: read(path), path)


def tiny_gguf(path):
    """The bytes of a Llama of one layer and four tokens, with its vocabulary."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    for key, value in dict(block_count=1, embedding_length=4, head_count=1, head_count_kv=1, feed_forward_length=4,
                           context_length=16, layer_norm_rms_eps=1e-5, rope_freq_base=1e4, tokenizer_model="gpt2",
                           tokenizer_pre="gpt-2", token_list=["a", "b", "ab", "<end>"], token_types=[1, 1, 1, 3],
                           token_merges=["a b"], eos_token_id=3).items():
        getattr(writer, f"add_{key}")(value)
    names = {"token_embd": (4, 4), "output_norm": (4,), "blk.0.attn_norm": (4,), "blk.0.ffn_norm": (4,)}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names |= {f"blk.0.{name}": (4, 4) for name in matrices}
    for name, shape in names.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert struct.unpack("<4sI", path.read_bytes()[:8]) == (b"GGUF", 3)
    return path.read_bytes()
