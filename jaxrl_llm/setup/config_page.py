"""Every key of a run's configuration with its default and meaning, read from the lines and comments that declare it.

`python -m jaxrl_llm.setup.config_page --write docs/configuration.md` renews the page; `--help` of scripts with --config
prints the same.
"""
import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEAD = """# Configuration

Written by `python -m jaxrl_llm.setup.config_page --write docs/configuration.md` from the comments of
`jaxrl_llm/setup/config.py` and of the rooms that it joins; do not edit by hand.

A config file (`configs/arithmetic.py`) starts from `default_config()` and sets what it needs; the command line goes last:
`--config.sampling.group=16`. A value has the type of its default; a tuple is written
`--config.sampling.stop_strings="('###',)"`. Unknown keys, and values that cannot work, are errors before anything is loaded.
`config.json` in the folder of a run holds all values that the run uses. `python experiments/train.py --help` prints this list.
"""


class ConfigKey(NamedTuple):
    """A key of the configuration, e.g. `sampling.group`; `default` is its text in Python, None for a group of keys."""

    name: str
    default: str | None
    meaning: str


def rooms(source: str) -> Iterator[tuple[str, list[ConfigKey]]]:
    """`(docstring, keys)` of each function of a file that sets keys: `c.KEY = DEFAULT  # MEANING`, one per line.

    It only parses the text and imports nothing, so that `--help` is quick.
    """
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type == tokenize.COMMENT}
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        keys = []
        for line in function.body:
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]).startswith("c."):
                value = ast.unparse(line.value)
                default = None if value == "ConfigDict()" else value
                keys.append(ConfigKey(ast.unparse(line.targets[0]).removeprefix("c."), default, comments.get(line.lineno, "")))
        if keys:
            yield ast.get_docstring(function), keys


def sections() -> Iterator[tuple[str, list[ConfigKey]]]:
    """`rooms` of `config.py`, then those of the modules in its `ROOMS`, in their order."""
    source = Path(__file__).with_name("config.py").read_text(encoding="utf-8")
    yield from rooms(source)
    tree = ast.parse(source)
    places = {one.asname or one.name: f"{line.module}.{one.name}" for line in tree.body if isinstance(line, ast.ImportFrom)
              for one in line.names}
    joined = next(line.value for line in tree.body if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "ROOMS")
    for name in [node.id for node in ast.walk(joined) if isinstance(node, ast.Name)]:
        file = Path(__file__).parents[2] / f"{places[name].replace('.', '/')}.py"
        yield from rooms(file.read_text(encoding="utf-8"))


def all_keys() -> list[ConfigKey]:
    """Every key, in the order of `sections`."""
    return [key for _, keys in sections() for key in keys]


def help_text() -> str:
    """All keys for the terminal, one per line."""
    lines = ["keys of --config, each set by --config.KEY=VALUE:"]
    for title, keys in sections():
        lines += ["", f"  {title}"]
        for name, default, meaning in keys:
            shown = f"{name} ({default})" if default is not None else f"{name}.*"
            lines += [f"    {shown:40}  {meaning}".rstrip()] if default is not None or meaning else []
    return "\n".join(lines)


def markdown() -> str:
    """All keys as a page with a table for each room."""
    lines = [HEAD]
    for title, keys in sections():
        lines += [f"## {title.rstrip('.')}", "", "| key | default | meaning |", "|---|---|---|"]
        for name, default, meaning in keys:
            text = meaning.replace("|", "\\|").replace("<", "&lt;")
            if default is not None:
                lines.append(f"| `{name}` | `{ast.literal_eval(default)!r}` | {text} |")
            elif meaning:
                lines.append(f"| **`{name}.*`** | | {text} |")
        lines.append("")
    return "\n".join([*lines, KNOBS, *knob_rows(), "", FACTS, *fact_rows(), ""])


KNOBS = """## Knobs

Numbers that controllers set before each step. N is the number of training problems.

| knob | read by | meaning |
|---|---|---|"""


def knob_rows() -> list[str]:
    """A line for each knob that a part of the package declares."""
    from jaxrl_llm.setup.readers import readers
    found = [(knob, part) for part, reads in readers().items() for knob in reads]
    return [f"| `{knob.name}` | {part} | {knob.doc} |" for knob, part in sorted(found, key=lambda pair: pair[0].name)]


FACTS = """## Facts

What controllers can observe after each step, N being the number of training problems. Rows of prompts are whole groups as they
were sampled, some of which may not be valid. A step with nothing left to train on has only the first and those of the stages.

| fact | from | meaning |
|---|---|---|"""


def fact_rows() -> list[str]:
    """A line for each fact that a part of the package declares."""
    from jaxrl_llm.setup.readers import facts
    return [f"| `{fact.name}` | {part} | {fact.doc} |" for part, told in facts().items() for fact in told]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.setup.config_page", description="all keys of a configuration")
    parser.add_argument("--write", metavar="PATH", type=Path, help="write the Markdown page to PATH")
    path = parser.parse_args().write
    if path is None:
        print(help_text())
    else:
        path.write_text(markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
