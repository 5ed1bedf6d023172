"""Sentencepiece models against the library itself."""
import json

import pytest
from tokenizer_cases import MESSAGES, SAMPLES

from jaxrl_llm.tokenizers import SentencePieceTokenizer, load


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_sentencepiece_equals_the_library(sentencepiece_models, name):
    from sentencepiece import SentencePieceProcessor

    path = sentencepiece_models / f"{name}.model"
    ours, theirs = load(path), SentencePieceProcessor(model_file=str(path))
    assert isinstance(ours, SentencePieceTokenizer) and ours.vocab_size == theirs.get_piece_size()
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_id(), theirs.bos_id()) == (2, 1)
    assert ours.pad_id == {"bpe": 3, "unigram": ours.eos_id}[name]
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == theirs.encode(text) and ours.decode(ids) == theirs.decode(ids), text
        assert name == "unigram" or ours.decode(ids) == text


def test_sentencepiece_control_pieces(sentencepiece_models):
    t = load(sentencepiece_models / "bpe.model")
    turn = t._codec.find("<start_of_turn>")
    ids = t.encode("<s><start_of_turn>the theme</s>")
    assert ids == [1, turn, *t.encode("the theme"), 2]
    assert t.decode(ids) == "the theme" and t.decode(ids, skip_special=False) == "<s><start_of_turn>the theme</s>"


def test_directory_with_tokenizer_model_reads_its_template(tmp_path, sentencepiece_models):
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_models / "bpe.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ bos_token }}the{{ eos_token }}"}))
    t = load(tmp_path)
    assert t.encode_chat(MESSAGES) == [1, *t.encode("the"), 2]


def test_sentencepiece_rejects_other_files(tmp_path):
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="x.model is not a sentencepiece model"):
        load(tmp_path / "x.model")
