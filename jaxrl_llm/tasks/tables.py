"""Rows of data sets as dicts of plain Python values: JSONL files, Hugging Face `datasets`, TFDS builders."""
import csv
import glob
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.tasks import jsonl
from jaxrl_llm.tasks.base import optional
from jaxrl_llm.tools.files import expanded

TFDS = "tfds:"  # in front of the name of a TFDS builder
_READERS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".csv": "csv", ".jsonl": "jsonl"}

Row = dict[str, Any]


class Table(NamedTuple):
    """`rows`, the `columns` that they have, and in words the `place` of row i."""

    rows: Sequence[Row]
    columns: list[str]
    place: Callable[[int], str]


def is_file(path: str) -> bool:
    """Whether a path names a file or a pattern of files, not a data set of several splits."""
    return _ending(path) in _READERS


def _ending(path: str) -> str:
    """The ending of a file's name, without that of its compression."""
    return Path(Path(path).stem if Path(path).suffix in jsonl.PACKED else path).suffix


def read(path: str, split: str, *, subset: str | None = None, data_dir: str | None = None, limit: int | None = None,
         streaming: bool = False) -> Table:
    """The first `limit` rows (None: all) of a split; for a file, which has no splits, `split` names a part, `train[:10%]`.

    `path`: see `dataset`. With `streaming` only the rows that are read are downloaded.

    Raises:
      ValueError: a missing data set, subset or split, a TFDS builder that is not prepared, no rows.
      FileNotFoundError: no such file.
    """
    if path.startswith(TFDS):
        if streaming or subset:
            raise ValueError(f"{path} is read from prepared files: streaming and subset are for Hugging Face data sets; write "
                             f"a configuration as {TFDS}name/configuration")
        rows: Iterable[Row] = map(_plain, _tfds(path.removeprefix(TFDS), data_dir, split))
    elif _ending(path) == ".jsonl" and not streaming and split == "train":
        lines = [(f"{file}, line {number}", row) for file in _files(str(expanded(path)))
                 for number, row in jsonl.read(file)][:limit]
        return Table([row for _, row in lines], _columns(row for _, row in lines), lambda i: lines[i][0])
    else:
        rows = _hugging_face(path, split, subset, data_dir, streaming)
    limited = list(itertools.islice(rows, limit))
    if not limited:
        raise ValueError(f"split {split!r} of {path} has no rows; give another split, or a larger limit")
    return Table(limited, _columns(limited), lambda i: f"{path}, split {split!r}, row {i}")


def _columns(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _hugging_face(path: str, split: str, subset: str | None, data_dir: str | None, streaming: bool) -> Iterable[Row]:
    datasets, folder = optional("datasets", "data"), expanded(path)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        saved = datasets.load_from_disk(str(folder))
        splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        if split not in splits:
            raise ValueError(f"{path} was saved without a split {split!r}; it has {sorted(splits)}")
        return splits[split]
    try:
        if is_file(path):
            kind = _READERS[_ending(path)].removesuffix("l")
            options = _as_text(datasets, str(folder)) if kind == "csv" else {}
            return datasets.load_dataset(kind, data_files=str(folder), split=split, streaming=streaming, **options)
        if folder.is_file():
            raise ValueError(f"its ending is unknown; files end in one of {', '.join(_READERS)}, and may be compressed, with "
                             f"{', '.join(jsonl.PACKED)} behind it")
        name = str(folder) if folder.is_dir() else path
        kinds = {_ending(str(file)): str(file) for file in folder.rglob("*")} if folder.is_dir() else {}
        options = _as_text(datasets, kinds[".csv"]) if _READERS.keys() & kinds.keys() == {".csv"} else {}
        return datasets.load_dataset(name, subset, data_dir=data_dir, split=split, streaming=streaming, **options)
    except ConnectionError as error:
        raise ValueError(f"cannot read the data set {path!r}: {error}. Check the name and the network; on a machine without "
                         "one, download it elsewhere and give its folder") from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(f"no data set {path!r}: {error}. Give a name of the Hub, a folder, a file that ends in one of "
                         f"{', '.join(_READERS)}, or {TFDS}BUILDER") from error
    except ValueError as error:  # of splits and subsets: it names those that there are
        raise ValueError(f"data set {path!r}, subset {subset!r}, split {split!r}: {error}") from error


def _files(pattern: str) -> list[str]:
    """The files that a pattern stands for, in the order of their names; the pattern itself if there are none."""
    return sorted(glob.glob(pattern)) or [pattern]


def _as_text(datasets, pattern: str) -> dict[str, Any]:
    """Options by which the cells of CSV files are the texts of the file: `01` stays, and so does `NA`."""
    with jsonl.opened(_files(pattern)[0]) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as lines:
        names = next(csv.reader(lines), [])
    return {"features": datasets.Features({name: datasets.Value("string") for name in names}), "keep_default_na": False}


def _tfds(builder: str, data_dir: str | None, split: str) -> Iterable[Row]:
    tensorflow_datasets = optional("tensorflow_datasets", "data")
    try:
        prepared = tensorflow_datasets.builder(builder, data_dir=data_dir)
    except tensorflow_datasets.core.DatasetNotFoundError as error:
        raise ValueError(f"no TFDS builder {builder!r} (data_dir={data_dir}); check the spelling, import the module "
                         "that defines it, or give the data_dir it was prepared in") from error
    how = f"prepare it with: tfds build {prepared.name} --file_format=array_record"
    if not prepared.is_prepared():
        raise ValueError(f"TFDS builder {prepared.name!r} is not prepared in {prepared.data_path}; {how}")
    if prepared.info.file_format.value != "array_record":
        raise ValueError(f"TFDS builder {prepared.name!r} is prepared as {prepared.info.file_format.value}, which cannot be "
                         f"read without TensorFlow; {how}")
    try:
        empty = not prepared.info.splits[split].num_examples
    except (KeyError, ValueError) as error:
        raise ValueError(f"TFDS builder {prepared.name!r} has no split {split!r}; it has "
                         f"{sorted(prepared.info.splits)}") from error
    return () if empty else prepared.as_data_source(split)


def _plain(value: Any) -> Any:
    """A value of TFDS without bytes and NumPy's types."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.decode("utf-8") if isinstance(value, bytes) else value
