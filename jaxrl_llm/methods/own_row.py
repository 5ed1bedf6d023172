"""A row of the catalogue as a module of one's own, to change: `jaxrl_llm methods grpo --write mine.py`."""
import importlib.util
import json
import keyword
import sys
from pathlib import Path
from typing import Any

from jaxrl_llm.methods.base import Method
from jaxrl_llm.methods.texts import SLOTS

_HEAD = '''"""{title}: a row to change. It runs as it is:

    PYTHONPATH=. jaxrl_llm train --config=arithmetic --workdir=runs/{name} --config.method={name}:row

`PYTHONPATH=. jaxrl_llm methods {name}:row` prints it, and `--why` says what stands against a run of it. A part may be a
function of this file, "{name}:my_part". Further keys:
{others}.
"""
from jaxrl_llm.methods import Method

row = Method(
'''


def write(row: Method, path: Path) -> str:
    """Writes a row as the module `path`; returns the text that names it, `mine:row`.

    Raises ValueError for a path that is no module's, or of a name that another module on the path has, FileExistsError if it
    is there already.
    """
    if path.suffix != ".py" or not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise ValueError(f"{path.name} is no name of a module of Python, as which a row is written; give for example mine.py")
    if path.exists():
        raise FileExistsError(f"{path} is there already; give another name, or delete it")
    there = importlib.util.find_spec(path.stem)
    if path.stem in sys.stdlib_module_names or there is not None and there.origin is not None:
        raise ValueError(f"there is a module {path.stem!r} on the path, whose place {path.name} would take; give another name, "
                         "such as mine.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source(row, path.stem), encoding="utf-8")
    return f"{path.stem}:row"


def source(row: Method, name: str) -> str:
    """The text of a module `name` with this row: what it says of itself, and every part that it has."""
    values = {"slug": name, "title": row.title, "equation": row.equation, "arxiv": row.arxiv, "needs": row.needs,
              **{key: getattr(row, key) for key in (*SLOTS, "source", "phases")}, "defaults": dict(row.defaults),
              "omits": row.omits}
    said = {key: value for key, value in values.items() if value}
    others = ", ".join(key for key in (*SLOTS, "source", "phases") if key not in said)
    lines = [f"    {key}={_python(value)}," for key, value in said.items()]
    return "\n".join([_HEAD.format(title=row.title, name=name, others=others).rstrip("\n"), *lines, ")", ""])


def _python(value: Any) -> str:
    """A value as Python, texts in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({''.join(f'{_python(one)}, ' for one in value).rstrip()})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(key)}: {_python(one)}' for key, one in value.items())}}}"
    return repr(value)
