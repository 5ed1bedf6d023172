"""The interface of every tokenizer, and the class that adds special tokens and chat to a plain codec.

Ids in, ids out: training uses the sampled ids of a completion, never re-encoded text, and masks are made where tokens are
made. Nothing here derives a mask from ids, so `pad_id == eos_id` (common in published checkpoints, and the fallback when no
padding token is named) is harmless.
"""
import copy
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from jaxrl_llm.tokenizers.chat import preset, render, select
from jaxrl_llm.tokenizers.messages import Messages

# Spellings by which published chat formats end a turn; one counts as a stop token only where the tokenizer's own chat
# template writes it and its vocabulary holds it.
END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<|eot|>", "<|end_of_turn|>", "<turn|>")


@runtime_checkable
class Tokenizer(Protocol):
    """Text <-> token ids, the special ids, and the model's chat format.

    `vocab_size` is one more than the largest id the tokenizer knows; a model's embedding may have more rows.
    `adds_bos` says that the model was trained on plain text that starts with `bos_id`. `chat_templates` are jinja2 sources by
    name: "tool_use", if present, is for conversations with tools, "default" for all others.
    `control_tokens` are the ids of spellings that steer the model: its special tokens, and those that a chat template writes.
    `end_ids` are the stop tokens among them, which a text does not show; another stop token is a word of the text.
    `published` says that models were trained with it, which can read descriptions.
    """

    vocab_size: int
    eos_id: int
    bos_id: int | None
    adds_bos: bool
    pad_id: int
    stop_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    published: bool

    @property
    def control_tokens(self) -> Mapping[str, int]: ...

    @property
    def end_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of `text`; a special token spelled out in `text` becomes that one id. `add_bos` puts `bos_id` first."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, and ids beyond the vocabulary are skipped."""

    def decode_batch(self, rows: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True) -> list[str]:
        """`decode` of every row, in one call of the underlying library."""

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True, continue_final_message: bool = False,
                    **variables) -> str:
        """The conversation as the model's template writes it; `variables` (such as `tools`) are passed to it, in JSON's types.

        `continue_final_message`, without `add_generation_prompt`, leaves the last message open for the model to continue.
        """

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True, continue_final_message: bool = False,
                    **variables) -> list[int]:
        """Ids of `render_chat(...)`. No BOS is prepended: if the model wants one, its template writes it."""

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """The same tokenizer, whose chat templates have these variables unless a conversation gives other values."""

    def limited_to(self, rows: int) -> Self:
        """The same tokenizer for a model that embeds `rows` tokens: encoding text with a later one is an error."""

    def save(self, directory: Path) -> None:
        """Writes the files from which `load(directory)` and other libraries make the same tokenizer."""


class Codec(Protocol):
    """The part that differs between tokenizers: text <-> ids, token spelling <-> id, and the file that holds them.

    `transformers_class` is the class by which transformers reads that file.
    """

    vocab_size: int
    transformers_class: str

    def encode(self, text: str) -> list[int]: ...

    def decode_batch(self, rows: list[list[int]], skip_special: bool) -> list[str]: ...

    def token(self, token_id: int) -> str: ...

    def find(self, token: str) -> int | None: ...

    def whole(self) -> Mapping[str, bool]:
        """The spellings that are one token wherever a text holds them, and whether each is special."""

    def save(self, directory: Path) -> dict[str, Any]:
        """Writes that file; returns what tokenizer_config.json has to say beside it."""


class CodecTokenizer:
    """A `Tokenizer` made of a `Codec`, its special ids and chat templates."""

    published = True

    def __init__(self, codec: Codec, *, eos_id: int, bos_id: int | None = None, adds_bos: bool = False,
                 pad_id: int | None = None, stop_ids: Iterable[int] = (), chat_templates: Mapping[str, str]):
        self._codec = codec
        self.vocab_size = codec.vocab_size
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.adds_bos = adds_bos and bos_id is not None
        self.pad_id = eos_id if pad_id is None else pad_id
        self.chat_templates = chat_templates
        turn_ends = (codec.find(name) for name in END_OF_TURN if any(name in text for text in chat_templates.values()))
        self.stop_ids = tuple(dict.fromkeys([eos_id, *stop_ids, *(i for i in turn_ends if i is not None)]))
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        self._template_tokens = {name: codec.token(i) for name, i in named.items() if i is not None}
        beyond = [i for i in (*named.values(), *self.stop_ids) if i is not None and not 0 <= i < self.vocab_size]
        if beyond:
            raise ValueError(f"special token ids {beyond} lie outside the vocabulary, 0 to {self.vocab_size - 1}")

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of `text`, with `bos_id` first if `add_bos`.

        Raises ValueError if the vocabulary has no BOS, for half of a surrogate pair, and for a token that the model does not
        embed (`limited_to`).
        """
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos=True, but this tokenizer has no beginning-of-sequence token; use add_bos=False")
        if half := re.search("[\ud800-\udfff]", text):
            raise ValueError(f"the text {text[:80]!r} holds {half[0]!r}, half of a surrogate pair, which is no character; "
                             "write the character or remove it")
        ids = [self.bos_id] * add_bos + self._codec.encode(text)
        beyond = [i for i in ids if i >= self.vocab_size]
        if beyond:
            raise ValueError(
                f"the text holds {self._codec.token(beyond[0])!r}, token {beyond[0]}, but the model embeds only the tokens 0 "
                f"to {self.vocab_size - 1}; take it out of {text[:120]!r}")
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids` i32[N] (list or array). Raises ValueError for a negative id."""
        return self.decode_batch([list(ids)], skip_special)[0]

    def decode_batch(self, rows: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True) -> list[str]:
        """Texts of `rows`, each i32[N] (list or array). Raises ValueError for a negative id."""
        arrays = [np.asarray(row, np.int64) for row in rows]
        lowest = min((int(row.min()) for row in arrays if row.size), default=0)
        if lowest < 0:
            raise ValueError(f"cannot decode the negative id {lowest}; cut masked positions away before decoding")
        kept = [row[row < self.vocab_size].tolist() for row in arrays]
        return self._codec.decode_batch(kept, skip_special) if kept else []

    @functools.cached_property
    def control_tokens(self) -> dict[str, int]:
        """Special tokens, and the single-token tags that a chat template writes (`<think>`), by spelling."""
        written, whole = "".join(self.chat_templates.values()), self._codec.whole()
        tags = re.compile(r"[<\[].*\w.*[>\]]", re.DOTALL)  # vocabularies have whole tokens of white space too
        chosen = {name for name, special in whole.items() if special or (name in written and tags.fullmatch(name))}
        named = {self._codec.token(i) for i in (self.bos_id, self.pad_id, self.eos_id) if i is not None}
        ends = {name for i in self.stop_ids if (name := self._codec.token(i)) in whole}  # a word may end completions, too
        return {name: self._codec.find(name) for name in sorted(chosen | named | ends) if name}

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """The stop tokens that are control tokens; a stop token that is a word belongs to the text that it ends."""
        return frozenset(self.stop_ids).intersection(self.control_tokens.values())

    @property
    def chat_template(self) -> str | None:
        """The template for conversations without tools; None without one."""
        return self.chat_templates.get("default")

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True, continue_final_message: bool = False,
                    **variables) -> str:
        """The conversation as text. Raises ValueError without a template, or where it cannot render `messages`."""
        template = select(self.chat_templates, variables.get("tools"))
        variables = {**self._template_tokens, **variables}
        return render(template, messages, add_generation_prompt, continue_final_message, variables)

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True, continue_final_message: bool = False,
                    **variables) -> list[int]:
        """Ids of the rendered conversation, without an extra BOS."""
        return self.encode(self.render_chat(messages, add_generation_prompt, continue_final_message, **variables))

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """A copy whose templates set these variables, see `chat.preset`. Raises ValueError for those that no template reads."""
        made = copy.copy(self)
        made.chat_templates = preset(self.chat_templates, variables)
        return made

    def limited_to(self, rows: int) -> Self:
        """A copy whose texts hold ids below `rows` only: text models share the vocabulary of larger, multimodal ones.

        Raises ValueError if the begin, end or stop tokens are beyond `rows`: then it is the tokenizer of another model.
        """
        beyond = sorted({i for i in (self.bos_id, *self.stop_ids) if i is not None and i >= rows})
        if beyond:
            raise ValueError(
                f"the model embeds {rows} tokens, but the begin and end tokens of this tokenizer have the ids {beyond}; use "
                "the tokenizer that the model was trained with")
        limited = copy.copy(self)
        limited.vocab_size = min(rows, self.vocab_size)
        limited.pad_id = self.eos_id if self.pad_id >= rows else self.pad_id  # a padding token that was added, as is common
        return limited

    def save(self, directory: Path) -> None:
        """Writes the vocabulary, tokenizer_config.json and, for the stop tokens, generation_config.json."""
        beside = self._codec.save(directory)
        named = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
        described = {
            "tokenizer_class": self._codec.transformers_class,
            "add_bos_token": self.adds_bos,
            "clean_up_tokenization_spaces": False,
            **beside,
            **self._template_tokens,
            **({"chat_template": self.chat_template if [*self.chat_templates] == ["default"] else named} if named else {}),
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        stops = {"eos_token_id": list(self.stop_ids), "bos_token_id": self.bos_id, "pad_token_id": self.pad_id}
        (directory / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n", encoding="utf-8")


def split_specials(text: str, specials: Mapping[str, int]) -> Iterator[int | str]:
    """Cuts `text` at the spellings in `specials`, longest first: yields their ids, and the non-empty texts between."""
    if not specials:
        yield from [text] if text else []
        return
    spellings = "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True))
    for part in re.split(f"({spellings})", text):
        if part:
            yield specials.get(part, part)
