"""What holds for every tokenizer, and the one door to them."""

import numpy as np
import pytest
from tokenizer_cases import byte_level_gguf

from jaxrl_llm import tokenizers
from jaxrl_llm.tokenizers import GgufTokenizer, HuggingFaceTokenizer, load


@pytest.fixture(scope="module")
def all_tokenizers(tmp_path_factory, checkpoint, sentencepiece_models, backend):
    gguf = byte_level_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", backend, "gpt-2")
    return [load(p) for p in ("bytes", checkpoint, sentencepiece_models / "bpe.model", gguf)]


def test_invalid_utf8_becomes_the_replacement_character(all_tokenizers):
    byte, hf, sp, gguf = all_tokenizers
    assert byte.decode([0xE2, 0x82, 65]) == "\ufffdA"
    lone = "\u00e2"  # the letter that spells byte 0xE2
    assert hf.decode([hf._codec.find(lone), hf._codec.find("A")]) == "\ufffdA"
    assert gguf.decode([gguf._codec.find(lone), gguf._codec.find("A")]) == "\ufffdA"
    assert sp.decode([sp._codec.find("<0xE2>"), sp._codec.find("<0x41>")]) == "\ufffdA"


def test_decode_takes_arrays_drops_padded_rows_and_refuses_negative_ids(all_tokenizers):
    for t in all_tokenizers:
        ids = t.encode("the theme")
        assert t.decode(np.array([*ids, t.eos_id, t.pad_id], np.int32)) == "the theme"
        assert t.decode([*ids, t.vocab_size, t.vocab_size + 1000]) == "the theme"
        with pytest.raises(ValueError, match="negative id -1"):
            t.decode([*ids, -1])


def test_a_batch_is_decoded_as_its_rows_are(all_tokenizers):
    for t in all_tokenizers:
        rows = [t.encode(text) for text in ("the theme", "", "Größe 🙂", "a")]
        rows += [[*rows[0], t.eos_id], [t.eos_id], [*rows[2][:-1]], [*rows[3], t.vocab_size]]
        for skip in (True, False):
            texts = t.decode_batch([np.array(row, np.int32) for row in rows], skip)
            assert texts == t.decode_batch(rows, skip) == [t.decode(row, skip) for row in rows]
        assert t.decode_batch(rows)[:4] == ["the theme", "", "Größe 🙂", "a"] and t.decode_batch([]) == []
        assert t.decode_batch(np.array([rows[0]] * 2, np.int32)) == ["the theme"] * 2
        with pytest.raises(ValueError, match="negative id -1"):
            t.decode_batch([rows[0], [5, -1]])


def test_protocol_and_special_ids(all_tokenizers):
    for t in all_tokenizers:
        assert isinstance(t, tokenizers.Tokenizer)
        assert t.stop_ids[0] == t.eos_id and len(set(t.stop_ids)) == len(t.stop_ids)
        assert all(0 <= i < t.vocab_size for i in (t.eos_id, t.pad_id, *t.stop_ids))
        ids = t.encode("the theme") + [t.eos_id]
        shown = t.decode(ids, skip_special=False)
        assert shown.startswith("the theme") and shown != t.decode(ids) == "the theme"
        assert t.encode(shown) == ids, "a spelled special token must become its id"


def test_load_says_what_it_looked_for(tmp_path, backend):
    with pytest.raises(FileNotFoundError, match="no tokenizer called 'byte', did you mean 'bytes'.*allowed: 'bytes'"):
        load("byte")
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="did you mean '.*/model.gguf'"):
        load(tmp_path / "modle.gguf")
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"holds 2 \*.gguf files.*found model.gguf, two.gguf"):
        load(tmp_path)
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(ValueError, match=r"vocab.txt' is not a kind of tokenizer file.*\*.model"):
        load(tmp_path / "vocab.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer: looked for tokenizer.json.*found nothing"):
        load(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no tokenizer.json in"):
        HuggingFaceTokenizer(tmp_path / "empty")
    only = tmp_path / "one"
    only.mkdir()
    byte_level_gguf(only / "m.gguf", backend, "gpt-2")
    assert isinstance(load(only), GgufTokenizer)
