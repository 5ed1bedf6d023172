"""Files that other people made: regular ones inside of a folder, up to a size, and JSON objects in them."""
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TEXT_LIMIT = 1 << 27  # bytes of a file that is read at once; the largest published tokenizer.json has a quarter of that
LINES_LIMIT = 1 << 32  # bytes of a file that is read line by line


def expanded(path: str | os.PathLike) -> Path:
    """The path with `~` and `~user` replaced by their folders. Raises ValueError where the user is unknown, and for URLs."""
    if "://" in str(path):
        raise ValueError(f"{str(path)!r} is a URL, but this is read from a disk: copy or mount it, and give its path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r} begins with the home folder of a user whom this machine does not know; give the whole "
                         "path") from error


def regular(folder: Path, name: str | os.PathLike, limit: int | None = TEXT_LIMIT) -> Path | None:
    """The path of the file `name` of a folder; None where it does not exist.

    Links must lead to files inside of the folder, or of the cache of the Hugging Face hub, whose snapshots link to its blobs.
    Raises ValueError for a name or a link that leaves the folder, for what is no regular file (a pipe never ends), and for
    more than `limit` bytes (None: any number).
    """
    file = folder / name
    root, target = folder.resolve(), Path(os.path.realpath(file))
    inside = target.is_relative_to(root) and ".." not in Path(name).parts
    if not inside and not (root.parent.name == "snapshots" and target.parent == root.parents[1] / "blobs"):
        raise ValueError(f"{file} lies outside of its folder, at {target}; files of a folder must lie in it: copy the file")
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    except OSError as error:  # a loop of links, a part of the path that is a file
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{file} is no regular file but {_kind(status.st_mode)}")
    if limit is not None and status.st_size > limit:
        raise ValueError(f"{file} has {status.st_size} bytes; at most {limit} are read")
    return file


def read_text(folder: Path, name: str | os.PathLike, limit: int = TEXT_LIMIT) -> str | None:
    """The text of a file of a folder; None where it does not exist. Raises ValueError as `regular`, and for other encodings."""
    file = regular(folder, name, limit)
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error})") from error


def lines(folder: Path, name: str | os.PathLike, limit: int = LINES_LIMIT) -> Iterator[str]:
    """The lines of a file of a folder with their ends, one at a time; none where it does not exist. Raises as `read_text`."""
    if (file := regular(folder, name, limit)) is not None:
        with open(file, encoding="utf-8", newline="\n") as opened:
            yield from opened


def read_object(folder: Path, name: str | os.PathLike, limit: int = TEXT_LIMIT) -> dict[str, Any] | None:
    """The object in a JSON file of a folder; None where the file does not exist. Raises ValueError, which names the file."""
    text = read_text(folder, name, limit)
    if text is None:
        return None
    try:
        content = json.loads(text)
        if "\\ud" in text.lower():  # halves of letters, which no text may hold alone
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / name} is no JSON file ({error}); if its download was cut short, fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder / name} holds a {type(content).__name__}, expected a JSON object")
    return content


def typed(entries: Mapping[str, Any], key: str, kinds: type | tuple[type, ...], file: Any, allowed: str) -> Any:
    """`entries[key]` if it has one of the types `kinds`, None where it is absent or null; else ValueError with file and key.

    `allowed` says in words what is expected.
    """
    value = entries.get(key)
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if value is not None and type(value) not in kinds:
        raise ValueError(f"{file}: {key}={str(value)[:80]!r} is of type {type(value).__name__}; expected {allowed}")
    return value


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
             stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "of another kind")
