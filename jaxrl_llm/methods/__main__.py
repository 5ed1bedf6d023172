"""Prints the catalogue, or the row of NAME; `--write PATH` writes it as Markdown."""
import argparse
import pathlib
import sys

from jaxrl_llm import methods
from jaxrl_llm.methods import page as pages


def main() -> None:
    prog = "python -m jaxrl_llm.methods" if "jaxrl_llm.methods" in sys.orig_argv else "jaxrl_llm methods"  # as it was started
    parser = argparse.ArgumentParser(prog=prog, description="the catalogue of methods")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a method, whose row is printed; default: all in one line each")
    parser.add_argument("--write", metavar="PATH", type=pathlib.Path, help="write the Markdown page to PATH")
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    main()
