"""Diagnostics of finished runs: numbers, tables and a figure.

  python experiments/diagnose.py policy_cliff runs/first
  python experiments/diagnose.py "alp(problems=128, scales=(0.01, 0.1))" runs/first --out=runs/alp

The name and its options, then run folders. Without arguments: all names. See docs/diagnostics.md.
"""
import json
from pathlib import Path

from absl import flags

from jaxrl_llm.commands import command_line

_OUT = flags.DEFINE_string("out", None, "Folder of results.json and the figure; default: diagnostics/NAME in the first folder.")


def main(words):
    from jaxrl_llm import diagnostics
    from jaxrl_llm.diagnostics.base import strict
    from jaxrl_llm.store import bucket
    from jaxrl_llm.tools.written import calls
    text, *folders = words or [""]
    listed = "\n".join(f"  {name:22}{diagnostics.about(name)}" for name in diagnostics.names())
    if not text:
        print(f"usage: python experiments/diagnose.py NAME RUN_FOLDER [...] [--out=FOLDER]\n\n{listed}")
        return
    named = [] if "/" in text.partition("(")[0] or Path(text).is_dir() else calls(text)
    if len(named) != 1 or not folders:
        raise ValueError(f"give the name of one diagnostic, then run folders; given: {' '.join(words)}; "
                         f"diagnostics are\n{listed}")
    name, options = named[0]
    chosen = diagnostics.make(name, **options)
    places = [bucket.place(folder) for folder in folders]
    missing = [str(path) for path in places if isinstance(path, Path) and not path.is_dir()]
    if missing:
        raise FileNotFoundError(f"no folder {', '.join(missing)}")
    results = chosen.measure([bucket.local(path, "samples", "checkpoints", "best") for path in places])
    out = bucket.place(_OUT.value) if _OUT.value else places[0] / "diagnostics" / name
    with bucket.kept(out) as (folder, _):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(strict(results), indent=1, allow_nan=False))
        chosen.figure(results, folder / f"{name}.png")
    for title, rows in results["tables"].items():
        command_line.print_table(rows, title)
    print(f"wrote {out}/results.json and {out}/{name}.png")


if __name__ == "__main__":
    command_line.run(main, words=True)
