"""Reads the header of a GGUF file: sizes are checked against the file's own before its library makes anything of them."""
import math
import mmap
import struct
from pathlib import Path
from typing import Any

ELEMENTS = 1 << 22  # of all arrays together: the library needs microseconds for each, a large vocabulary has a third of that
TENSORS = 1 << 18
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type of a value -> bytes
_UINT32, _STRING, _ARRAY = 4, 8, 9


def reader(path: str | Path) -> Any:
    """The library's `GGUFReader` of a file. Raises ValueError for what is no GGUF file or not a whole one."""
    from gguf import GGUFReader

    size = Path(path).stat().st_size
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is not a readable GGUF file of {size} bytes ({error}); "
                         "if its download was cut short, fetch it again") from error


def contents(reader: Any, path: str | Path) -> dict[str, Any]:
    """The metadata of a file by key. Raises ValueError for texts that are not UTF-8."""
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds metadata that is no text in UTF-8 ({error})") from error


class _Header:
    """A walk through the header; each read checks that the file has the bytes."""

    def __init__(self, data: mmap.mmap):
        self._data, self._at, self._elements = data, 4, 0
        self._order = "<"

    def check(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("GGUF magic invalid")
        if self._number("I") & 65535 == 0:  # made by a machine of the other order of bytes
            self._order = ">"
        tensors, entries, alignment = self._number("Q"), self._number("Q"), 32
        if tensors > TENSORS or tensors * 24 + entries * 13 > len(self._data):
            raise ValueError(f"it names {tensors} tensors and {entries} entries of metadata, more than it can hold")
        for _ in range(entries):
            key, kind = self._string(), self._number("I")
            if key == b"general.alignment" and kind == _UINT32:
                alignment = struct.unpack_from(f"{self._order}I", self._data, self._skip(0, 4))[0]
            self._value(kind, 0)
        ends = [self._tensor() for _ in range(tensors)]
        start = -(-self._at // max(alignment, 1)) * max(alignment, 1)
        for name, offset, length in ends:
            if start + offset + length > len(self._data):
                raise ValueError(f"the tensor {name[:80]!r} ends at byte {start + offset + length}")

    def _skip(self, count: int, needed: int = 0) -> int:
        """Goes on by `count` bytes; where it was. ValueError unless so many, or `needed`, are there."""
        at = self._at
        if at + max(count, needed) > len(self._data):
            raise ValueError(f"it ends amid its header, of which {at + max(count, needed)} bytes are needed")
        self._at += count
        return at

    def _number(self, form: str) -> int:
        return struct.unpack_from(self._order + form, self._data, self._skip(struct.calcsize(f"={form}")))[0]

    def _string(self) -> bytes:
        length = self._number("Q")
        at = self._skip(length)
        return self._data[at:at + length]

    def _value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind != _ARRAY:
            self._skip(_size_of(kind))
        elif depth > 3:
            raise ValueError("its metadata has arrays of arrays of arrays of arrays")
        else:
            inner, count = self._number("I"), self._number("Q")
            self._elements += count
            if self._elements > ELEMENTS:
                raise ValueError(f"its metadata has arrays of {self._elements} values or more; at most {ELEMENTS} are read")
            if inner in (_STRING, _ARRAY):
                for _ in range(count):
                    self._value(inner, depth + 1)
            else:
                self._skip(count * _size_of(inner))

    def _tensor(self) -> tuple[bytes, int, int]:
        """Name, place and bytes of a tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._string(), self._number("I")
        if dimensions > 8:
            raise ValueError(f"the tensor {name[:80]!r} has {dimensions} dimensions")
        shape = [self._number("Q") for _ in range(dimensions)]
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("I"))]
        return name, self._number("Q"), math.prod(shape) * size // block


def _size_of(kind: int) -> int:
    if kind not in _SCALARS:
        raise ValueError(f"its metadata has a value of the unknown type {kind}")
    return _SCALARS[kind]
