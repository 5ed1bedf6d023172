"""Vocabularies inside GGUF files against sentencepiece, transformers and a plain BPE."""
import json

import numpy as np
import pytest
from tokenizer_cases import CHATML, MESSAGES, SAMPLES, SPECIALS, byte_level_gguf, llama_gguf, plain_bpe, smollm_cut, write_gguf

from jaxrl_llm.tokenizers import load


def random_texts():
    letters = list("thenmrs  <k>aé🙂\n12")
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(letters, size=20)) for _ in range(200)]


def test_gguf_llama_equals_the_sentencepiece_model_it_came_from(tmp_path, sentencepiece_models):
    model = sentencepiece_models / "bpe.model"
    ours, original = load(llama_gguf(tmp_path / "m.gguf", model)), load(model)
    assert (ours.eos_id, ours.bos_id, ours.pad_id, ours.vocab_size) == (2, 1, 3, original.vocab_size)
    for text in [*SAMPLES, *random_texts(), "def f():\n        <think>x"]:
        ids = original.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == original.decode(ids) == text.replace("<s>", ""), text


@pytest.mark.parametrize("named", [{}, {"unk_token_id": 0}])
def test_gguf_llama_finds_the_unknown_piece_that_a_converter_called_control(tmp_path, sentencepiece_models, named):
    model = sentencepiece_models / "bpe.model"
    ours = load(llama_gguf(tmp_path / "m.gguf", model, unknown_kind=3, **named))
    assert ours.encode("the ☃ theme") == load(model).encode("the ☃ theme")


def test_gguf_llama_reads_scores_and_space_prefix(tmp_path, sentencepiece_models):
    model = sentencepiece_models / "bpe.model"
    original = load(model)
    reversed_scores = load(llama_gguf(tmp_path / "r.gguf", model, scores=lambda sp: [float(i) for i in range(len(sp))]))
    assert any(reversed_scores.encode(text) != original.encode(text) for text in random_texts())
    bare = load(llama_gguf(tmp_path / "b.gguf", model, space_prefix=False))
    first = original.encode("the")[0]
    assert original._codec.token(first).startswith("▁") and not bare._codec.token(bare.encode("the")[0]).startswith("▁")
    assert bare.decode(bare.encode(" the")) == " the"


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_gguf_byte_level_equals_transformers(tmp_path, backend, pre):
    from transformers import AutoTokenizer

    path = byte_level_gguf(tmp_path / "m.gguf", backend, pre, bos_token_id=1, chat_template=CHATML)
    ours, theirs = load(path), AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    for text in SAMPLES:
        if pre == "qwen2":  # Qwen's tokenizer composes characters (NFC); the library's reading of a GGUF does not
            text = text.replace("e\u0301", "é")
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special=False) == text
    assert ours.render_chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )


def test_gguf_pre_tokenizers_differ_where_they_should(tmp_path, backend):
    pieces = {}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        cut = load(byte_level_gguf(tmp_path / f"{pre}.gguf", backend, pre))._codec._backend.pre_tokenizer
        pieces[pre] = [piece for piece, _ in cut.pre_tokenize_str("I'LL 1234\n\n  .x")]
    assert pieces["gpt-2"] == ["I", "'", "LL", "Ġ1234", "ĊĊĠ", "Ġ.", "x"]
    assert pieces["smollm"] == ["I", "'", "LL", "Ġ", "1", "2", "3", "4", "ĊĊĠ", "Ġ.", "x"]
    assert pieces["qwen2"] == ["I", "'LL", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġ", "Ġ.", "x"]
    assert pieces["llama-bpe"] == ["I", "'LL", "Ġ", "123", "4", "ĊĊ", "Ġ", "Ġ.", "x"]


def test_gguf_smollm_equals_plain_bpe(tmp_path, backend):
    path = byte_level_gguf(tmp_path / "m.gguf", backend, "smollm")
    model = json.loads(backend.to_str())["model"]
    for text in SAMPLES:
        expected = plain_bpe(text, backend.get_vocab(), model["merges"], [*SPECIALS, "<think>"], smollm_cut)
        assert load(path).encode(text) == expected, text


def test_gguf_qwen_composes_and_llama_takes_whole_words_first(tmp_path):
    tokens = ["a", "b", "<eos>", "ab", "Ã", "©", "e", "Ì", "ģ", "aa"]  # é is C3 A9; e and U+0301 is 65 CC 81
    common = {"model": "gpt2", "tokens": tokens, "types": [1, 1, 3, 1, 1, 1, 1, 1, 1, 1], "merges": ["a a"]}
    qwen = load(write_gguf(tmp_path / "q.gguf", pre="qwen2", **common))
    llama = load(write_gguf(tmp_path / "l.gguf", pre="llama-bpe", **common))
    assert qwen.encode("ab") == [0, 1] and llama.encode("ab") == [3]
    assert qwen.encode("e\u0301") == [4, 5] and llama.encode("e\u0301") == [6, 7, 8]


def test_gguf_stop_ids(tmp_path, backend):
    plain = load(byte_level_gguf(tmp_path / "p.gguf", backend, "gpt-2", eos=0))
    assert plain.stop_ids == (0,) and plain.pad_id == 0 and plain.bos_id is None
    tokenizer = load(byte_level_gguf(tmp_path / "t.gguf", backend, "gpt-2", eos=0, eot_token_id=2, eom_token_id=1))
    assert tokenizer.stop_ids == (0, 2, 1)
    assert load(byte_level_gguf(tmp_path / "c.gguf", backend, "gpt-2", eos=0, chat_template=CHATML)).stop_ids == (0, 2)


def test_gguf_errors(tmp_path, backend):
    with pytest.raises(ValueError, match="pre-tokenizer 'llama-bp'.*nearest is 'llama-bpe'"):
        load(byte_level_gguf(tmp_path / "a.gguf", backend, "llama-bp"))
    with pytest.raises(ValueError, match="pre-tokenizer None; those known"):
        load(byte_level_gguf(tmp_path / "b.gguf", backend, None))
    with pytest.raises(ValueError, match=r"kind 't5'; those read here are \['gpt2', 'llama'\]"):
        load(write_gguf(tmp_path / "c.gguf", "t5", ["a", "b", "c"], [1, 1, 3]))
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        load(byte_level_gguf(tmp_path / "d.gguf", backend, "gpt-2", eos=None))
    with pytest.raises(ValueError, match="f.gguf has no tokenizer.ggml.merges"):
        load(write_gguf(tmp_path / "f.gguf", "gpt2", ["a", "b", "c"], [1, 1, 3], "gpt-2"))
    with pytest.raises(ValueError, match="e.gguf names no unknown piece"):
        load(write_gguf(tmp_path / "e.gguf", "llama", ["a", "b", "c"], [1, 1, 3], scores=[0.0, -1.0, 0.0]))


def test_several_chat_templates(tmp_path, backend):
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    path = byte_level_gguf(tmp_path / "m.gguf", backend, "gpt-2", chat_template=templates)
    t = load(path)
    assert t.chat_templates == {"default": "D", "tool_use": "T"}
    assert t.render_chat(MESSAGES) == "D" and t.render_chat(MESSAGES, tools=[]) == "T"
    assert load(path, chat_template="tool_use").render_chat(MESSAGES) == "T"
