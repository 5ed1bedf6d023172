"""Sentencepiece vocabularies (arXiv:1808.06226) from a .model file."""

from pathlib import Path

from jaxrl_llm.tokenizers.base import CodecTokenizer, split_specials
from jaxrl_llm.tokenizers.chat import choose
from jaxrl_llm.tokenizers.hugging_face import eos_ids, read_chat_templates, read_json


class SentencePieceTokenizer(CodecTokenizer):
    """A trained sentencepiece model, BPE or unigram.

    Control pieces (`<s>`, `</s>`) spelled out in a text become their ids, as chat templates need; each stretch between
    them is encoded on its own. The chat template, further stop tokens and whether plain text starts with BOS (it does
    by default) come from the JSON files beside the model. Raises ValueError for a model without an end-of-sequence piece.
    """

    def __init__(self, path: str | Path, chat_template: str | None = None):
        path = Path(path)
        codec = SentencePieceCodec(path.read_bytes(), source=str(path))
        processor = codec.processor
        if processor.eos_id() < 0:
            raise ValueError(f"{path} defines no end-of-sequence piece; train it with eos_id >= 0")
        super().__init__(
            codec,
            eos_id=processor.eos_id(),
            bos_id=processor.bos_id() if processor.bos_id() >= 0 else None,
            adds_bos=read_json(path.parent / "tokenizer_config.json").get("add_bos_token", True),
            pad_id=processor.pad_id() if processor.pad_id() >= 0 else None,
            stop_ids=eos_ids(read_json(path.parent / "generation_config.json")),
            chat_templates=choose(chat_template, read_chat_templates(path.parent)),
        )


class SentencePieceCodec:
    """Text <-> ids by a serialised sentencepiece `ModelProto`; `source` names it in errors."""

    transformers_class = "LlamaTokenizer"

    def __init__(self, model: bytes, source: str):
        from sentencepiece import SentencePieceProcessor

        try:
            self.processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"{source} is not a sentencepiece model ({error})") from error
        self.vocab_size = self.processor.get_piece_size()
        self._ids = {self.processor.id_to_piece(i): i for i in range(self.vocab_size)}
        self._controls = {piece: i for piece, i in self._ids.items() if self.processor.is_control(i)}

    def encode(self, text: str) -> list[int]:
        parts = split_specials(text, self._controls)
        return [i for part in parts for i in ([part] if isinstance(part, int) else self.processor.encode(part))]

    def decode_batch(self, rows: list[list[int]], skip_special: bool) -> list[str]:
        return self.processor.decode(rows) if skip_special else [self._spelled(row) for row in rows]

    def _spelled(self, ids: list[int]) -> str:
        """Text with its control pieces, each stretch between them decoded on its own."""
        text, stretch = "", []
        for i in ids:
            if self.processor.is_control(i):
                text, stretch = text + self.processor.decode(stretch) + self.token(i), []
            else:
                stretch.append(i)
        return text + self.processor.decode(stretch)

    def token(self, token_id: int) -> str:
        return self.processor.id_to_piece(token_id)

    def find(self, token: str) -> int | None:
        return self._ids.get(token)

    def whole(self) -> dict[str, bool]:
        from sentencepiece import sentencepiece_model_pb2

        model = sentencepiece_model_pb2.ModelProto.FromString(self.processor.serialized_model_proto())
        kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
        types = {piece.piece: piece.type for piece in model.pieces}
        return {piece: kind == kinds.CONTROL for piece, kind in types.items() if kind in (kinds.CONTROL, kinds.USER_DEFINED)}

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.model").write_bytes(self.processor.serialized_model_proto())
