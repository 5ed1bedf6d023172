"""No two classes of the package have one name, so that a name says what a thing is wherever it is read."""
import ast
from collections import defaultdict
from pathlib import Path

import jaxrl_llm

ROOT = Path(jaxrl_llm.__file__).parent
# A name may leave this set, and none may enter it.
TWICE = {"Mixed", "Weights", "Worker"}


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
    entered = {name: files for name, files in twice.items() if name not in TWICE}
    assert entered == {}, "give these classes names that tell them apart"
    assert TWICE - {*twice} == set(), "these names stand for one class now: take them out of TWICE"
