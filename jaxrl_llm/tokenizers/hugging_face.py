"""Tokenizers of Hugging Face checkpoints: tokenizer.json and the small JSON files beside it."""
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.tokenizers import described
from jaxrl_llm.tokenizers.base import CodecTokenizer
from jaxrl_llm.tokenizers.bounds import Bounds
from jaxrl_llm.tokenizers.chat import choose
from jaxrl_llm.tokenizers.described import Added
from jaxrl_llm.tools import files


class HuggingFaceTokenizer(CodecTokenizer):
    """tokenizer.json of a checkpoint directory, with its special tokens, added tokens, stop tokens and chat template.

    EOS, BOS and padding are the tokens named in tokenizer_config.json or special_tokens_map.json; without a name, EOS
    is the first `eos_token_id` of generation_config.json or config.json. Every `eos_token_id` of generation_config.json, or
    if it has none of config.json, is a stop token. Plain text starts with BOS if the post-processor of tokenizer.json puts one
    there, as in transformers. Raises FileNotFoundError without tokenizer.json, ValueError for a token that the vocabulary
    lacks, and for files that contradict each other.
    """

    def __init__(self, directory: str | Path, chat_template: str | None = None):
        directory = Path(directory)
        path = directory / "tokenizer.json"
        text = files.read_text(directory, path.name)
        if text is None:
            raise FileNotFoundError(f"no tokenizer.json in {directory}")
        beside = described.read(directory)
        bounds = Bounds.of_file(files.read_object(directory, path.name) or {}, path)  # the library normalizes as it reads
        codec = FastCodec(_backend(text, path), bounds)
        names = {key: beside.names.get(key) for key in ("eos_token", "bos_token", "pad_token")}
        beyond = {token.content for token in beside.added}
        for key, name in names.items():
            if name is not None and name not in beyond and codec.find(name) is None:
                raise ValueError(f"{directory} names {key} {name!r}, which is not in the vocabulary of its tokenizer.json")
        codec.add(beside.added, beside.special, directory)
        ids = {key: None if name is None else codec.find(name) for key, name in names.items()}
        stops = beside.also_stops(codec.vocab_size)
        eos_id = next((i for i in (ids["eos_token"], *stops) if i is not None), None)
        if eos_id is None:
            raise ValueError(
                f"{directory} names no end-of-sequence token: looked for eos_token and eos_token_id in {described.CONFIG}, "
                f"{described.MAP}, {described.GENERATION}, config.json; add a tokenizer_config.json with an eos_token")
        super().__init__(codec, eos_id=eos_id, bos_id=ids["bos_token"], adds_bos=codec.begins_with(ids["bos_token"]),
                         pad_id=ids["pad_token"], stop_ids=stops, chat_templates=choose(chat_template, beside.templates))


class FastCodec:
    """Text <-> ids by a `tokenizers.Tokenizer`. Decoding never tidies up spaces: it gives back what was generated.

    `bounds` are those of a backend that a file of others describes.
    """

    transformers_class = "PreTrainedTokenizerFast"

    def __init__(self, backend, bounds: Bounds = Bounds()):
        self._backend, self._bounds = backend, bounds
        self._measure()

    def _measure(self) -> None:
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def add(self, added: Sequence[Added], special: Sequence[str], source: Path) -> None:
        """Adds tokens that the files in `source` name, as transformers does: a special name without an id gets the next one.

        What a file says of a token holds before what tokenizer.json says. ValueError where a token cannot have its id.
        """
        from tokenizers import AddedToken

        known = {token.content: token for token in self._backend.get_added_tokens_decoder().values()}
        tokens = [AddedToken(token.content, special=token.special or token.content in special, lstrip=token.lstrip,
                             rstrip=token.rstrip, single_word=token.single_word,
                             normalized=not token.special if token.normalized is None else token.normalized)
                  for token in added if token.normalized is not None or token.content not in known]
        listed = {token.content for token in tokens}
        tokens += [name for name in special if name not in listed and not (name in known and known[name].special)]
        for token in tokens:
            self._bounds.check(token if isinstance(token, str) else token.content)
        self._called(self._backend.add_tokens, [AddedToken(token, special=True) if isinstance(token, str) else token
                                                for token in tokens])
        for token in added:
            if (own := self.find(token.content)) != token.id:
                raise ValueError(f"the files beside tokenizer.json in {source} give {token.content!r} the id {token.id}, but "
                                 f"with tokenizer.json it gets the id {own}")
        self._measure()

    def begins_with(self, token_id: int | None) -> bool:
        """Whether the post-processor puts that token in front of a text."""
        return self._called(self._backend.encode, "", add_special_tokens=True).ids[:1] == [token_id]

    def encode(self, text: str) -> list[int]:
        self._bounds.check(text)
        return self._called(self._backend.encode, text, add_special_tokens=False).ids

    def decode_batch(self, rows: list[list[int]], skip_special: bool) -> list[str]:
        return self._called(self._backend.decode_batch, rows, skip_special_tokens=skip_special)

    def _called(self, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        return _called(self._bounds.file, function, *args, **settings)

    def token(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def find(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def whole(self) -> dict[str, bool]:
        return {token.content: token.special for token in self._backend.get_added_tokens_decoder().values()}

    def save(self, directory: Path) -> dict[str, Any]:
        self._backend.save(str(directory / "tokenizer.json"))
        return {}


def _backend(text: str, path: Path) -> Any:
    """The library's tokenizer of a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        backend = _called(path, Tokenizer.from_str, text)
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{path} is no tokenizer.json that the library `tokenizers` reads ({str(error)[:300]})") from error
    # Published files sometimes carry the padding and truncation of the run that wrote them.
    backend.no_padding()
    backend.no_truncation()
    return backend


def _called(file: Any, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """The result of a function of `tokenizers`; ValueError where it panics, which Python sees as neither error nor exit."""
    try:
        return function(*args, **settings)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{file}: the library `tokenizers` cannot work with this tokenizer ({str(error)[:300]})") from error


def put_first(backend, token: str, token_id: int) -> None:
    """Makes `backend` put a token in front of texts that are encoded with special tokens."""
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])

