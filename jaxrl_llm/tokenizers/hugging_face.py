"""Tokenizers of Hugging Face checkpoints: tokenizer.json and the small JSON files beside it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from jaxrl_llm.tokenizers.base import CodecTokenizer
from jaxrl_llm.tokenizers.chat import choose

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")


class HuggingFaceTokenizer(CodecTokenizer):
    """tokenizer.json of a checkpoint directory, with its special tokens, stop tokens and chat template.

    EOS, BOS and padding are the tokens named in tokenizer_config.json or special_tokens_map.json; without a name, EOS
    is the first `eos_token_id` of generation_config.json or config.json. Every `eos_token_id` of generation_config.json
    is a stop token. Plain text starts with BOS if the post-processor of tokenizer.json puts one there, as in transformers.
    Raises FileNotFoundError without tokenizer.json, ValueError for a token that the vocabulary lacks.
    """

    def __init__(self, directory: str | Path, chat_template: str | None = None):
        from tokenizers import Tokenizer

        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {directory}")
        backend = Tokenizer.from_file(str(path))
        # Published files sometimes carry the padding and truncation of the run that wrote them.
        backend.no_padding()
        backend.no_truncation()
        codec = FastCodec(backend)
        configs = {name: read_json(directory / name) for name in CONFIGS}
        names = {key: _token_name(configs, key) for key in ("eos_token", "bos_token", "pad_token")}
        ids = {key: _named_id(codec, key, name, directory) for key, name in names.items()}
        stops = eos_ids(configs["generation_config.json"])
        eos_id = next((i for i in (ids["eos_token"], *stops, *eos_ids(configs["config.json"])) if i is not None), None)
        if eos_id is None:
            raise ValueError(
                f"{directory} names no end-of-sequence token: looked for eos_token and eos_token_id in "
                f"{', '.join(CONFIGS)}; add a tokenizer_config.json with an eos_token"
            )
        codec.mark_special([name for name in names.values() if name is not None])
        super().__init__(
            codec,
            eos_id=eos_id,
            bos_id=ids["bos_token"],
            adds_bos=codec.begins_with(ids["bos_token"]),
            pad_id=ids["pad_token"],
            stop_ids=stops,
            chat_templates=choose(chat_template, read_chat_templates(directory)),
        )


class FastCodec:
    """Text <-> ids by a `tokenizers.Tokenizer`. Decoding never tidies up spaces: it gives back what was generated."""

    transformers_class = "PreTrainedTokenizerFast"

    def __init__(self, backend):
        self._backend = backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())

    def mark_special(self, tokens: list[str]) -> None:
        """Makes sure that `skip_special` skips `tokens`, whatever their entry in tokenizer.json says."""
        special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        self._backend.add_special_tokens([token for token in tokens if token not in special])

    def begins_with(self, token_id: int | None) -> bool:
        """Whether the post-processor puts that token in front of a text."""
        return self._backend.encode("", add_special_tokens=True).ids[:1] == [token_id]

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode_batch(self, rows: list[list[int]], skip_special: bool) -> list[str]:
        return self._backend.decode_batch(rows, skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def find(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def whole(self) -> dict[str, bool]:
        return {token.content: token.special for token in self._backend.get_added_tokens_decoder().values()}

    def save(self, directory: Path) -> None:
        self._backend.save(str(directory / "tokenizer.json"))


def put_first(backend, token: str, token_id: int) -> None:
    """Makes `backend` put a token in front of texts that are encoded with special tokens."""
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])


def read_chat_templates(directory: Path) -> dict[str, str]:
    """The templates of a checkpoint by name: chat_template.jinja is "default", additional_chat_templates/NAME.jinja is NAME.

    tokenizer_config.json, which holds one template or a list of names and templates, is used if chat_template.jinja is missing;
    a file takes precedence over an entry of the same name.
    """
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    listed = read_json(directory / "tokenizer_config.json").get("chat_template")
    if "default" in templates or listed is None:
        return templates
    entries = {entry["name"]: entry["template"] for entry in listed} if isinstance(listed, list) else {"default": listed}
    return entries | templates


def write_chat_templates(directory: Path, templates: Mapping[str, str]) -> None:
    """Makes `templates` those of a directory with tokenizer files, by files that take precedence over tokenizer_config.json."""
    if choose(None, read_chat_templates(directory)) == dict(templates):
        return
    named = directory / "additional_chat_templates"
    shutil.rmtree(named, ignore_errors=True)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    for name, text in templates.items():
        file = directory / "chat_template.jinja" if name == "default" else named / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict:
    """The object in a file; an empty one if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _token_name(configs: dict[str, dict], key: str) -> str | None:
    entries = (configs[name].get(key) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    entry = next((entry for entry in entries if entry), None)
    return entry["content"] if isinstance(entry, dict) else entry


def _named_id(codec: FastCodec, key: str, name: str | None, directory: Path) -> int | None:
    token_id = None if name is None else codec.find(name)
    if name is not None and token_id is None:
        raise ValueError(f"{directory} names {key} {name!r}, which is not in the vocabulary of its tokenizer.json")
    return token_id


def eos_ids(config: dict) -> list[int]:
    """`eos_token_id` of a generation_config.json or config.json as a list."""
    ids = config.get("eos_token_id")
    return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]
