"""Sentencepiece vocabularies (arXiv:1808.06226) from a .model file."""
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.tokenizers import described
from jaxrl_llm.tokenizers.base import CodecTokenizer
from jaxrl_llm.tokenizers.chat import choose
from jaxrl_llm.tokenizers.described import Added


class SentencePieceTokenizer(CodecTokenizer):
    """A trained sentencepiece model, BPE or unigram, with the tokens that the JSON files beside it add.

    Control pieces (`<s>`, `</s>`) and added tokens spelled out in a text become their ids, as chat templates need; each
    stretch between them is encoded on its own. Special tokens are those that the files name, as in transformers: a name that
    no file gives an id gets the next one, and without a name the model's own piece counts. Stop tokens, the chat template and
    whether plain text starts with BOS (it does by default) come from the same files. Raises ValueError for a model without an
    end-of-sequence token, and for files that contradict the model.
    """

    def __init__(self, path: str | Path, chat_template: str | None = None):
        path = Path(path)
        beside = described.read(path.parent)
        stated = (path.parent / described.CONFIG).is_file()  # transformers takes `legacy` as false where it is not stated
        codec = SentencePieceCodec(
            path.read_bytes(), source=str(path), added=beside.added, special=beside.special,
            every_stretch=bool(beside.legacy) or not stated, prefix=beside.prefix_space is not False)
        own = {key: getattr(codec.processor, f"{key}_id")() for key in ("eos", "bos", "pad")}
        ids = {f"{key}_token": codec.find(beside.names[f"{key}_token"]) if f"{key}_token" in beside.names else
               i if i >= 0 else None for key, i in own.items()}
        if ids["eos_token"] is None:
            raise ValueError(f"{path} defines no end-of-sequence piece, and no file beside it names an eos_token; train it "
                             f"with eos_id >= 0, or name the token in {described.CONFIG}")
        super().__init__(codec, eos_id=ids["eos_token"], bos_id=ids["bos_token"], adds_bos=beside.adds_bos is not False,
                         pad_id=ids["pad_token"], stop_ids=beside.also_stops(codec.vocab_size),
                         chat_templates=choose(chat_template, beside.templates))


class SentencePieceCodec:
    """Text <-> ids by a serialised sentencepiece `ModelProto`, and added tokens; `source` names it in errors.

    Args:
      added: tokens that are whole wherever a text holds them.
      special: spellings that count as special; those without an id get the next ones.
      every_stretch: whether a model that puts a space before its text does so after each whole token too, and not only at the
        beginning (`legacy` of transformers).
      prefix: whether it does so at all.
    """

    transformers_class = "LlamaTokenizer"

    def __init__(self, model: bytes, source: str, added: Sequence[Added] = (), special: Iterable[str] = (),
                 every_stretch: bool = True, prefix: bool = True):
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

        try:
            self.processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"{source} is not a sentencepiece model ({error})") from error
        self._count = self.processor.get_piece_size()
        self._ids = {self.processor.id_to_piece(i): i for i in range(self._count)}
        whole = {piece: Added(piece, i, special=True) for piece, i in self._ids.items() if self.processor.is_control(i)}
        self._whole = whole | _checked(added, special, self._ids, source)
        self._added = {token.id: token for token in self._whole.values()}
        self._ids |= {token.content: token.id for token in self._whole.values()}
        self.vocab_size = 1 + max(self._ids.values())
        self._pattern = _pattern(self._whole)
        self._every_stretch, self._prefix = every_stretch, prefix
        self._bare = self.processor  # puts no space before a text
        if not (every_stretch and prefix):
            proto = sentencepiece_model_pb2.ModelProto.FromString(model)
            proto.normalizer_spec.add_dummy_prefix = False
            self._bare = SentencePieceProcessor(model_proto=proto.SerializeToString())

    def _of(self, first: bool) -> Any:
        """The processor of a stretch of text, the first one or a later one."""
        return self.processor if self._prefix and (first or self._every_stretch) else self._bare

    def encode(self, text: str) -> list[int]:
        parts, ids = self._pattern.split(text) if self._pattern else [text], []  # stretches, and between them whole tokens
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self._whole[part].id)
                continue
            part = part.lstrip() if number > 0 and self._whole[parts[number - 1]].rstrip else part
            part = part.rstrip() if number + 1 < len(parts) and self._whole[parts[number + 1]].lstrip else part
            ids += self._of(number == 0).encode(part) if part else []
        return ids

    def decode_batch(self, rows: list[list[int]], skip_special: bool) -> list[str]:
        if skip_special and all(token.special for token in self._added.values()):
            own = [[i for i in row if i < self._count and i not in self._added] for row in rows]
            return self._of(True).decode(own)
        return [self._spelled(row, skip_special) for row in rows]

    def _spelled(self, ids: list[int], skip_special: bool) -> str:
        """Text with its whole tokens, each stretch between them decoded on its own."""
        text, stretch, first = "", [], True
        for i in ids:
            token = self._added.get(i)
            if token is None and i < self._count:
                stretch.append(i)
            elif token is not None and not (skip_special and token.special):
                text += (self._of(first).decode(stretch) if stretch else "") + token.content
                stretch, first = [], False
        return text + (self._of(first).decode(stretch) if stretch else "")

    def token(self, token_id: int) -> str:
        if token_id in self._added:
            return self._added[token_id].content
        return self.processor.id_to_piece(token_id) if token_id < self._count else ""

    def find(self, token: str) -> int | None:
        return self._ids.get(token)

    def whole(self) -> dict[str, bool]:
        from sentencepiece import sentencepiece_model_pb2

        model = sentencepiece_model_pb2.ModelProto.FromString(self.processor.serialized_model_proto())
        user = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
        return {piece.piece: False for piece in model.pieces if piece.type == user} | {
            token.content: token.special for token in self._whole.values()}

    def save(self, directory: Path) -> dict[str, Any]:
        (directory / "tokenizer.model").write_bytes(self.processor.serialized_model_proto())
        tokens = {str(token.id): {key: value for key, value in token._asdict().items() if key not in ("id", "normalized")}
                  for token in self._whole.values()}
        return {"legacy": self._every_stretch, "add_prefix_space": self._prefix, "added_tokens_decoder": tokens}


def _checked(added: Sequence[Added], special: Iterable[str], ids: Mapping[str, int], source: str) -> dict[str, Added]:
    """The added and the special tokens by spelling; ValueError where one contradicts the pieces `ids` of the model."""
    pieces, whole = {i: piece for piece, i in ids.items()}, {}
    for token in added:
        if ids.get(token.content, token.id) != token.id or pieces.get(token.id, token.content) != token.content:
            other = repr(token.content) + f" the id {ids[token.content]}" if token.content in ids else (
                f"this id to {pieces[token.id]!r}")
            raise ValueError(f"the files beside {source} give {token.content!r} the id {token.id}, but the model gives {other}")
        if token.single_word:
            raise ValueError(f"the files beside {source} mark {token.content!r} as single_word, which is not supported beside "
                             "a sentencepiece model; save a tokenizer.json with a current release of transformers")
        whole[token.content] = token
    following = 1 + max([*pieces, *(token.id for token in added)])
    for name in special:
        if name not in whole:
            whole[name] = Added(name, ids.get(name, following))
            following += name not in ids
        whole[name] = whole[name]._replace(special=True)
    return whole


def _pattern(spellings: Iterable[str]) -> re.Pattern | None:
    """Matches any of the spellings, the longest first; None where there are none."""
    found = "|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True))
    return re.compile(f"({found})") if found else None
