"""The small JSON files beside a vocabulary: names of special tokens, added tokens, stop tokens, chat templates."""
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.tokenizers.chat import choose
from jaxrl_llm.tools import files

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
GENERATION = "generation_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


class Added(NamedTuple):
    """A token that is found in texts as a whole, and its id; `lstrip` and `rstrip`: with the white space on that side.

    `normalized` is None where the file says nothing but the id.
    """

    content: str
    id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None


class TokenizerFacts(NamedTuple):
    """What a folder says about its vocabulary.

    Attributes:
      folder: where the files lie.
      names: `eos_token` and so on -> spelling, of those that the files name.
      special: spellings of all tokens that the files call special by a name or in a list, in transformers' order.
      added: tokens with ids beside the vocabulary or in it, in the order of their ids.
      adds_bos, legacy, prefix_space: `add_bos_token`, `legacy` and `add_prefix_space`; None where they are not stated.
      stops: `eos_token_id` of generation_config.json.  model_stops: that of config.json.
      templates: chat templates by name.
    """

    folder: Path
    names: dict[str, str]
    special: list[str]
    added: list[Added]
    adds_bos: bool | None
    legacy: bool | None
    prefix_space: bool | None
    stops: list[int]
    model_stops: list[int]
    templates: dict[str, str]

    def also_stops(self, vocab_size: int) -> list[int]:
        """The ids that end a completion beside the end token: as in transformers, config.json counts where the other has none.

        Of config.json, which may be older than its vocabulary, ids beyond `vocab_size` are left out; ValueError for those of
        generation_config.json.
        """
        if beyond := [i for i in self.stops if not 0 <= i < vocab_size]:
            raise ValueError(f"{self.folder / GENERATION}: eos_token_id: special token ids {beyond} lie outside the "
                             f"vocabulary, 0 to {vocab_size - 1}")
        return self.stops or [i for i in self.model_stops if 0 <= i < vocab_size]


def read(folder: Path) -> TokenizerFacts:
    """The description of a folder, of as many of the files as it has. Raises ValueError with file and key for a wrong type."""
    config, named = (files.read_object(folder, name) or {} for name in (CONFIG, MAP))
    sources = ((named, folder / MAP), (config, folder / CONFIG))
    names = {key: spelling for source, file in sources for key in _NAMED if (spelling := _spelling(source.get(key), key, file))}
    special = [names[key] for key in _NAMED if key in names]
    special += [name for source, file in sources for key in _LISTED for name in _listed(source.get(key), key, file)]
    adds_bos, legacy, prefix_space = (files.typed(config, key, bool, folder / CONFIG, "true or false")
                                      for key in ("add_bos_token", "legacy", "add_prefix_space"))
    model = files.read_object(folder, "config.json") or {}
    text = files.typed(model, "text_config", dict, folder / "config.json", "an object") or {}
    return TokenizerFacts(folder, names, [*dict.fromkeys(special)], _added(folder, config, special),
                          adds_bos, legacy, prefix_space,
                          _ids(files.read_object(folder, GENERATION) or {}, folder / GENERATION),
                          _ids(model, folder / "config.json") or _ids(text, folder / "config.json"),
                          read_chat_templates(folder))


def _ids(config: Mapping[str, Any], file: Path) -> list[int]:
    """`eos_token_id` as a list."""
    ids = files.typed(config, "eos_token_id", (int, list), file, "an id or a list of ids")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int for i in ids):
        raise ValueError(f"{file}: eos_token_id={str(ids)[:80]} is no list of ids")
    return ids


def _spelling(entry: Any, key: str, file: Path) -> str | None:
    """The text of a token that is a text or an object with `content`; None for null."""
    entry = entry.get("content") if isinstance(entry, dict) else entry
    return files.typed({key: entry}, key, str, file, "a text, or an object whose content is a text")


def _listed(entries: Any, key: str, file: Path) -> list[str]:
    """The spellings in a list of tokens, or in an object of tokens by name; a null of a list is left out."""
    entries = files.typed({key: entries}, key, (list, dict), file, "a list of tokens, or an object of tokens") or []
    found = (_spelling(entry, key, file) for entry in (entries.values() if isinstance(entries, dict) else entries))
    return [spelling for spelling in found if spelling]


def _added(folder: Path, config: Mapping[str, Any], special: list[str]) -> list[Added]:
    """The tokens of `added_tokens_decoder`, and those of added_tokens.json; ValueError where they contradict each other."""
    found: dict[str, Added] = {}
    for token, where in (*_decoded(config, folder / CONFIG), *_older(folder, special)):
        if found.setdefault(token.content, token).id != token.id:
            raise ValueError(f"{where} gives {token.content!r} the id {token.id}, but it has {found[token.content].id} already")
    tokens = sorted(found.values(), key=lambda token: token.id)
    for one, other in zip(tokens, tokens[1:]):
        if one.id == other.id:
            raise ValueError(f"{folder}: {CONFIG} and {ADDED} give {one.content!r} and {other.content!r} the same id, {one.id}")
    return tokens


def _decoded(config: Mapping[str, Any], file: Path) -> Iterator[tuple[Added, str]]:
    key = "added_tokens_decoder"
    for number, entry in (files.typed(config, key, dict, file, "an object of tokens by id") or {}).items():
        where = f"{file}: {key}[{number!r}]"
        if not number.isdecimal() or len(number) > 9:
            raise ValueError(f"{where}: {number!r} is no id")
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
            raise ValueError(f"{where}={str(entry)[:80]!r} is no object whose content is a text")
        flags = {flag: bool(files.typed(entry, flag, bool, where, "true or false")) for flag in _FLAGS}
        flags["normalized"] = flags["normalized"] if "normalized" in entry else not flags["special"]
        yield Added(entry["content"], int(number), **flags), where


def _older(folder: Path, special: list[str]) -> Iterator[tuple[Added, str]]:
    for content, number in (files.read_object(folder, ADDED) or {}).items():
        if type(number) is not int or not 0 <= number < 10**9 or not content:
            raise ValueError(f"{folder / ADDED}: {content!r}: {str(number)[:80]} is no id of a token")
        yield Added(content, number, special=content in special), str(folder / ADDED)


def read_chat_templates(folder: Path) -> dict[str, str]:
    """The templates of a checkpoint by name: chat_template.jinja is "default", additional_chat_templates/NAME.jinja is NAME.

    tokenizer_config.json, which holds one template or a list of names and templates, is used if chat_template.jinja is missing;
    a file takes precedence over an entry of the same name.
    """
    names = {path.stem: path.relative_to(folder) for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    read = {name: files.read_text(folder, path) for name, path in (names | {"default": Path("chat_template.jinja")}).items()}
    templates = {name: text for name, text in read.items() if text is not None}
    if "default" in templates:
        return templates
    file = folder / CONFIG
    listed = files.typed(files.read_object(folder, CONFIG) or {}, "chat_template", (str, list), file,
                         "a template, or a list of names and templates")
    entries = listed if isinstance(listed, list) else [] if listed is None else [{"name": "default", "template": listed}]
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ValueError(f"{file}: chat_template holds {str(entry)[:80]!r}, no object with the texts name and template")
    return {entry["name"]: entry["template"] for entry in entries} | templates


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
