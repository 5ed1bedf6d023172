"""Checkpoints of adapters: one safetensors file each, found again by its address `tinker://MODEL/KIND/NAME`."""
import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.contrib.tinker.learner import LoraShape
from jaxrl_llm.models.lora import Adapters
from jaxrl_llm.tools.files import regular

KINDS = ("weights", "sampler_weights")  # to train from; to sample from
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,127}")


class AdapterCheckpoint(NamedTuple):
    """An adapter as it was saved.

    base: name of the model that it belongs to.  shape, tree: see `Adapter`.
    moments: Adam's state; None if the adapter was saved to sample from.
    """

    base: str
    shape: LoraShape
    tree: Any
    moments: Any = None


Stamp = tuple[int, int]  # number and time of change (ns) of a file, which another checkpoint in its place does not share


class Store:
    """A folder of checkpoints."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, model: str, kind: str, name: str) -> str:
        """The address. Raises ValueError for an invalid name."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name {name!r} of a checkpoint; give letters, digits, '.', '_' and '-', 128 at "
                             "most, a letter or digit first")
        return f"tinker://{model}/{kind}/{name}"

    def save(self, path: str, checkpoint: AdapterCheckpoint, overwrite: bool = False) -> None:
        """Writes a checkpoint atomically. Raises ValueError for an address that is taken."""
        file = self._file(path)
        if file.exists() and not overwrite:
            raise ValueError(f"{path} exists already; give another name, or overwrite=True")
        arrays = _named("lora", checkpoint.tree)
        if checkpoint.moments is not None:
            arrays |= _named("mu", checkpoint.moments.mu) | _named("nu", checkpoint.moments.nu)
            arrays["count"] = np.asarray(checkpoint.moments.count)
        header = json.dumps({"base": checkpoint.base, "scale": checkpoint.tree.scale, **checkpoint.shape._asdict()})
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        save_file(arrays, part, {"adapter": header})
        os.replace(part, file)

    def load(self, path: str, base: str) -> AdapterCheckpoint:
        """The checkpoint. Raises ValueError for no such address, another base, and a file that `save` did not write."""
        try:
            with safe_open(self._existing(path), "numpy") as opened:
                own, shape, scale = _header((opened.metadata() or {}).get("adapter"), path)
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}
        except (SafetensorError, TypeError) as error:
            raise ValueError(f"{path} is no readable checkpoint ({error})") from error
        if own != base:
            raise ValueError(f"{path} belongs to the model {own}, this server has {base}")
        if wrong := [name for name, x in arrays.items() if not np.isfinite(x.astype(np.float32)).all()]:
            raise ValueError(f"{path}: the tensor {wrong[0]!r} holds values that are NaN or infinite")
        moments = None
        if "count" in arrays:
            moments = optax.ScaleByAdamState(arrays["count"], _tree("mu", arrays, scale), _tree("nu", arrays, scale))
        return AdapterCheckpoint(own, shape, _tree("lora", arrays, scale), moments)

    def stamp(self, path: str) -> Stamp:
        """What tells a checkpoint from an earlier one at its address. Raises ValueError for an address that does not exist."""
        status = self._existing(path).stat()
        return status.st_ino, status.st_mtime_ns

    def _existing(self, path: str) -> Path:
        file = regular(self.folder, self._file(path).relative_to(self.folder), limit=None)
        if file is None:
            raise ValueError(f"{path} does not exist on this server; its checkpoints lie in {self.folder}")
        return file

    def _file(self, path: str) -> Path:
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS or not (
                _MODEL.fullmatch(parts[0]) and _NAME.fullmatch(parts[2])):
            raise ValueError(f"the address {path!r}; give tinker://MODEL/{' or '.join(KINDS)}/NAME")
        return self.folder / parts[0].replace(":", "_") / parts[1] / f"{parts[2]}.safetensors"


def _named(head: str, tree: Any) -> dict[str, np.ndarray]:
    return {f"{head}.{target}.{name}": np.asarray(x) for target, one in jax.device_get(tree).items() for name, x in one.items()}


def _header(text: Any, path: str) -> tuple[Any, LoraShape, float]:
    """Base, shape and scale of an adapter, as `Store.save` writes them; the A of files without a scale includes it."""
    try:
        said = json.loads(text)
        own, scale, shape = said.pop("base"), said.pop("scale", 1.0), LoraShape(**said)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: its header {str(text)[:80]!r} describes no adapter ({error!r})") from error
    if [type(value) for value in shape] != [int, bool, bool] or shape.rank < 1:
        raise ValueError(f"{path}: its header gives the adapter the shape {shape}; expected a rank from 1 on and two flags")
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        raise ValueError(f"{path}: its header gives the adapter the scale {scale!r}; expected a finite number above 0")
    return own, shape, float(scale)


def _tree(head: str, arrays: dict[str, np.ndarray], scale: float) -> Adapters:
    tree = Adapters({}, scale)
    for name, x in arrays.items():
        first, target, part = (*name.split(".", 2), "", "")[:3]
        if first == head:
            tree.setdefault(target, {})[part] = x
    return tree
