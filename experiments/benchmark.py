"""Measures a part of the library: the phases of a training step, or what the first word names.

  python experiments/benchmark.py [step|checkpoints|communication|estimators|experts|padding|rows|texts] [OPTIONS]

Each name is a file of experiments/benchmarks; NAME --help prints what it measures, and its options.
"""
import runpy
import sys
from pathlib import Path

from jaxrl_llm.tools.registry import one_of

FOLDER = Path(__file__).parent / "benchmarks"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")

if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(print(__doc__))
    name = sys.argv.pop(1) if sys.argv[1:] and not sys.argv[1].startswith("-") else "step"
    try:
        file = FOLDER / f"{one_of('benchmark', name, NAMES)}.py"
    except ValueError as error:
        sys.exit(str(error))
    runpy.run_path(str(file), run_name="__main__")
