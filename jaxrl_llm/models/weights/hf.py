"""Reads Hugging Face directories: `config.json` and safetensors, in one file or in shards with their index."""
import dataclasses
import functools
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.models.weights import layout
from jaxrl_llm.models.weights.config_json import config_from
from jaxrl_llm.tools import files

_IGNORED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)(vision_tower|multi_modal_projector|visual)\.")
_DTYPES = ("F64", "F32", "F16", "BF16")  # those whose numbers are the weights themselves


def opened(directory: Path) -> layout.OpenCheckpoint:
    """A directory with `config.json` and safetensors, checked against each other."""
    config_file = directory / "config.json"
    described = files.read_object(directory, config_file.name)
    if described is None:
        raise FileNotFoundError(f"{directory} has no config.json; give a directory with config.json and safetensors")
    config = config_from(described, config_file)
    tensors = _Tensors(directory)
    layout.check_count(config, len(tensors.file_of), "tensors", config_file)
    prefix = tensors.prefix()
    unembedding = _stored_name(prefix, "lm_head.weight")
    wanted = {_stored_name(prefix, place.hf.name): place.shape_of(place.hf) for place in layout.places(config)}
    if unembedding in tensors.file_of:  # some files repeat the tied embedding
        wanted[unembedding] = (config.vocab_size, config.hidden_size)
    layout.check_nothing_left({name for name in tensors.file_of if not _IGNORED.search(name)} - wanted.keys(), directory)
    for name, shape in wanted.items():
        tensors.check(name, shape)
    if config.tie_embeddings and unembedding in tensors.file_of:  # as in transformers, tied only if both are equal
        embedding = _stored_name(prefix, "model.embed_tokens.weight")
        config = dataclasses.replace(config, tie_embeddings=tensors.equal(embedding, unembedding))
        if not config.tie_embeddings:
            warnings.warn(f"{config_file}: tie_word_embeddings is true, but {tensors.file_of[unembedding]} holds an "
                          f"unembedding {unembedding!r} of other values than the embedding; it is used, and the two are "
                          "not tied", stacklevel=5)

    def read(place, index):
        name = _stored_name(prefix, place.hf.name)
        return layout.finite(name, place.hf.read(tensors.find(name), place.shape[0], index), tensors.file_of[name])

    return layout.OpenCheckpoint(config, functools.partial(layout.assemble, config, read))


def read_json(file: Path) -> dict:
    """The object in a JSON file; ValueError with its name where it holds none."""
    content = files.read_object(file.parent, file.name)
    if content is None:
        raise FileNotFoundError(f"{file} does not exist")
    return content


def _other_formats(directory: Path) -> str:
    """What to do about weights in a format that is not read; empty where there are none."""
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in directory.glob(pattern))
    if not pickled:
        return ""
    return (f"; {pickled[0]} is a pickle file, which runs code when it is read. Where you trust it, convert it: python -c "
            f"\"import transformers as t; t.AutoModelForCausalLM.from_pretrained('{directory}', "
            f"dtype='auto').save_pretrained('{directory}')\"")


def _stored_name(prefix, name):
    """Name of a tensor in files that call the embedding `{prefix}embed_tokens.weight`."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight" if prefix == "language_model.model." else name
    return prefix + name.removeprefix("model.")


def safetensors_of(file: Path) -> Any:
    """A safetensors file whose tensors are read one by one. Raises ValueError for a file that is none."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, "numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file ({error}); if its download "
                         "was cut short, fetch it again") from error


class _Tensors:
    """The named tensors of a directory's safetensors files, read in parts on demand."""

    def __init__(self, directory: Path):
        self.directory, self._open = directory, {}
        single, index = files.regular(directory, "model.safetensors", limit=None), "model.safetensors.index.json"
        if single is not None:
            self.file_of = {name: single for name in self._opened(single).keys()}
        elif (described := files.read_object(directory, index)) is not None:
            names = files.typed(described, "weight_map", dict, directory / index, "an object of files by tensor") or {}
            self.file_of = {name: directory / files.typed(names, name, str, directory / index, "the name of a file")
                            for name in names if names[name] is not None}
        else:
            raise FileNotFoundError(f"{directory} has neither model.safetensors nor model.safetensors.index.json"
                                    + _other_formats(directory))

    def _opened(self, file):
        if file not in self._open:
            if files.regular(self.directory, os.path.relpath(file, self.directory), limit=None) is None:
                raise FileNotFoundError(f"{file} is named by the index but is not there; fetch the checkpoint again")
            self._open[file] = safetensors_of(file)
        return self._open[file]

    def prefix(self) -> str:
        """What stands before `embed_tokens`: `model.`, nothing, or the text part of a multimodal model."""
        for name in self.file_of:
            if name.endswith("embed_tokens.weight"):
                return name.removesuffix("embed_tokens.weight")
        raise ValueError(f"tensor 'model.embed_tokens.weight' is missing from {self.directory}, "
                         f"which holds {len(self.file_of)} tensors")

    def find(self, name):
        """A tensor that can be read in parts."""
        if name not in self.file_of or name not in self._opened(self.file_of[name]).keys():
            raise ValueError(f"tensor {name!r} is missing from {self.file_of.get(name, self.directory)}; "
                             f"{self.directory} holds {len(self.file_of)} tensors")
        return self._opened(self.file_of[name]).get_slice(name)

    def check(self, name, shape):
        """Raises ValueError unless the tensor is there, in this shape and in a dtype whose numbers are the weights."""
        tensor = self.find(name)
        layout.check_shape(name, tensor.get_shape(), shape, self.file_of[name])
        if tensor.get_dtype() not in _DTYPES:
            raise ValueError(f"tensor {name!r} in {self.file_of[name]} holds {tensor.get_dtype()}, numbers of a quantised "
                             f"model that mean nothing without their scales; supported: {', '.join(_DTYPES)}")

    def equal(self, one, other, rows: int = 4096) -> bool:
        """Whether two tensors of one shape hold the same numbers, compared a few `rows` at a time."""
        one, other = self.find(one), self.find(other)
        count = one.get_shape()[0]
        parts = [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
        return all(np.array_equal(one[part], other[part]) for part in parts)
