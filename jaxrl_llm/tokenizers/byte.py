"""The tokenizer that needs no file: one id per byte of UTF-8, and three special tokens."""
from pathlib import Path
from typing import Any

from jaxrl_llm.tokenizers.base import CodecTokenizer, split_specials
from jaxrl_llm.tokenizers.chat import choose
from jaxrl_llm.tokenizers.hugging_face import put_first

SPECIALS = {"<|pad|>": 256, "<|bos|>": 257, "<|eos|>": 258}


class ByteTokenizer(CodecTokenizer):
    """Ids 0-255 are bytes, 256 pad, 257 bos, 258 eos: any text round-trips, in any language, with no training."""

    published = False

    def __init__(self, chat_template: str | None = None):
        super().__init__(_Bytes(), eos_id=258, bos_id=257, adds_bos=True, pad_id=256, chat_templates=choose(chat_template, {}))


class _Bytes:
    vocab_size = 259
    transformers_class = "PreTrainedTokenizerFast"

    def encode(self, text: str) -> list[int]:
        parts = split_specials(text, SPECIALS)
        return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode("utf-8"))]

    def decode_batch(self, rows: list[list[int]], skip_special: bool) -> list[str]:
        spelled = [bytes([i]) for i in range(256)] + [b"" if skip_special else name.encode() for name in SPECIALS]
        return [b"".join(map(spelled.__getitem__, row)).decode("utf-8", errors="replace") for row in rows]

    def token(self, token_id: int) -> str:
        names = {i: name for name, i in SPECIALS.items()}
        return names.get(token_id) or bytes([token_id]).decode("latin-1")

    def find(self, token: str) -> int | None:
        return SPECIALS.get(token)

    def whole(self) -> dict[str, bool]:
        return dict.fromkeys(SPECIALS, True)

    def save(self, directory: Path) -> dict[str, Any]:
        """The same ids as a byte-level BPE without merges, whose alphabet spells every byte by a visible letter."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        letters = {letter: i for i, letter in enumerate(_byte_letters())}
        backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(list(SPECIALS))
        put_first(backend, "<|bos|>", SPECIALS["<|bos|>"])
        backend.save(str(directory / "tokenizer.json"))
        return {}


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones are themselves, the others are U+0100 onwards in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
