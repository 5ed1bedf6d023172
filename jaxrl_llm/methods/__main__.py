"""Prints the catalogue, or the row of NAME; `--write` writes the page, or the row, `--why` says what stands against a run."""
import argparse
import ast
import importlib
import pathlib
import re
import sys

from jaxrl_llm import methods
from jaxrl_llm.methods import composition, own_row, texts
from jaxrl_llm.methods import page as pages
from jaxrl_llm.tools import registry


def main() -> None:
    prog = "python -m jaxrl_llm.methods" if "jaxrl_llm.methods" in sys.orig_argv else "jaxrl_llm methods"  # as it was started
    parser = argparse.ArgumentParser(prog=prog, description="the catalogue of methods")
    parser.add_argument("name", metavar="NAME", nargs="?",
                        help="a method, or your own module:row, which is printed; default: all in one line each")
    parser.add_argument("--write", metavar="PATH", type=pathlib.Path,
                        help="write the row of NAME as a module to change, e.g. mine.py; without NAME: the Markdown page")
    parser.add_argument("--why", action="store_true", help="print all that stands against a run of the method NAME; "
                        "--config.KEY=VALUE changes its settings; with --write or alone, its parts")
    arguments, changes = parser.parse_known_args()
    if arguments.name is None and (arguments.why or changes):
        parser.error(f"{', '.join(changes) or '--why'} needs the NAME of a method")
    if arguments.why:
        print_why(parser, arguments.name, changes)
        return
    if arguments.name is not None:
        try:
            row = changed(arguments.name, changes)
            if arguments.write is None:
                print(pages.described(row, methods.lacks(row)))
            else:
                named = own_row.write(row, arguments.write)
                print(f"{arguments.write} runs by --config.method={named}, with PYTHONPATH={arguments.write.parent} before the "
                      "command")
        except (ValueError, FileExistsError) as error:
            parser.error(str(error))
        return
    if arguments.write is not None:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(methods.markdown())
        return
    for family, rows in methods.FAMILIES.items():
        print(f"\n{family}")
        for row in sorted(rows, key=lambda row: row.slug):
            wanting = ", ".join(lack.what for lack in methods.lacks(row.slug))
            state = f"   [needs {wanting}]" if wanting else ""
            estimator, objective = (row.part(key).name for key in ("estimator", "objective"))
            print(f"  {row.slug:20} {estimator:14} {objective:14} {row.equation}{state}")


def changed(name: str, changes: list[str]) -> methods.Method:
    """The row of a method with the parts of `--config.KEY=TEXT`; ValueError for keys that are no parts."""
    given = {key: str(value) for key, value in map(setting, changes)}
    for key in given:
        registry.one_of("part of a method", key, texts.SLOTS)
    return composition.composed(methods.get(name), given, {"max_len": 1024, "feature_size": 67}, "--config.")


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
