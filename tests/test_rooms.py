"""Imports point down: a room of the package imports rooms before it in `ROOMS`, and no files import each other in a circle."""
import ast
import graphlib
from pathlib import Path

import jaxrl_llm

ROOT = Path(jaxrl_llm.__file__).parent
ROOMS = """
tools maths
kernels models tokenizers
sandbox rewards tasks data parallel environments
control objectives values advantages
evaluation engines topologies recorders replay methods
learning sampling planning store setup runs
commands compare show diagnostics serving
audits contrib
""".split()


def imported(file: Path) -> set[str]:
    """The rooms that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jaxrl_llm":
            names = [f"jaxrl_llm.{one.name}" for one in node.names] if node.module == "jaxrl_llm" else [node.module]
        else:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("jaxrl_llm.")}
    return found & {*ROOMS}


def test_imports_point_down():
    upward, rooms = set(), set()
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT)
        room = place.parts[0].removesuffix(".py")
        if room in ("__init__", "experiments", "configs"):  # the face of the package, and what stands above it
            continue
        rooms.add(room)
        assert room in ROOMS, f"{place} lies in a room without a place in the order of {Path(__file__).name}"
        upward |= {(place.as_posix(), other) for other in imported(file) if ROOMS.index(other) > ROOMS.index(room)}
    assert rooms == {*ROOMS}
    assert upward == set(), "these imports point up; move what they need below, or pass it as an argument"


def modules(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of the package that a module imports, wherever in it, but for the packages that it lies in."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {inner if (inner := f"{node.module}.{one.name}") in known else node.module for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return {other for other in found & known if not f"{name}.".startswith(f"{other}.")}


def test_no_files_import_each_other_in_a_circle():
    files = {".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): file
             for file in ROOT.rglob("*.py")}
    imports = {name: modules(name, ast.parse(file.read_text(encoding="utf-8")), {*files}) for name, file in files.items()}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
