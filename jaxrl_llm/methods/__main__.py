"""`python -m jaxrl_llm.methods` prints the catalogue; `--write PATH` writes it as Markdown, `--counts PAGE` renews counts."""

import argparse
import pathlib

from jaxrl_llm import methods


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.methods", description="the catalogue of methods")
    parser.add_argument("--write", metavar="PATH", type=pathlib.Path, help="write the Markdown page to PATH")
    parser.add_argument("--counts", metavar="PAGE", type=pathlib.Path, nargs="+",
                        help="renew the sentence `Of N methods M run by name` in these pages")
    arguments = parser.parse_args()
    for page in arguments.counts or ():
        page.write_text(methods.with_counts(page.read_text()))
    if arguments.write is not None:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(methods.markdown())
    if arguments.counts or arguments.write is not None:
        return
    for family, rows in methods.FAMILIES.items():
        print(f"\n{family}")
        for row in sorted(rows, key=lambda row: row.slug):
            wanting = ", ".join(lack.what for lack in methods.lacks(row.slug))
            state = f"   [needs {wanting}]" if wanting else ""
            print(f"  {row.slug:20} {row.estimator[0]:14} {row.objective[0]:14} {row.equation}{state}")


if __name__ == "__main__":
    main()
