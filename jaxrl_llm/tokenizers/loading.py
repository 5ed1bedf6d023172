"""Loads every kind of tokenizer."""
import difflib
from pathlib import Path

from jaxrl_llm.tokenizers.base import Tokenizer
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.tokenizers.gguf import GgufTokenizer
from jaxrl_llm.tokenizers.hugging_face import HuggingFaceTokenizer
from jaxrl_llm.tokenizers.sentence_piece import SentencePieceTokenizer
from jaxrl_llm.tools import files

FILES = ("tokenizer.json", "tokenizer.model")
ALLOWED = ("'bytes', a directory with tokenizer.json, tokenizer.model or one *.gguf, "
           "or the path of a tokenizer.json, *.model or *.gguf")


def load(path_or_name: str | Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer called 'bytes', or the one at a path (a file, or a checkpoint directory). Nothing is downloaded.

    A PEFT adapter without tokenizer has that of its base. `chat_template`, jinja2 source or the name of one of the tokenizer's
    own, is used for all conversations. Raises FileNotFoundError where nothing is found, ValueError for a file of another kind.
    """
    if path_or_name == "bytes":
        return ByteTokenizer(chat_template)
    path = folder_of(files.expanded(path_or_name))
    if path.is_dir():
        return _load_directory(path, chat_template)
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer called {str(path_or_name)!r}{_nearest(path)}; allowed: {ALLOWED}")
    if path.name == "tokenizer.json":
        return HuggingFaceTokenizer(path.parent, chat_template)
    kinds = {".gguf": GgufTokenizer, ".model": SentencePieceTokenizer}
    if path.suffix not in kinds:
        raise ValueError(f"{str(path)!r} is not a kind of tokenizer file known here; allowed: {ALLOWED}")
    return kinds[path.suffix](path, chat_template)


def folder_of(path: Path) -> Path:
    """The path, or that of the base of a PEFT adapter beside which no tokenizer lies. Raises the errors of `peft.base_of`."""
    if not (path / "adapter_config.json").is_file() or any((path / file).is_file() for file in FILES):
        return path
    from jaxrl_llm.models.weights import peft
    return peft.base_of(path)


def _load_directory(path: Path, chat_template: str | None) -> Tokenizer:
    """tokenizer.json first (it is exact), then tokenizer.model, then the only *.gguf."""
    if files.regular(path, "tokenizer.json"):
        return HuggingFaceTokenizer(path, chat_template)
    if files.regular(path, "tokenizer.model"):
        return SentencePieceTokenizer(path / "tokenizer.model", chat_template)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and files.regular(path, ggufs[0].name, limit=None):
        return GgufTokenizer(ggufs[0], chat_template)
    names = sorted(entry.name for entry in path.iterdir())
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "nothing"
    problem = f"holds {len(ggufs)} *.gguf files, name one of them" if ggufs else "holds no tokenizer"
    raise FileNotFoundError(
        f"the directory {path} {problem}: looked for tokenizer.json, tokenizer.model and one *.gguf, found {shown}")


def _nearest(path: Path) -> str:
    siblings = [str(entry) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    match = difflib.get_close_matches(str(path), ["bytes", *siblings], n=1)
    return f", did you mean {match[0]!r}?" if match else ""
