"""Imports point down: a room of the package imports rooms before it in `ROOMS`, and `UPWARD` names the arrows left to turn."""
import ast
from pathlib import Path

import jaxrl_llm

ROOT = Path(jaxrl_llm.__file__).parent
ROOMS = """
files gguf_header lifetime memo ranges registry visible
masked segments trees draws descent
tokenizers tasks columns rollouts turn_info forest
kernels models packing
evaluation parallel experts
sandbox rewards environments
control objectives values advantages
generation topologies recorders replay methods
figures training
cli command_line compare show diagnostics search serving
""".split()
# File and the room above it. A file may leave this table, and none may enter it.
UPWARD = {
    ("environments/audit.py", "command_line"), ("environments/audit.py", "training"), ("environments/replay.py", "training"),
    ("evaluation/outer_step.py", "command_line"), ("evaluation/outer_step.py", "training"),
    ("objectives/aggregation.py", "advantages"), ("rewards/box.py", "advantages"), ("tasks/columns.py", "rewards"),
    ("tokenizers/loading.py", "models"),
}


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
    assert upward - UPWARD == set(), "these imports point up; move what they need below, or pass it as an argument"
    assert UPWARD - upward == set(), "these imports no longer point up: take them out of UPWARD"
