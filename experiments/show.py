"""Shows runs: a summary in the terminal and one self-contained HTML page that needs no server, no network and no other file.

  python experiments/show.py runs/first [runs/second ...] [--out=runs/first/page.html] [--completions=1000]

Several runs are drawn over each other, with the settings in which they differ. See docs/looking_at_runs.md.
"""
from pathlib import Path

from absl import flags

from jaxrl_llm.commands import command_line

_OUT = flags.DEFINE_string("out", None, "The page; default: page.html in the first run folder.")
_COMPLETIONS = flags.DEFINE_integer("completions", 1000, "Sampled completions of each run in the page, about.", lower_bound=0)
_PAGE = flags.DEFINE_bool("page", True, "Write the page; --nopage prints the summary only.")


def main(folders):
    from jaxrl_llm.show.page import write_page
    from jaxrl_llm.show.runs import read_runs
    from jaxrl_llm.show.terminal import print_summary
    from jaxrl_llm.store import bucket
    if not folders:
        raise ValueError("no run folder is given; usage: python experiments/show.py runs/first [runs/second ...]")
    runs = read_runs(folders)
    print_summary(runs)
    if _PAGE.value:
        out = bucket.place(_OUT.value or f"{folders[0]}/page.html")
        page = write_page(runs, out if isinstance(out, Path) else runs[0].path / "page.html", _COMPLETIONS.value)
        if bucket.is_bucket(out):
            with bucket.reaching(out):
                out.write_bytes(page.read_bytes())
        print(f"page: {out}")


if __name__ == "__main__":
    command_line.run(main, words=True)
