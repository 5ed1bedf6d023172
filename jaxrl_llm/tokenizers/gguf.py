"""The vocabulary inside a GGUF file: byte-level BPE ("gpt2") and sentencepiece BPE ("llama")."""
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.tokenizers.base import CodecTokenizer
from jaxrl_llm.tokenizers.chat import choose
from jaxrl_llm.tokenizers.hugging_face import FastCodec, put_first
from jaxrl_llm.tokenizers.sentence_piece import SentencePieceCodec
from jaxrl_llm.tools import files, gguf_header

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type; sentencepiece's own numbering


_KINDS = {  # type of each value that is read, [type] for lists
    **dict.fromkeys(("model", "pre"), str), **dict.fromkeys(("tokens", "merges"), [str]),
    "token_type": [int], "scores": [float],
    **dict.fromkeys(("add_bos_token", "add_space_prefix"), bool),
    **{f"{name}_token_id": int for name in ("bos", "eos", "padding", "unknown", "eot", "eom")},
}
_EACH = ("ggml.token_type", "ggml.scores")  # have an entry for each token


class PreTokenizer(NamedTuple):
    """How text is cut before merges apply. The file only names the rule; None is GPT-2's own expression."""

    split: str | None = None
    lone_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False  # if the file does not state it


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = PreTokenizer(
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}", ignore_merges=True, adds_bos=True
)
_QWEN2 = PreTokenizer(rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}", nfc=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(lone_digits=True),
    "starcoder": PreTokenizer(lone_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


class GgufTokenizer(CodecTokenizer):
    """The tokenizer described by a GGUF file's `tokenizer.*` metadata.

    Stop tokens are its `eos`, `eot` and `eom` ids and the end-of-turn token its chat template writes. Raises ValueError
    for a vocabulary or pre-tokenizer of another kind, and for a file that names no end-of-sequence token.
    """

    def __init__(self, path: str | Path, chat_template: str | None = None):
        metadata = _read_metadata(path)
        model = metadata.get("ggml.model")
        builders: dict[str, tuple[Callable, tuple[str, ...]]] = {
            "gpt2": (_byte_level_bpe, ("ggml.tokens", "ggml.token_type", "ggml.merges")),
            "llama": (_sentencepiece_bpe, ("ggml.tokens", "ggml.token_type", "ggml.scores")),
        }
        if model not in builders:
            raise ValueError(f"{path} has a vocabulary of kind {model!r}; those read here are {sorted(builders)}")
        if "ggml.eos_token_id" not in metadata:
            raise ValueError(f"{path} names no end-of-sequence token (tokenizer.ggml.eos_token_id)")
        build, needed = builders[model]
        missing = [f"tokenizer.{key}" for key in needed if key not in metadata]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}, which a vocabulary of kind {model!r} is made of")
        super().__init__(build(metadata, path), eos_id=metadata["ggml.eos_token_id"], bos_id=metadata.get("ggml.bos_token_id"),
                         adds_bos=_adds_bos(metadata), pad_id=metadata.get("ggml.padding_token_id"),
                         stop_ids=[metadata[key] for key in ("ggml.eot_token_id", "ggml.eom_token_id") if key in metadata],
                         chat_templates=choose(chat_template, _chat_templates(metadata)))


def _read_metadata(path: str | Path) -> dict:
    """The fields below `tokenizer.`, by the rest of their name."""
    prefix, metadata = "tokenizer.", gguf_header.contents(gguf_header.reader(path), path)
    for name, value in metadata.items():
        template = name.split(".")[:2] == ["tokenizer", "chat_template"]
        kind: Any = str if template else _KINDS.get(name.removeprefix(prefix + "ggml."))
        files.typed(metadata, name, list if isinstance(kind, list) else kind or type(value), path, "a value of another type")
        if isinstance(kind, list) and not all(type(one) is kind[0] for one in value):
            raise ValueError(f"{path}: {name} is no list whose entries are of type {kind[0].__name__}")
    metadata = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    count = len(metadata.get("ggml.tokens", ()))
    for name, value in metadata.items():
        if name.endswith("_token_id") and not 0 <= value < count or name in _EACH and len(value) != count:
            raise ValueError(f"{path}: {prefix}{name}={str(value)[:80]} does not fit {count} tokens")
    return metadata


def _chat_templates(metadata: dict) -> dict[str, str]:
    """By name: `tokenizer.chat_template` is "default", `tokenizer.chat_template.NAME` is NAME."""
    prefix = "chat_template"
    return {key[len(prefix) + 1 :] or "default": text for key, text in metadata.items() if key.split(".")[0] == prefix}


def _adds_bos(metadata: dict) -> bool:
    """Whether plain text starts with BOS; a file that does not state it follows the custom of its kind of vocabulary."""
    custom = metadata["ggml.model"] == "llama" or PRE_TOKENIZERS.get(metadata.get("ggml.pre"), PreTokenizer()).adds_bos
    return metadata.get("ggml.add_bos_token", custom)


def _byte_level_bpe(metadata: dict, path: str | Path) -> FastCodec:
    """GPT-2's scheme: tokens are spelled in a 256-letter alphabet of bytes and built by ranked merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = _pre_tokenizer(metadata.get("ggml.pre"), path)
    tokens = metadata["ggml.tokens"]
    try:
        backend = Tokenizer(
            models.BPE(vocab={token: i for i, token in enumerate(tokens)},
                       merges=[tuple(merge.split(" ")) for merge in metadata["ggml.merges"]], ignore_merges=rule.ignore_merges))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{path} holds tokens and merges that make no vocabulary ({error})") from error
    steps = [pre_tokenizers.Digits(individual_digits=True)] if rule.lone_digits else []
    if rule.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        whole = [token for token, t in zip(tokens, metadata["ggml.token_type"]) if t == kind]
        add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in whole])
    if _adds_bos(metadata) and "ggml.bos_token_id" in metadata:
        put_first(backend, tokens[metadata["ggml.bos_token_id"]], metadata["ggml.bos_token_id"])
    return FastCodec(backend)


def _pre_tokenizer(name: str | None, path: str | Path) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        near = difflib.get_close_matches(str(name), PRE_TOKENIZERS, n=1)
        raise ValueError(f"{path} was made for the pre-tokenizer {name!r}; those known are {sorted(PRE_TOKENIZERS)}"
                         + (f"; the nearest is {near[0]!r}" if near else ""))
    return PRE_TOKENIZERS[name]


def _sentencepiece_bpe(metadata: dict, path: str | Path) -> SentencePieceCodec:
    """Sentencepiece pieces with scores, put back into the model file they came from so that ties break as there."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = metadata.get("ggml.add_space_prefix", True)
    model.normalizer_spec.remove_extra_whitespaces = False
    for piece, score, kind in zip(metadata["ggml.tokens"], metadata["ggml.scores"], metadata["ggml.token_type"]):
        # User-defined pieces are stored as the text they match; in the model file a space is written U+2581.
        piece = piece.replace(" ", "\u2581") if kind == USER_DEFINED else piece
        model.pieces.add(piece=piece, score=score, type=kind)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):  # by their spelling, as sentencepiece does
        if f"ggml.{key}_token_id" in metadata:
            setattr(model.trainer_spec, f"{name}_piece", metadata["ggml.tokens"][metadata[f"ggml.{key}_token_id"]])
    unknown = model.pieces[_unknown_id(metadata, path)]
    unknown.type, model.trainer_spec.unk_piece = UNKNOWN, unknown.piece
    return SentencePieceCodec(model.SerializeToString(), source=str(path))


def _unknown_id(metadata: dict, path: str | Path) -> int:
    """The piece of type unknown, which sentencepiece requires; some converters mark it as a control token."""
    marked = (i for i, kind in enumerate(metadata["ggml.token_type"]) if kind == UNKNOWN)
    spelled = (i for i, piece in enumerate(metadata["ggml.tokens"]) if piece == "<unk>")
    unknown = next(marked, metadata.get("ggml.unknown_token_id", next(spelled, None)))
    if unknown is None:
        raise ValueError(f"{path} names no unknown piece (tokenizer.ggml.unknown_token_id); sentencepiece requires one")
    return unknown
