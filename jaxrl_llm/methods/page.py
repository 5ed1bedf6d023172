"""The catalogue as a Markdown page: one table per family, then the parts of `jaxrl_llm.control`."""
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence

from jaxrl_llm import control
from jaxrl_llm.methods import known_as
from jaxrl_llm.methods.base import DEFAULTS, Method
from jaxrl_llm.methods.provision import Lack

HEAD = """# Methods

Written by `python -m jaxrl_llm.methods --write docs/methods.md`; do not edit by hand.

*Setting* lists the paper's settings outside the loss: {names}. A run reads `epochs` and `minibatches` from this column
if its configuration leaves them 0 (1 if the row has none), `pretrain_steps` if that is -1 and `budget` if that is empty.
`--config.setting=paper` takes the others too, where a configuration has a key for them; without it a run prints those that
differ from its own.
*Also needs* lists the fields that a run must record, then the filters and controllers of `jaxrl_llm.control`, the rule of
`jaxrl_llm.topologies` that gives some prompts further rollouts (*allocation*), the topology that begins some completions with
traces of problems (*guidance*) and the rule of `jaxrl_llm.replay` that trains on rollouts of earlier steps again. A row with
**not provided** does not run by name everywhere: it needs these fields, and the part in brackets provides them. If that part
is an environment, a teacher or a `config.task`, the row runs with it; otherwise its estimator and objective work in your own
loop. A row with *omits* lacks that part of the published method. *known as* is followed by the names of a row in the
configurations of {peers}; `jaxrl_llm search NAME` finds it by them.
The missing fields follow from the declared needs of the parts.
"""

_FURTHER = ("source", "topology", "allocation", "guidance", "replay", "replay_estimator", "replay_objective")
NUMBERS = """## Numbers that peers name

`aggregation=` belongs to objectives of tokens, `+` adds a term to the objective of any row, and a name replaces the objective.
"""
CONTROL = """## Parts of `jaxrl_llm.control`

A run calls the filters of single prompts, and the controllers whose facts its parts tell. The rest is for your own
loop: `control.make(name)` makes a controller, and `jaxrl_llm.control.<module>` has the other functions. A run also calls
`budget`, and `prompt_average` if a method needs a `prior`; rules of replay call `remix` and `spear_clip`.
"""


def markdown(families: Mapping[str, tuple[Method, ...]], lacks: Callable[[str], Sequence[Lack]]) -> str:
    """The page of these families of rows; `lacks(slug)` lists the needs of a method that no run provides."""
    names = ", ".join(f"`{name}` ({meaning})" for name, meaning in DEFAULTS.items())
    lines = [HEAD.format(names=names, peers=", ".join(known_as.PEERS.values()))]
    for family, rows in families.items():
        columns = ("method", "paper", "estimator", "objective", "equation", "setting", "also needs")
        cells = [_cells(row, lacks(row.slug)) for row in sorted(rows, key=lambda row: row.slug)]
        lines += [f"## {family.replace('_', ' ').capitalize()}", "", table(columns, cells), ""]
    numbers = [(f"`config.{number.key}={number.text!r}`", number.about, known_as.said(number.known_as))
               for number in known_as.NUMBERS]
    lines += [NUMBERS, table(("setting", "what it is", "known as"), numbers), ""]
    return "\n".join([*lines, CONTROL, table(("module", "what it is for", "parts"), _control_rows()), ""])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    def line(cells):
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    return "\n".join([line(heads), line(["---"] * len(heads)), *map(line, rows)])


def described(row: Method, lacks: Sequence[Lack]) -> str:
    """A row for the terminal: one line `key   value` for each entry that it has."""
    entries = {
        "method": row.slug,
        "title": row.title,
        "paper": ", ".join(f"https://arxiv.org/abs/{paper}" for paper in row.arxiv),
        "equation": row.equation,
        "estimator": row.estimator,
        "objective": row.objective,
        "setting": ", ".join(f"{name} {value}" for name, value in row.defaults.items()),
        "needs": ", ".join(row.needs),
        **{name: getattr(row, name) for name in ("filters", "controllers", *_FURTHER, "phases")},
        "not provided": ", ".join(f"{lack.what} ({lack.who})" for lack in lacks),
        "omits": row.omits or "",
        "known as": known_as.said(row.known_as),
    }
    return "\n".join(f"{name:16}{value}" for name, value in entries.items() if value)


def _cells(row: Method, lacks: Sequence[Lack]) -> tuple[str, ...]:
    notes = [f"`{part}`" for part in (*row.needs, *row.parts("filters"), *row.parts("controllers"))]
    notes += [f"{key} `{text}`" for key in (*_FURTHER, "phases") if (text := getattr(row, key))]
    if lacks:
        notes.append(f"**not provided: {', '.join(f'`{lack.what}` ({lack.who})' for lack in lacks)}**")
    notes += [f"*omits {row.omits}*"] if row.omits else []
    notes += [f"known as {known_as.said(row.known_as)}"] if row.known_as else []
    return (f"`{row.slug}` {row.title}", ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in row.arxiv),
            f"`{row.estimator}`", f"`{row.objective}`", f"`{row.equation}`",
            ", ".join(f"{name} {value}" for name, value in row.defaults.items()), ", ".join(notes))


def _control_rows() -> list[tuple[str, str, str]]:
    """For every file of `jaxrl_llm.control` the first line of its docstring, its filter or controller and its functions."""
    rows = []
    for info in sorted(pkgutil.iter_modules(control.__path__), key=lambda module: module.name):
        if info.name == "base":
            continue
        module = importlib.import_module(f"{control.__name__}.{info.name}")
        own = [name for name, value in vars(module).items() if inspect.isfunction(inspect.unwrap(value))
               and value.__module__ == module.__name__ and not name.startswith("_")]
        kinds = [kind for kind, names in (("filter", control.filter_names()), ("controller", control.names()))
                 if info.name in names]
        parts = [f"**{kind}** `{info.name}`" for kind in kinds]
        parts += [f"`{name}`" for name in own if not (kinds and name == info.name)]
        rows.append((f"`{info.name}`", inspect.getdoc(module).splitlines()[0], ", ".join(parts)))
    return rows
