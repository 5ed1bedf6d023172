"""Prints the catalogue, or the row of NAME; `--write PATH` writes it as Markdown, `--why` says what stands against a run."""
import argparse
import ast
import importlib
import pathlib
import re
import sys

from jaxrl_llm import methods
from jaxrl_llm.methods import page as pages


def main() -> None:
    prog = "python -m jaxrl_llm.methods" if "jaxrl_llm.methods" in sys.orig_argv else "jaxrl_llm methods"  # as it was started
    parser = argparse.ArgumentParser(prog=prog, description="the catalogue of methods")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a method, whose row is printed; default: all in one line each")
    parser.add_argument("--write", metavar="PATH", type=pathlib.Path, help="write the Markdown page to PATH")
    parser.add_argument("--why", action="store_true", help="print all that stands against a run of the method NAME; "
                        "--config.KEY=VALUE changes its settings")
    arguments, changes = parser.parse_known_args()
    if bool(changes) > arguments.why or arguments.name is None and arguments.why:
        parser.error(f"not an argument: {', '.join(changes)}" if changes else "--why needs the NAME of a method")
    if arguments.why:
        print_why(parser, arguments.name, changes)
        return
    if arguments.write is not None:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(methods.markdown())
    if arguments.name is not None:
        try:
            print(pages.described(methods.get(arguments.name), methods.lacks(arguments.name)))
        except ValueError as error:
            parser.error(str(error))
    if {arguments.name, arguments.write} != {None}:
        return
    for family, rows in methods.FAMILIES.items():
        print(f"\n{family}")
        for row in sorted(rows, key=lambda row: row.slug):
            wanting = ", ".join(lack.what for lack in methods.lacks(row.slug))
            state = f"   [needs {wanting}]" if wanting else ""
            estimator, objective = (row.part(key).name for key in ("estimator", "objective"))
            print(f"  {row.slug:20} {estimator:14} {objective:14} {row.equation}{state}")


def print_why(parser: argparse.ArgumentParser, name: str, changes: list[str]) -> None:
    """Prints what stands against a run of the method `name` with settings `--config.KEY=VALUE`, a line each.

    The status of the process is 1 if there is anything.
    """
    setup = importlib.import_module("jaxrl_llm.setup.setup")  # above this room
    try:
        lines = setup.against(name, dict(map(setting, changes)))
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print("\n".join(lines) or f"nothing stands against a run of {name}")
    sys.exit(bool(lines))


def setting(text: str) -> tuple[str, object]:
    """`--config.KEY=VALUE` as the dotted key and its value, a literal of Python or the text itself."""
    match = re.fullmatch(r"--config\.([\w.]+)=(.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"cannot read {text!r}; write --config.KEY=VALUE")
    try:
        return match[1], ast.literal_eval(match[2])
    except (ValueError, SyntaxError):
        return match[1], match[2]


if __name__ == "__main__":
    main()
