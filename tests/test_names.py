"""Names: no two classes of the package share one, and what the documentation calls is exported where editors see it."""
import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm import advantages, objectives

ROOT = Path(jaxrl_llm.__file__).parent


def classes(body: list[ast.stmt]) -> list[str]:
    """The names of the classes of a module, those under a condition included."""
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.If | ast.Try):
            found += classes([*node.body, *node.orelse])
    return found


def test_a_name_stands_for_one_class():
    places = defaultdict(list)
    for file in sorted(ROOT.rglob("*.py")):
        for name in classes(ast.parse(file.read_text(encoding="utf-8")).body):
            if not name.startswith("_"):
                places[name].append(file.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert twice == {}, "give these classes names that tell them apart"


@pytest.mark.parametrize("room", [advantages, objectives], ids=lambda room: room.__name__)
def test_what_pages_call_by_name_is_exported(room):
    pages = [ROOT.parent / "README.md", *(ROOT.parent / "docs").rglob("*.md"), *(ROOT.parent / "notebooks").glob("*.ipynb")]
    called = {name for page in pages for name in re.findall(rf"\b{room.__name__.split('.')[1]}\.([a-z_0-9]+)\(",
                                                              page.read_text(encoding="utf-8"))}
    assert {"make", "names"} & called and called <= {*room.__all__, "reshape"}


def test_the_face_is_what_editors_see_and_loads_nothing():
    """Editors read the imports, and Python the table."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    seen = {one.name: f"{node.module}.{one.name}" for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxrl_llm") for one in node.names}
    table = {name: place.replace(":", ".") for name, place in jaxrl_llm._PLACES.items()}
    assert table == seen and [*table] == jaxrl_llm.__all__
    for name in jaxrl_llm.__all__:
        found = getattr(jaxrl_llm, name)
        assert getattr(found, "__module__", found.__name__).startswith("jaxrl_llm."), name
    assert {*jaxrl_llm.__all__} <= {*dir(jaxrl_llm)}
    with pytest.raises(AttributeError, match="has no attribute 'Rollout'"):
        jaxrl_llm.Rollout
    loaded = "import sys, jaxrl_llm; print({'jax', 'numpy', 'ml_collections'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_glossary_is_short():
    """One table of one sentence for each word, no longer than a reader can hold."""
    page = (ROOT.parent / "docs" / "concepts.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*(\w+)\*\* \| ([^|]+) \| ([^|]*)\|$", page.split("\n## ")[1], re.MULTILINE)
    assert 20 <= len(words) <= 25 and len({word for word, _, _ in words}) == len(words)
    assert all(len(meaning.split()) <= 25 for _, meaning, _ in words)
