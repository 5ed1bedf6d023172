"""Fits held-out score against compute (sigmoid) and against entropy, with intervals, from run folders.

  python experiments/scaling.py --runs=runs/three_methods/runs/grpo,runs/three_methods/runs/rloo --unit=flops --out=runs/scaling

Each folder is one recipe: a run, or a folder of runs that differ in their seed. Writes scaling.md, scaling.json, scaling.png.
"""
import json
import shlex
import sys
from pathlib import Path

from absl import flags

from jaxrl_llm import command_line

_RUNS = flags.DEFINE_list("runs", None, "Folders of runs, or of seeds of one recipe.")
_UNIT = flags.DEFINE_enum("unit", "flops", ["tokens", "flops", "seconds", "steps"], "What compute is counted in.")
_OUT = flags.DEFINE_string("out", None, "Folder of the fits.")


def main():
    from jaxrl_llm.compare import scaling_page
    recipes = {name: scaling_page.runs_of(Path(name)) for name in _RUNS.value}
    fits = {name: scaling_page.fit_recipe(runs, _UNIT.value) for name, runs in recipes.items()}
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.json").write_text(json.dumps(fits, indent=1, allow_nan=False))
    text = scaling_page.markdown(fits, _UNIT.value, shlex.join(["python", *sys.argv]))
    (out / "scaling.md").write_text(text)
    scaling_page.draw(fits, recipes, _UNIT.value, out / "scaling.png")
    print(text + f"\nwrote {out}/scaling.md, scaling.json and scaling.png")


if __name__ == "__main__":
    command_line.run(main, "runs", "out")
