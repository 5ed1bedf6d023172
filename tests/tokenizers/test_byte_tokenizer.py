"""Bytes: literal ids and round trips."""
import pytest
from tokenizer_cases import SAMPLES

from jaxrl_llm.tokenizers import ByteTokenizer, load


def test_bytes_literal_ids():
    t = load("bytes")
    assert (t.vocab_size, t.pad_id, t.bos_id, t.eos_id, t.stop_ids) == (259, 256, 257, 258, (258,))
    assert t.encode("Aé\n") == [65, 195, 169, 10]
    assert t.encode("A", add_bos=True) == [257, 65]
    assert t.encode("a<|eos|>b<|pad|>") == [97, 258, 98, 256]
    assert t.decode([257, 72, 105, 258, 256, 256]) == "Hi"
    assert t.decode([257, 72, 105, 258], skip_special=False) == "<|bos|>Hi<|eos|>"
    assert t.decode([]) == ""


@pytest.mark.parametrize("text", SAMPLES)
def test_bytes_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert ByteTokenizer().decode(ids) == text and len(ids) == len(text.encode("utf-8"))


def test_bytes_chat_speaks_the_special_tokens():
    t = load("bytes", chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert t.encode_chat([{"role": "user", "content": "x"}]) == [257, 120, 258]
