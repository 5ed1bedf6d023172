"""Limits that reviews would otherwise check: lengths of functions, suppressed warnings, Python's loops over tokens."""
import ast
import io
import json
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCREEN, LIMIT = 60, 100  # lines of a function: in the package, and anywhere
FOLDERS = ("jaxrl_llm", "experiments", "tests", "scripts", "configs", "notebooks")
ORDERS = set("""Add Answer Append Apply Assert Build Call Change Check Close Collect Compare Compute Confine Convert Create Cut
Delete Draw Drop End Ensure Enter Fill Find Fork Get Give Import Keep Kill Load Make Move Parse Print Put Raise Read Remove
Repeat Replace Return Run Save Send Serve Set Standardise Start Stop Take Update Wait Write""".split())


def lengths(text):
    """`(lines, name)` of each function; decorators do not count."""
    return [(node.end_lineno - node.lineno + 1, node.name) for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_of(path):
    """The Python text of a file, or of each cell of code of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return [text]
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def suppressions(text):
    """Lines whose comments silence the linter."""
    return [token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT and "noqa" in token.string.lower()]


def one_by_one(text):
    """Lines that convert the numbers of a sequence one by one, which takes long for tokens, instead of an array at once."""
    def is_int(node):
        return isinstance(node, ast.Name) and node.id == "int"

    def converts(node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "map":
            return is_int(node.args[0])
        if not isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp) or node.generators[-1].ifs:
            return False
        call, name = node.elt, node.generators[-1].target
        return (isinstance(call, ast.Call) and is_int(call.func) and isinstance(name, ast.Name)
                and [ast.dump(one) for one in call.args] == [ast.dump(ast.Name(name.id, ast.Load()))])

    return [node.lineno for node in ast.walk(ast.parse(text)) if converts(node)]


def switched_off(settings):
    """Rules that the linter's settings in `pyproject.toml` silence, each with where."""
    lint = settings["tool"]["ruff"]["lint"]
    ignored = {key: rules for key, rules in lint.items() if key in ("ignore", "extend-ignore")}
    ignored |= lint.get("per-file-ignores", {}) | lint.get("extend-per-file-ignores", {})
    return [f"pyproject.toml: {rule} in {where}" for where, rules in ignored.items() for rule in rules]


@pytest.mark.parametrize("place, most", [
    ("jaxrl_llm", SCREEN), *((folder, LIMIT) for folder in FOLDERS[1:]), ("setup.py", LIMIT)])
def test_functions_fit_a_screen(place, most):
    files = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*.py"))
    linked = {"experiments", "configs"} if place == "jaxrl_llm" else set()
    files = [path for path in files if not linked & {*path.relative_to(ROOT).parts}]
    assert len(files) > 3 or place in ("scripts", "notebooks", "setup.py")
    long = [f"{path.relative_to(ROOT)}: {name} has {lines} lines" for path in files
            for lines, name in lengths(path.read_text(encoding="utf-8")) if lines > most]
    assert not long, long


def test_lengths_are_those_of_definitions():
    assert lengths("@f\ndef g():\n    def h():\n        pass\n    return (\n        h)\n") == [(5, "g"), (2, "h")]


def test_few_warnings_are_suppressed():
    """In files, in cells of notebooks, and by the settings of the linter."""
    files = [ROOT / "setup.py", *(path for folder in FOLDERS for end in ("py", "ipynb")
                                  for path in sorted((ROOT / folder).rglob(f"*.{end}")))]
    assert sum(path.suffix == ".ipynb" for path in files) >= 7
    places = [f"{path.relative_to(ROOT)}:{line}" for path in files for text in code_of(path) for line in suppressions(text)]
    places += switched_off(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    assert 0 < len(places) < 5, places


def test_suppressions_are_counted_wherever_they_are(tmp_path):
    cell = {"cell_type": "code", "source": ["%pip install x\n", "y = 'noqa'  # NoQA: E501\n", "z = 1  # why\n"]}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{**cell, "cell_type": "markdown"}, cell, cell]}))
    assert [suppressions(text) for text in code_of(tmp_path / "a.ipynb")] == [[2], [2]]
    lint = {"select": ["E"], "ignore": ["E1"], "per-file-ignores": {"a/*": ["E2", "F"]}}
    assert switched_off({"tool": {"ruff": {"lint": lint}}}) == [
        "pyproject.toml: E1 in ignore", "pyproject.toml: E2 in a/*", "pyproject.toml: F in a/*"]


def orders(text):
    """`(name, first word)` of the functions and classes whose docstrings tell the reader to do something."""
    nodes = [node for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    firsts = [(node.name, (ast.get_docstring(node) or "-").split()[0].rstrip(".,:;")) for node in nodes]
    return [(name, word) for name, word in firsts if word in ORDERS]


def test_docstrings_say_what_functions_do():
    places = [f"{path.relative_to(ROOT)}: {name} begins with {word}" for folder in FOLDERS
              for path in sorted((ROOT / folder).rglob("*.py")) for name, word in orders(path.read_text(encoding="utf-8"))]
    assert not places, f"Ends, Waits, ... instead: {places}"


def test_orders_are_recognised():
    text = 'def f():\n    """End it."""\ndef g():\n    """Ends it."""\nclass H:\n    """\n    Wait: here."""\ndef i(): pass\n'
    assert orders(text) == [("f", "End"), ("H", "Wait")]


@pytest.mark.parametrize("package", ["engines", "learning", "sampling", "setup", "store", "runs", "tokenizers", "serving"])
def test_tokens_are_converted_as_arrays(package):
    files = sorted((ROOT / "jaxrl_llm" / package).rglob("*.py"))
    assert len(files) > 3
    places = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in one_by_one(path.read_text(encoding="utf-8"))]
    assert not places, f"np.asarray(tokens).tolist() is one call: {places}"


@pytest.mark.parametrize("text, slow", [
    ("[int(t) for t in tokens]", True), ("x.extend(int(t) for t in a.tokens)", True), ("x += map(int, ids)", True),
    ("[int(t) for row in rows for t in row]", True), ("[int(name) for name in names if name.isdecimal()]", False),
    ("[int(child.name) for child in folder]", False), ("[int(t.min()) for t in rows]", False), ("map(len, rows)", False)])
def test_loops_over_tokens_are_recognised(text, slow):
    assert one_by_one(text) == [1] * slow


WITHOUT_HOLES = {  # files that sum masks over tokens, and why that is right there
    "diagnostics/opd_alignment.py": "completions of single turns", "engines/sampler.py": "what it has just written",
    "engines/scan.py": "what a sampler has just written",
    "data/rollouts.py": "`Rollouts.lengths` is the number of trained tokens"}


def sums_of_masks(text):
    """Lines that count the trained tokens of rows, which is no length where masks have holes; prompts have none."""
    def is_mask(node):
        if isinstance(node, ast.Subscript):
            return is_mask(node.value) or is_mask(node.slice)
        if isinstance(node, ast.Call):
            return getattr(node.func, "attr", None) == "asarray" and is_mask(node.args[0])
        name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)
        return name in ("mask", "token_mask")

    calls = [node for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "sum"]
    return [call.lineno for call in calls if any(is_mask(one) for one in (call.func.value, *call.args[:1]))
            and "-1" in {ast.unparse(axis) for axis in (*call.args, *(word.value for word in call.keywords))}]


def test_numbers_of_trained_tokens_are_not_taken_for_lengths():
    places = {path.relative_to(ROOT / "jaxrl_llm").as_posix(): found for path in sorted((ROOT / "jaxrl_llm").rglob("*.py"))
              if (found := sums_of_masks(path.read_text(encoding="utf-8")))}
    assert places.keys() == WITHOUT_HOLES.keys(), f"`Rollouts.present` has all tokens, see WITHOUT_HOLES: {places}"
    for text in ("mask[valid].sum(-1)", "np.asarray(r.mask).sum(axis=-1)", "jnp.sum(r.token_mask, -1)", "a['mask'].sum(-1)"):
        assert sums_of_masks(text) == [1]
    for text in ("prompt_mask.sum(-1)", "r.present.sum(-1)", "r.mask.sum()", "np.where(r.mask, x, 0).sum(-1)"):
        assert not sums_of_masks(text)
