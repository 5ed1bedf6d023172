"""The tokenizer that needs no file: one id per byte of UTF-8, and three special tokens."""

from jaxrl_llm.tokenizers.base import CodecTokenizer, split_specials

SPECIALS = {"<|pad|>": 256, "<|bos|>": 257, "<|eos|>": 258}


class ByteTokenizer(CodecTokenizer):
    """Ids 0-255 are bytes, 256 pad, 257 bos, 258 eos: any text round-trips, in any language, with no training."""

    def __init__(self, chat_template: str | None = None):
        super().__init__(_Bytes(), eos_id=258, bos_id=257, pad_id=256, chat_template=chat_template)


class _Bytes:
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        parts = split_specials(text, SPECIALS)
        return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode("utf-8"))]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        kept = [i for i in ids if i < 256 or not skip_special]
        raw = b"".join(bytes([i]) if i < 256 else self.token(i).encode() for i in kept)
        return raw.decode("utf-8", errors="replace")

    def token(self, token_id: int) -> str:
        names = {i: name for name, i in SPECIALS.items()}
        return names.get(token_id) or bytes([token_id]).decode("latin-1")

    def find(self, token: str) -> int | None:
        return SPECIALS.get(token)
