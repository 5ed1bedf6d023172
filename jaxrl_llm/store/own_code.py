"""The locations of a run's code outside this package, recorded with the run and imported again with it."""
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrl_llm.tools import registry
from jaxrl_llm.tools.files import expanded

_PACKAGE = __name__.partition(".")[0]
_FILE = "own_code_"  # begins the names of modules that are files imported from here, which no other process can import by name

def origins() -> list[str | dict[str, str]]:
    """The configuration files of the command line, as absolute paths, and this run's modules, each by `module` and `file`.

    These are modules that registered parts, and modules of functions that a configuration names, as "module:function". Files
    that `load` imported and that registered parts are absolute paths again.
    """
    files = []
    if flags.FLAGS.is_parsed():
        own = [flags.FLAGS[name] for name in flags.FLAGS if "." not in name]  # other flags change single values
        given = [flag for flag in own if isinstance(flag.value, ConfigDict)]
        names = (config_flags.get_config_filename(flag).partition(".py:") for flag in given)  # a variant is not a file
        files = [str(expanded(name + ".py" * bool(colon)).absolute()) for name, colon, _ in names]
    modules = {registry.module_of(entry) for table in registry.TABLES for entry in table.values()} | registry.NAMED
    others = {name: _file(name) for name in sorted(modules - {"__main__"}) if name.partition(".")[0] != _PACKAGE}
    return [*files, *(str(file) if name.startswith(_FILE) else {"module": name, "file": str(file)}
                      for name, file in others.items() if file is not None and file not in map(Path, files))]


def load(places: Iterable[str | dict[str, str]], run: Path | None = None) -> None:
    """Imports the files and modules of `origins` that this process lacks, and warns about missing ones.

    Modules come before files, which may import them. The folder of a module that is not on the path is added to the end of it.
    In earlier runs a module is a name alone. A configuration file that is no longer at its place is looked for in the folder
    `run` and in the one around it, where comparisons keep it: folders of runs move from machine to machine.
    """
    for place in sorted(places, key=lambda place: isinstance(place, str) and place.endswith(".py")):
        try:
            if isinstance(place, dict):
                _import_module(place["module"], Path(place["file"]))
            elif not place.endswith(".py"):
                importlib.import_module(place)
            elif (file := _moved(Path(place), run)) not in {_file(module) for module in list(sys.modules)}:
                _import_file(file)
        except (ImportError, FileNotFoundError) as error:
            name = place["module"] if isinstance(place, dict) else place
            warnings.warn(f"the code of this run, {name}, cannot be imported ({error}); what it registered is unknown",
                          RuntimeWarning, stacklevel=2)


def _moved(file: Path, run: Path | None) -> Path:
    """The file, or one of its name with the run if it is not there."""
    places = (file, *(() if run is None else (run / file.name, run.parent / file.name)))
    return next((place.absolute() for place in places if place.is_file()), file)


def _file(module: str) -> Path | None:
    """The source of a module that is imported, or that could be."""
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:  # of a package that holds it
            return None
        file = spec.origin if spec is not None and spec.has_location else None
    return Path(file).absolute() if file else None


def _import_module(name: str, file: Path) -> None:
    """Imports a module by its name; if that fails, with the folder that its names start from at the end of the path."""
    folder = str(file.parents[name.count(".") + (file.name == "__init__.py")])
    try:
        importlib.import_module(name)
    except ImportError:
        if not file.is_file() or folder in sys.path:
            raise
        sys.path.append(folder)
        importlib.import_module(name)


def _import_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"{_FILE}{path.stem}", path)
    assert spec is not None and spec.loader is not None  # for every name that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
