"""JSONL files, one object a line, read strictly: anything that would break readers later is an error with file and line."""
import bz2
import gzip
import json
import lzma
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_DEPTH = 100  # of nested lists and objects, since later code walks through them by recursion


PACKED: dict[str, Callable] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def opened(path: str | Path) -> BinaryIO:
    """The bytes of a file, which may be compressed, as its ending says."""
    return PACKED.get(Path(path).suffix, open)(path, "rb")


def lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """`(line number, line)` of each line that is not blank. Only "\\n" ends a line: texts in JSON may hold U+2028."""
    with opened(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{path} cannot be decompressed as its ending says: {error}") from error


def read(path: str) -> list[tuple[int, dict[str, Any]]]:
    """`(line number, object)` of each line that is not blank; ValueError naming file and line.

    For a key that an object has twice there is a warning, and the last one counts.
    """
    records, twice = [], []
    for number, line in lines(path):
        try:
            record, repeated = parse(line.decode("utf-8-sig"))
            if not isinstance(record, dict):
                raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        except ValueError as error:  # includes JSON and UTF-8 decoding errors
            raise ValueError(f"{path}, line {number}: {error}") from error
        records.append((number, record))
        twice += [(number, key) for key in repeated]
    if twice:
        several = len({number for number, _ in twice})
        warnings.warn(f"{path}, line {twice[0][0]}: the key {twice[0][1]!r} is given twice, the last one counts"
                      + (f" (and so in {several - 1} further lines)" if several > 1 else ""), RuntimeWarning, stacklevel=2)
    if not records:
        raise ValueError(f"{path} holds no rows; give a JSON object in each line: a problem has 'prompt' or 'messages', and "
                         "'answer', and a text to imitate 'prompt' and 'response', 'messages' or 'text'")
    return records


def parse(text: str) -> tuple[Any, list[str]]:
    """The value of a JSON text, and the keys that some object in it has twice.

    Raises ValueError for what JSON does not allow (NaN, Infinity), for halves of surrogate pairs, which are no text, and for
    values nested deeper than `MAX_DEPTH`.
    """
    repeated: list[str] = []

    def build(pairs):
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            repeated.extend(key for key, _ in pairs if key in seen or seen.add(key))
        return made

    try:
        value = json.loads(text, object_pairs_hook=build, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(f"lists and objects are nested deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise ValueError(f"lists and objects are nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text.lower():  # decoded from UTF-8, it can have surrogates in escapes alone
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(f"a text holds {half}, half of a surrogate pair, which is no character; write the character or "
                             "remove it") from None
    return value, repeated


def _refuse(name: str):
    raise ValueError(f"{name} is no JSON; write null, a number or a text")


def depth(value: Any) -> int:
    """Levels of nested lists and objects; 0 for a value that is neither."""
    levels, layer = 0, [value]
    while layer := [x for x in layer if isinstance(x, (dict, list))]:
        levels, layer = levels + 1, [y for x in layer for y in (x.values() if isinstance(x, dict) else x)]
    return levels
