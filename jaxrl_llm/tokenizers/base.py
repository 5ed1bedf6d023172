"""What every tokenizer offers, and the one class that adds special tokens and chat to a plain codec.

Ids in, ids out: a sampled completion is trained on as the ids that were sampled, never as re-encoded text, and masks
are made where tokens are made. Nothing here derives a mask from ids, so `pad_id == eos_id` (common in published
checkpoints, and the fallback when no padding token is named) is harmless.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.tokenizers.chat import render

Messages = Sequence[Mapping[str, Any]]  # [{"role": ..., "content": ...}, ...]

# Spellings by which published chat formats end a turn; one counts as a stop token only where the tokenizer's own chat
# template writes it and its vocabulary holds it.
END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<|eot|>", "<|end_of_turn|>", "<turn|>")


@runtime_checkable
class Tokenizer(Protocol):
    """Text <-> token ids, the ids with a meaning of their own, and the model's chat format.

    `vocab_size` is one more than the largest id the tokenizer knows; a model's embedding may have more rows.
    """

    vocab_size: int
    eos_id: int
    bos_id: int | None
    pad_id: int
    stop_ids: tuple[int, ...]
    chat_template: str | None

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of `text`; a special token spelled out in `text` becomes that one id. `add_bos` puts `bos_id` first."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, and ids beyond the vocabulary are left out."""

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True, **variables) -> str:
        """The conversation as the model's template writes it; `variables` (say `tools`) go to it as is."""

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True, **variables) -> list[int]:
        """Ids of `render_chat(...)`. No BOS is put in front: where the model wants one, its template writes it."""


class Codec(Protocol):
    """The part that differs between tokenizers: text <-> ids, and token spelling <-> id."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int], skip_special: bool) -> str: ...

    def token(self, token_id: int) -> str: ...

    def find(self, token: str) -> int | None: ...


class CodecTokenizer:
    """A `Tokenizer` made of a `Codec`, its special ids and a chat template."""

    def __init__(
        self,
        codec: Codec,
        *,
        eos_id: int,
        bos_id: int | None = None,
        pad_id: int | None = None,
        stop_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ):
        self._codec = codec
        self.vocab_size = codec.vocab_size
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.pad_id = eos_id if pad_id is None else pad_id
        self.chat_template = chat_template
        turn_ends = (codec.find(name) for name in END_OF_TURN if name in (chat_template or ""))
        self.stop_ids = tuple(dict.fromkeys([eos_id, *stop_ids, *(i for i in turn_ends if i is not None)]))
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        self._template_tokens = {name: codec.token(i) for name, i in named.items() if i is not None}
        beyond = [i for i in (*named.values(), *self.stop_ids) if i is not None and not 0 <= i < self.vocab_size]
        if beyond:
            raise ValueError(f"special token ids {beyond} lie outside the vocabulary, 0 to {self.vocab_size - 1}")

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of `text`, with `bos_id` first if `add_bos`. Raises ValueError if the vocabulary has no BOS."""
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos=True, but this tokenizer has no beginning-of-sequence token; use add_bos=False")
        return [self.bos_id] * add_bos + self._codec.encode(text)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids` i32[N] (list or array). Raises ValueError for a negative id."""
        ids = [int(i) for i in ids]
        if min(ids, default=0) < 0:
            raise ValueError(f"cannot decode the negative id {min(ids)}; cut masked positions away before decoding")
        return self._codec.decode([i for i in ids if i < self.vocab_size], skip_special)

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True, **variables) -> str:
        """The conversation as text. Raises ValueError without a template, or where the template refuses `messages`."""
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template; give one with load(path, chat_template='<jinja source>'), put a "
                "chat_template.jinja beside tokenizer.json, or encode plain text with encode()"
            )
        variables = {**self._template_tokens, **variables}
        return render(self.chat_template, messages, add_generation_prompt, variables)

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True, **variables) -> list[int]:
        """Ids of the rendered conversation, without an extra BOS."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables))


def split_specials(text: str, specials: Mapping[str, int]) -> Iterator[int | str]:
    """Cut `text` at the spellings in `specials`, longest first: yields their ids, and the non-empty texts between."""
    if not specials:
        yield from [text] if text else []
        return
    spellings = "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True))
    for part in re.split(f"({spellings})", text):
        if part:
            yield specials.get(part, part)
