"""The folder of one run: its configuration, and whether a new process may start or continue it."""
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections

from jaxrl_llm import methods, parallel
from jaxrl_llm.methods import composition
from jaxrl_llm.objectives import sums
from jaxrl_llm.store import bucket, own_code
from jaxrl_llm.store.bucket import AnyPath
from jaxrl_llm.store.bucket import steps_in as checkpoint_steps
from jaxrl_llm.store.lock import Held, at_home, writing
from jaxrl_llm.tools import files

SCHEMA_VERSION = 4
_SINCE_3 = ("filters", "topology", "recorders", "replay_estimator", "replay_objective", "phases", "stages")  # keys
_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "ml-collections", "numpy")


class Workdir(NamedTuple):
    """A checked run folder; `resume` says that a checkpoint exists and the run must continue from it.

    `config` is the resolved configuration, `earlier` that of the folder, if there is one. `held`: where its parts lie.
    `parts`: the texts of the method's parts, by key; a row of one's own may have changed between two starts.

    Nothing is written before `record()`: a resume that fails earlier leaves the folder unchanged.
    """

    held: Held
    resume: bool
    config: dict[str, Any]
    changes: list[str]
    earlier: dict[str, Any] | None = None
    parts: Mapping[str, str] = types.MappingProxyType({})

    @property
    def path(self) -> AnyPath:
        return self.held.path

    @property
    def checkpoints(self) -> AnyPath:
        return self.held.weights / "checkpoints"

    def record(self) -> None:
        """Writes the configuration (config.json; an older one is kept) and the software versions (environment.json)."""
        path = self.held.folder
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if self.changes:
                warnings.warn(
                    f"resuming {self.path} with a changed configuration: {_list(self.changes)}", RuntimeWarning, stacklevel=2)
                earlier = files.read_object(path, "config.json")
                _write_json(path / f"config.{sum(1 for _ in path.glob('config.*.json'))}.json", earlier)
            if self.changes or not (path / "config.json").exists():  # replaced in one piece: a full disk leaves the old one
                _write_json(path / "config.json", {"schema_version": SCHEMA_VERSION, "config": self.config})
            starts = starts_of(path)
            if other := self.other_parts(starts):
                warnings.warn(f"resuming {self.path} with parts of the method {self.config.get('method', '')!r} that changed "
                              f"since its last start: {_list(other)}", RuntimeWarning, stacklevel=2)
            _write_json(path / "environment.json", {"starts": [*starts, describe_environment() | {"parts": dict(self.parts)}]})
        self.held.write()

    def other_parts(self, starts: Sequence[Mapping[str, Any]]) -> list[str]:
        """The parts that differ from those of the last of these starts, although no key of the configuration says so.

        A key of the whole run says it of each phase, whose parts stand behind its name.
        """
        before = starts[-1].get("parts", self.parts) if starts and self.resume else self.parts
        said = {change.partition(":")[0] for change in self.changes}
        if said & {"method", "phases"}:
            return []
        return [change for change in config_changes(dict(before), dict(self.parts))
                if change.partition(":")[0].rpartition(".")[2] not in said]


def folder_of(path: str | os.PathLike) -> AnyPath:
    """A workdir as an absolute path; ValueError for most URLs, and for characters with which checkpoints could not be read."""
    folder = bucket.place(path)
    if special := [part for part in folder.parts if set("*?[\\") & {*part} or part in ("gs:", "s3:")]:
        raise ValueError(f"workdir {str(folder)!r}: orbax, which writes the checkpoints, reads {special[0]!r} as a pattern or "
                         "an address; take a folder without *, ?, [ and backslash, and none named gs: or s3:")
    return folder


def open_workdir(place: str | Path | Held, config: ml_collections.ConfigDict, resume: bool | str = False,
                 parts: Mapping[str, str] = types.MappingProxyType({})) -> Workdir:
    """Checks the folder of a run, new or old, against `config`; `record()` then writes the run's records.

    place: the folder as `lock.locked` has it, or a local one.

    resume: False starts a run and refuses a folder that already has checkpoints; True continues one, also with a
    changed configuration (the change is reported, the old file kept); "auto" continues if there is something to
    continue and starts otherwise, for launchers that restart a preempted job.

    parts: the texts of the method's parts, which the folder records; `record()` warns if they are others than those before.

    Raises FileExistsError (checkpoints, but no resume), FileNotFoundError (resume=True and nothing to resume),
    ValueError (folder of another configuration), TypeError (a configuration value JSON cannot hold); `record()` OSError
    (cannot be written).
    """
    if resume not in (True, False, "auto"):
        raise ValueError(f"resume={resume!r}; allowed: True, False, 'auto'")
    held = place if isinstance(place, Held) else at_home(folder_of(place))
    path, resolved = held.path, resolve_config(config)
    has_checkpoints = bool(checkpoint_steps(held.weights / "checkpoints"))
    if resume is True and not has_checkpoints:
        raise FileNotFoundError(f"nothing to resume: no checkpoint in {path}; start without --resume or correct --workdir")
    stored = read_config(held.folder / "config.json")
    if stored is not None and has_checkpoints and resume:
        _check_scale(path, stored, resolved)
    changes = [] if stored is None else config_changes(stored, resolved)
    if changes and resume is not True:
        raise ValueError(f"{path} belongs to a run of another configuration ({_list(changes)}). Choose another --workdir"
                         + (", or continue that run with the new values: --resume" if has_checkpoints else " or delete it"))
    if has_checkpoints and resume is False:
        raise FileExistsError(f"{path} holds checkpoints of this configuration; continue with --resume, "
                              "start afresh in another --workdir, or delete the folder")
    return Workdir(held, has_checkpoints, resolved, changes, stored, parts)


def check_agreement(work: Workdir) -> None:
    """Waits for all processes. Raises ValueError if their configurations differ or they see different folders."""
    steps = checkpoint_steps(work.checkpoints) if work.resume else []
    seen = parallel.gather_objects({"configuration": work.config, "checkpoints": steps})
    different = [name for name in seen[0] if any(one[name] != seen[0][name] for one in seen)]
    if different:
        raise ValueError(f"the processes of this job differ in {' and '.join(different)}: start them with the same options, in "
                         f"a workdir that all of them see ({work.path} is not, or is shown late)")


@contextlib.contextmanager
def records(work: Workdir) -> Iterator[Path]:
    """The folder for this process's metrics, curves and samples: the run folder, or for other processes a temporary one."""
    if parallel.is_primary():
        yield work.held.folder
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def resolve_config(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The configuration as sorted JSON values with references resolved; TypeError names a value that JSON cannot hold."""
    plain = config.copy_and_resolve_references().to_dict()
    for key, value in _flatten(plain).items():
        try:
            json.dumps(value)
        except TypeError:
            raise TypeError(f"config.{key} is a {type(value).__name__} ({value!r}); configurations hold numbers, strings, "
                            "booleans, None, lists and dicts: name the thing by a string") from None
    return json.loads(json.dumps(plain, sort_keys=True))


def config_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differing keys of two resolved configurations as "a.b: old -> new", sorted."""
    old, new = _flatten(old), _flatten(new)

    def show(values: dict[str, Any], key: str) -> str:
        return json.dumps(values[key]) if key in values else "(absent)"

    return [f"{key}: {show(old, key)} -> {show(new, key)}"
            for key in sorted(old.keys() | new.keys())
            if show(old, key) != show(new, key)]


def load_code(folder: Path) -> None:
    """Imports the code that the run in `folder` was last started with, see `own_code`."""
    for start in starts_of(folder)[-1:]:
        own_code.load(start.get("code", ()), folder)


def describe_environment() -> dict[str, Any]:
    """Time, place and package versions of this process."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None  # running from a source tree
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
        "arguments": sys.argv,
        "code": own_code.origins(),
    }


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def what_to_free(path: Path) -> str:
    """For a full disk: the free space, the contents of the run folder `path`, and parts that the run does not need."""
    def size(folder):
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    left = [str(folder.relative_to(path)) for folder in sorted(path.glob("*/abandoned"))]
    parts = ", ".join(f"{name} {size(path / name):,.1f} MB" for name in ("samples", "tensorboard", *left, "checkpoints")
                      if (path / name).is_dir())
    return (f"{shutil.disk_usage(path).free / 1e6:,.1f} MB are free in {path}, which holds {parts}. Free some space "
            "(a continued run does not need samples, tensorboard and what is abandoned), then continue with --resume")


def read_config(path: Path) -> dict[str, Any] | None:
    """The configuration in the `config.json` of a run; None if there is no such file. Raises ValueError for other contents."""
    if not path.exists():
        return None
    try:
        content = files.read_object(path.parent, path.name) or {}
        version, config = content["schema_version"], content["config"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is no run configuration ({error}); restore it or choose another --workdir") from error
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ValueError(
            f"{path} has schema version {version}, this release reads 1 to {SCHEMA_VERSION}; use the release that "
            "wrote it (environment.json beside it) or choose another --workdir")
    return current(version, config)


def current(version: int | None, config: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration as it is now.

    Runs of version 1 have alpha / rank in A: their adapters have alpha = rank. Up to version 2 `controllers` was `control`,
    and the parts under `_SINCE_3` were those of the method; divergences, entropy bonuses and the balance of experts were
    numbers of objectives and of the learner. Up to version 3 every divergence replaced that of the row.
    """
    lora = config.get("lora", {})
    if version == 1 and lora.get("rank"):
        config = config | {"lora": lora | {"alpha": float(lora["rank"])}}
    if version in (1, 2) and "control" in config:
        renamed = {"controllers" if key == "control" else key: value for key, value in config.items()}
        config = dict.fromkeys(_SINCE_3, "") | renamed
    if version in (1, 2):
        return _with_terms(config)
    return _with_one_divergence(config) if version == 3 else config


def _with_one_divergence(config: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration whose objective names what its divergences replaced; as it is, if it has no row of the catalogue.
    """
    text = config.get("objective", "")
    if "+" not in text or config.get("method") not in methods.METHODS:
        return config
    return config | {"objective": composition.with_one_of_a_kind(methods.get(config["method"]), text)}


def _with_terms(config: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration whose objective has terms in place of the numbers of before."""
    if "objective" in config:
        config = config | {"objective": sums.renewed(config.get("method", ""), config["objective"])}
    if "balance" not in config.get("learner", {}):
        return config
    learner = dict(config["learner"])
    weight = learner.pop("balance")
    added = f" + balance({weight})" if weight else ""
    return config | {"objective": f"{config['objective']}{added}".strip(), "learner": learner}


def _check_scale(path: AnyPath, stored: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ValueError where the adapters of a run would be scaled by another alpha than that of their training."""
    was, now = stored.get("lora", {}), new.get("lora", {})
    if was.get("rank") and was["rank"] == now.get("rank") and was["alpha"] != now["alpha"]:
        raise ValueError(
            f"the adapters of {path} were trained with lora.alpha={was['alpha']}, and lora.alpha={now['alpha']} would make "
            f"another policy of them; continue with --config.lora.alpha={was['alpha']}. (Runs of earlier versions keep "
            "alpha / rank in A: the alpha that belongs to their adapters is the rank.)")


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """The records of `describe_environment` at each start of the run in `folder`."""
    try:
        return (files.read_object(folder, "environment.json") or {})["starts"]
    except (OSError, ValueError, KeyError, TypeError):  # only a record: a damaged one must not stop the run
        return []


def _write_json(path: Path, content: Any) -> None:
    """Writes beside the target and renames, so that a full disk never leaves a partial file."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "w") as file:
            json.dump(content, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _list(changes: list[str]) -> str:
    return "; ".join(changes[:12]) + (f"; and {len(changes) - 12} more" if len(changes) > 12 else "")
