"""How long a tokenizer.json of others can make a text, counted before its library, which has no limits, makes it so long.

A normalizer of thirty steps that double every letter needs a gigabyte for one letter. Real ones replace one letter by a few.
"""
import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT = 1 << 20  # letters of a normalised text, and so many for each letter of the text:
PER_LETTER = 20  # one letter has at most 18 by Unicode's compatibility forms
TOKEN_LIMIT = 1 << 13  # letters of a token; published ones have some hundred
ADDED_LIMIT = 64  # tokens that a post-processor adds to a text
AFFIX_LIMIT = 64  # letters that a vocabulary puts before or after every piece of a word
_LETTERS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 36, "ByteLevel": 4}  # from one letter
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix", "unk_token")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The steps of the normalizer of `file`, in order, as its JSON describes them."""

    steps: Sequence[Mapping[str, Any]] = ()
    file: Any = None

    @classmethod
    def of_file(cls, content: Mapping[str, Any], file: Path) -> "Bounds":
        """The bounds of a tokenizer.json.

        Raises ValueError with file and key for a decoder that multiplies letters, a post-processor that adds many tokens,
        tokens of thousands of letters, or an added token that the normalizer makes too long.
        """
        bounds = cls(_steps(content.get("normalizer"), f"{file}: normalizer"), file)
        if _most(_steps(content.get("decoder"), f"{file}: decoder"), 1000) > LIMIT:
            raise ValueError(f"{file}: decoder multiplies the letters of a text; the most that is supported are a thousand for "
                             "each")
        if _added(content.get("post_processor")) > ADDED_LIMIT:
            raise ValueError(f"{file}: post_processor adds more than {ADDED_LIMIT} tokens to a text")
        added = content.get("added_tokens")
        tokens = [entry.get("content") for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
        model = content.get("model") if isinstance(content.get("model"), dict) else {}
        vocabulary = model.get("vocab") if isinstance(model.get("vocab"), (dict, list)) else ()
        pieces = (entry[0] if isinstance(entry, list) and entry else entry for entry in vocabulary)
        texts = (text for text in (*tokens, *pieces) if isinstance(text, str))
        if long := next((text for text in texts if len(text) > TOKEN_LIMIT), None):
            raise ValueError(f"{file}: the token {long[:40]!r}... has {len(long)} letters; supported are {TOKEN_LIMIT}")
        if key := next((key for key in _AFFIXES if len(str(model.get(key) or "")) > AFFIX_LIMIT), None):
            raise ValueError(f"{file}: model.{key} has {len(str(model[key]))} letters; supported are {AFFIX_LIMIT}")
        for text in tokens:
            bounds.check(text if isinstance(text, str) else "")
        return bounds

    def check(self, text: str) -> None:
        """Raises ValueError if the normalizer makes more than `LIMIT` letters, and `PER_LETTER` for each of the text, of it."""
        limit, now = LIMIT + PER_LETTER * len(text), text
        if _most(self.steps, len(text)) <= limit:
            return
        for step in self.steps:
            kind, pattern = step["type"], _pattern(step)
            most = _most([step], len(now))
            if kind == "Replace" and pattern:
                most = len(now) + now.count(pattern) * (len(step["content"]) - len(pattern))
            if kind in ("Replace", "Prepend", "Precompiled") and most > limit:
                raise ValueError(f"{self.file}: the normalizer makes {most} letters or more of a text of {len(text)}, by a "
                                 f"step of type {kind}; at most {limit} are supported")
            now = _apply(step, now)


def _steps(entry: Any, where: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or decoder, those of sequences in their place."""
    if entry is None:
        return []
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise ValueError(f"{where}={str(entry)[:80]} is no object with a type")
    inner = entry.get("normalizers", entry.get("decoders"))
    if entry["type"] == "Sequence" and isinstance(inner, list):
        return [step for one in inner for step in _steps(one, where)]
    texts = {"Replace": ("content",), "Prepend": ("prepend",), "Precompiled": ("precompiled_charsmap",)}.get(entry["type"], ())
    for key in texts:
        if not isinstance(entry.get(key), str):
            raise ValueError(f"{where}: {key}={str(entry.get(key))[:80]} of a step of type {entry['type']} is no text")
    if entry["type"] == "Precompiled" and not _trie(entry["precompiled_charsmap"])[1]:
        raise ValueError(f"{where}: precompiled_charsmap is shorter than the table that it holds by its own first bytes")
    return [entry]


def _added(entry: Any) -> int:
    """How many tokens a post-processor puts beside a text."""
    if not isinstance(entry, dict):
        return 0
    inner, pieces, tokens = entry.get("processors"), entry.get("single"), entry.get("special_tokens")
    names = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece, dict)
             and isinstance(piece.get("SpecialToken"), dict)] if isinstance(pieces, list) else []
    ids = {name: token["ids"] for name, token in tokens.items() if isinstance(token, dict)
           and isinstance(token.get("ids"), list)} if isinstance(tokens, dict) else {}
    return (sum(len(ids.get(name, ())) for name in names if isinstance(name, str))
            + sum(map(_added, inner if isinstance(inner, list) else ())))


def _pattern(step: Mapping[str, Any]) -> str | None:
    """The text that a step replaces; None for a regular expression, and for other steps."""
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return text if isinstance(text, str) else None


def _most(steps: Sequence[Mapping[str, Any]], letters: int) -> int:
    """The most letters that the steps make of so many, 0 of 0; a regular expression may match between any two."""
    for step in steps if letters else ():
        kind, pattern = step["type"], _pattern(step)
        if kind == "Replace" and pattern:
            letters = max(letters, letters // len(pattern) * len(step["content"]) + letters % len(pattern))
        elif kind == "Replace":
            letters += (letters + 1) * len(step["content"])
        elif kind == "Prepend":
            letters += len(step["prepend"])
        elif kind == "Precompiled":
            letters *= _longest(step["precompiled_charsmap"])
        else:
            letters *= _LETTERS.get(kind, 1)
    return letters


def _trie(charsmap: str) -> tuple[bytes, bool]:
    """The texts of sentencepiece's table of letters, which lie behind a trie, and whether the trie ends before them."""
    try:
        table = base64.b64decode(charsmap)
    except ValueError:  # which the library reports
        return b"", True
    end = 4 + int.from_bytes(table[:4], "little")
    return table[end:], end <= len(table)


def _longest(charsmap: str) -> int:
    """The most bytes that sentencepiece's table of letters has for one; its texts end with 0."""
    return max(1, *map(len, _trie(charsmap)[0].split(b"\0")))


def _apply(step: Mapping[str, Any], text: str) -> str:
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "normalizer": step})).normalizer.normalize_str(text)
