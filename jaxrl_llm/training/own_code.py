"""The locations of a run's code outside this package, recorded with the run and imported again with it."""
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrl_llm import advantages, control, objectives, registry, rewards, tasks

_PACKAGE = __name__.partition(".")[0]
_TABLES: tuple[dict[str, registry.Factory], ...] = (
    advantages.base.ESTIMATORS, objectives.base.OBJECTIVES, control.base.CONTROLLERS, control.base.FILTERS, rewards.FACTORIES,
    tasks.FACTORIES)


def origins() -> list[str]:
    """The configuration files of the command line, as absolute paths, and the modules that registered parts, by name."""
    files = []
    if flags.FLAGS.is_parsed():
        own = [flags.FLAGS[name] for name in flags.FLAGS if "." not in name]  # other flags change single values
        given = [flag for flag in own if isinstance(flag.value, ConfigDict)]
        names = (config_flags.get_config_filename(flag).partition(".py:") for flag in given)  # a variant is not a file
        files = [str(Path(name + ".py" * bool(colon)).expanduser().absolute()) for name, colon, _ in names]
    modules = {factory.__module__ for table in _TABLES for factory in table.values()} - {"__main__"}
    others = [name for name in sorted(modules) if name.partition(".")[0] != _PACKAGE and _file(name) not in map(Path, files)]
    return files + [name for name in others if _file(name) is not None]


def load(names: Iterable[str]) -> None:
    """Imports the files and modules named by `origins` that this process lacks; warns about missing ones."""
    for name in names:
        try:
            if not name.endswith(".py"):
                importlib.import_module(name)
            elif Path(name) not in {_file(module) for module in list(sys.modules)}:
                _import_file(Path(name))
        except (ImportError, FileNotFoundError) as error:
            warnings.warn(f"the code of this run, {name}, cannot be imported ({error}); what it registered is unknown",
                          RuntimeWarning, stacklevel=2)


def _file(module: str) -> Path | None:
    """The source of an imported module."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).absolute() if file else None


def _import_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"own_code_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # for every name that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
