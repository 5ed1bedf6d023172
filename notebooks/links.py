"""Puts the address of the project into the notebooks: a badge that opens each in Colab, absolute links, what is installed.

  python notebooks/links.py        # the address is `URL` of setup.py; without one nothing changes
"""
import json
import re
import sys
from importlib import metadata
from pathlib import Path

COLAB = "https://colab.research.google.com"


def linked(notebook: dict, name: str, url: str) -> dict:
    """The notebook with the links of a project at `url`; the same again for one that has them.

    Colab opens notebooks of github.com, so a project elsewhere gets no badge.
    """
    cells = [dict(cell) for cell in notebook["cells"]]
    for number, cell in enumerate(cells):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = re.sub(r"\]\(\.\./(?=[\w./#-]+\))", f"]({url}/blob/main/", text)
            text = re.sub(r"\]\((?=\w+\.ipynb\))", f"]({url}/blob/main/notebooks/", text)
        else:
            text = re.sub(r'^SOURCE = "[^"]*"$', f'SOURCE = "git+{url}"', text, flags=re.MULTILINE)
        if number == 0 and url.startswith("https://github.com/") and COLAB not in text:
            place = f"{url.removeprefix('https://github.com')}/blob/main/notebooks/{name}"
            badge = f"[![open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github{place})"
            text = f"{badge}\n\n{text}"
        cell["source"] = text.splitlines(keepends=True)
    return notebook | {"cells": cells}


def main():
    url = (metadata.metadata("jaxrl_llm").get("Home-page") or "").rstrip("/")
    if not url:
        sys.exit("the project has no address yet: set URL in setup.py and install it again, then run this again")
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        notebook = linked(json.loads(path.read_text(encoding="utf-8")), path.name, url)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
