"""`python -m jaxrl_llm.models.check DIR` compares a checkpoint with transformers; `--all` tiny ones of every family.

`--all --write docs/guides/model.md` renews the table between the markers of that page.
"""
import argparse
import re
import tempfile
from pathlib import Path

from jaxrl_llm.models import Transformer, weights
from jaxrl_llm.models.check import gguf_files, tiny
from jaxrl_llm.models.check.comparisons import COLUMNS, LoadedCheckpoint, compare, in_transformers, plain_logits, torch_logits

_BEGIN, _END = "<!-- parity: python -m jaxrl_llm.models.check --all --write docs/guides/model.md -->", "<!-- end of parity -->"


def checked(directory: Path) -> tuple[str, dict[str, str]]:
    """Family and cells of a checkpoint; without transformers the plain path here is the reference of the others."""
    config, params = weights.load(directory)
    model, theirs = Transformer(config), in_transformers(directory)
    def plain(tokens, mask):
        return plain_logits(model, params, tokens, mask)
    return config.family, compare(LoadedCheckpoint(directory, model, params, plain if theirs is None else torch_logits(theirs)))


def row_of_tiny(name: str) -> str:
    """The row of a tiny checkpoint, written in both formats first."""
    checkpoint = tiny.CHECKPOINTS[name]
    with tempfile.TemporaryDirectory() as directory:
        reference = tiny.make(name, Path(directory))
        if checkpoint.family.gguf is not None and checkpoint.gguf:
            gguf_files.write(Path(directory) / "model.gguf", reference)
        return row(checkpoint.title, checkpoint.model_type, checked(Path(directory))[1])


def row(title: str, name: str, cells: dict[str, str]) -> str:
    return f"| {title} | `{name}` | {' | '.join(cells.values())} |"


def header() -> str:
    return f"| family | `model_type` | {' | '.join(COLUMNS)} |\n|{'---|' * (2 + len(COLUMNS))}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.models.check", description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, help="a directory with config.json and safetensors")
    parser.add_argument("--all", action="store_true", help="check a tiny random checkpoint of every family")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="with --all: write the table into PAGE, between its markers")
    arguments = parser.parse_args()
    if arguments.all == (arguments.directory is not None) or arguments.write and not arguments.all:
        parser.error("give a directory, or --all")
    if arguments.directory is not None:
        if not arguments.directory.is_dir():
            parser.error(f"{arguments.directory} is no directory; give one with config.json and safetensors")
        try:
            print(header() + "\n" + row(arguments.directory.resolve().name, *checked(arguments.directory)))
        except (ValueError, FileNotFoundError) as error:
            parser.exit(1, f"refused: {error}\n")
        return
    table = "\n".join([header(), *map(row_of_tiny, tiny.CHECKPOINTS)])
    if arguments.write is None:
        print(table)
        return
    before, after = re.split(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", arguments.write.read_text(), flags=re.DOTALL)
    arguments.write.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{after}")


if __name__ == "__main__":
    main()
