"""Texts and names that could hide something in the viewer, control the terminal or break out of the page."""
import io
import json
import re
import shutil
import subprocess
import unicodedata
from pathlib import Path

import pytest
from rich.console import Console

from jaxrl_llm.runs.metrics import MetricWriter
from jaxrl_llm.runs.samples import write_samples
from jaxrl_llm.show import curves
from jaxrl_llm.show.page import write_page
from jaxrl_llm.show.runs import read_runs
from jaxrl_llm.show.terminal import print_summary
from jaxrl_llm.store.workdir import open_workdir
from jaxrl_llm.tools.visible import visible

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
NAME = "reward_failures/\x1b]0;taken\x07\x1b[31m<img src=x onerror=alert(1)>[red]\u202e\u061c\U000e0041"
# Letter mark, vowel separator, soft hyphen, annotation, tag, joiner, filler, variation selectors, private and unassigned ones.
UNSEEN = ("\u061c", "\u180e", "\u00ad", "\ufff9", "\ufffa", "\ufffb", "\U000e0001", "\U000e0041", "\U000e007f", "\u034f",
          "\u3164", "\u115f", "\ufe0f", "\U000e0100", "\ue000", "\U000f0000", "\u0378", "\u2028", "\u202e", "\u200b", "\x00",
          "\x1b", "\x9b", "\r")
SEEN = ("a", "é", "中", "\U0001f600", "א", "٣", " ", "\n", "\t", "|", "\u0301")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from small_run import config

    folder = tmp_path_factory.mktemp("runs") / "one"
    open_workdir(folder, config(rewards="format(pattern='\x1b[31m\U000e0041<b>')")).record()
    with MetricWriter(folder) as writer:
        for step in range(3):
            writer.write(step, {"time/\x1b[5mphase[bold]": 1.0, NAME: 2.0, "eval/score": 0.5})
    write_samples(folder, 1, ["<q>"], ["5"], [["x" + "x".join(UNSEEN) + "x", "".join(SEEN)]], [[1.0, 0.0]],
                  [[{NAME: 1.0}, {NAME: 0.0}]], [[2, 2]], [["stop", "stop"]])
    return read_runs([folder.rename(folder.with_name("one\x1b[2J\u202e"))])


def test_every_character_that_draws_nothing_is_spelled_out():
    for c in UNSEEN:
        assert visible(f"a{c}b") == "a" + c.encode("unicode_escape").decode() + "b", hex(ord(c))
    assert visible("".join(SEEN)) == "".join(SEEN)
    assert visible("\ud800\U000e0041\x1b") == r"\ud800\U000e0041\x1b"
    for code in range(0x110000):  # no category of such characters is left out
        c = chr(code)
        if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and c not in "\n\t":
            assert visible(c).startswith("\\"), hex(code)


def test_the_terminal_gets_no_escape_sequence_and_no_markup_from_names(run):
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    print_summary(run, console)
    text = console.file.getvalue()
    assert not [c for c in text if c != "\n" and unicodedata.category(c)[0] == "C"]
    assert r"(reward_failures/\x1b]0;taken\x07\x1b[31m<img src=x onerror=alert(1)>[red]\u202e\u061c\U000e0041)" in text
    assert r"\x1b[5mphase[bold] 100%" in text and r"one\x1b[2J\u202e" in text


def test_the_page_has_names_as_text_with_nothing_unseen(run, tmp_path):
    text = write_page(run, tmp_path / "page.html").read_text("utf-8")
    assert "<img src" not in text and "&lt;img src=x onerror=alert(1)&gt;[red]\\u202e\\u061c\\U000e0041</figcaption>" in text
    assert not [c for c in text if c not in "\n\t" and unicodedata.category(c)[0] == "C"]
    data = json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
    assert set(re.findall(r'data-metric="([^"]*)"', text)) == {
        name.replace("<", "&lt;").replace(">", "&gt;") for name in data["curves"]}  # values under the pointer are there


def test_pages_of_samples_for_people_spell_names_out(run):
    page = (run[0].path / "samples" / "step_000001.txt").read_text("utf-8")
    assert not [c for c in page if c not in "\n\t" and unicodedata.category(c)[0] == "C"]


def test_the_script_of_the_page_spells_out_the_same_characters():
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    script = Path(curves.__file__).with_name("page.js").read_text()
    start = script.index("const HIDDEN")
    body = script[start:script.index("function appendText")] + """
        const given = JSON.parse(process.argv[1]);
        console.log(JSON.stringify(given.map((text) => text.replace(HIDDEN, spelled))));
    """
    given = [*UNSEEN, "\ud800", "a\udc00b", *SEEN]
    result = subprocess.run(["node", "-e", body, json.dumps(given)], capture_output=True, text=True, check=True).stdout
    def code(c):
        return f"{ord(c):04x}" if ord(c) < 0x10000 else f"{{{ord(c):x}}}"
    assert json.loads(result) == [*(f"\\u{code(c)}" for c in UNSEEN), "\\ud800", "a\\udc00b", *SEEN]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_a_browser_shows_them(run, tmp_path):
    page = write_page(run, tmp_path / "page.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    dom = subprocess.run([BROWSER, *options, page.as_uri()], capture_output=True, text=True, timeout=60).stdout
    rows = dom[dom.index('<table id="rows"'):dom.index('class="pager"')]
    for shown in (r"\u061c", r"\u180e", r"\u00ad", r"\ufff9", r"\u{e0041}", r"\u{e007f}", r"\u3164", r"\ufe0f"):
        assert f'<span class="escaped">{shown}</span>' in rows, shown
    assert "<img" not in dom and r"&lt;img src=x onerror=alert(1)&gt;[red]\u202e\u061c\u{e0041}</th>" in rows
