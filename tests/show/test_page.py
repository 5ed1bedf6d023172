"""The page: complete, without requests, safe from a policy's text. Read by a parser and, where there is one, a browser."""
import ast
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from run_folder import HOSTILE, make_run, with_messages, with_tokens

from jaxrl_llm.show import curves
from jaxrl_llm.show.page import as_script, write_page
from jaxrl_llm.show.runs import read_runs
from jaxrl_llm.show.samples import read_groups

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
VOID = {"meta", "img", "br", "input"}


class Reader(html.parser.HTMLParser):
    """Tags, attributes, and the text of each script element; unbalanced tags are errors."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.attributes, self.scripts, self.svgs = [], [], [], 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        self.svgs += tag == "svg"
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    one, two = make_run(root / "<b>one", seed=1), make_run(root / "two", rewards=f"format(pattern='{HOSTILE[:40]}')")
    with_tokens(two, 10)
    return one, two


@pytest.fixture(scope="module")
def page(folders, tmp_path_factory):
    return write_page(read_runs(folders), tmp_path_factory.mktemp("page") / "page.html")


def test_page_is_well_formed_and_holds_everything(page):
    reader = Reader(page.read_text("utf-8"))
    data = json.loads(reader.scripts[0])
    assert len(reader.scripts) == 2  # the data and the program: nothing that a sample opened
    assert [run["name"] for run in data["runs"]] == ["<b>one", "two"]
    assert reader.svgs == len(data["curves"]) and {"eval/score", "reward/mean", "grad_norm"} <= data["curves"].keys()
    assert "value/pearson" not in data["curves"]  # never finite
    assert data["curves"]["eval/score"][0] == {"x": [0, 10, 20, 30], "y": [0, 0.2, 0.4, 0.6]}
    assert [(g["run"], g["step"], len(g["rows"])) for g in data["groups"]] == [
        (0, 0, 2), (0, 0, 2), (0, 10, 2), (0, 10, 2), (1, 0, 2), (1, 0, 2), (1, 10, 2), (1, 10, 2)]
    group = data["groups"][1]
    assert group["prompt"] == HOSTILE and group["rows"][0]["text"] == HOSTILE and group["answer"] == "<b>"
    assert group["rows"][1]["reward"] is None  # NaN
    assert data["groups"][6]["rows"][0]["advantages"] == [1.0, -1.0] and data["groups"][6]["rows"][0]["ratios"] == [1.1, None]
    assert "tokens" not in group["rows"][0]


def test_page_loads_nothing(page):
    text = page.read_text("utf-8")
    reader = Reader(text)
    for tag, name, value in reader.attributes:
        if name in ("src", "href"):
            assert value.startswith(("#", "data:")), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)
    assert "innerHTML" not in text and "insertAdjacent" not in text and "document.write" not in text


def test_data_cannot_leave_its_script_element():
    text = as_script({"a": "</script><!--&amp;\u2028\udc80"})
    assert "<" not in text and "&" not in text and text.isascii()
    assert json.loads(text) == {"a": "</script><!--&amp;\u2028\udc80"}


def test_samples_are_limited_to_whole_groups_of_every_step(folders):
    groups, total = read_groups(folders[0], 3)
    assert total == 8 and [(g["step"], len(g["rows"])) for g in groups] == [(0, 2), (10, 2)]  # 2 of step 0 and 1 of step 10
    assert read_groups(folders[0], 0) == ([], 8)


def test_a_line_cut_short_is_left_out(folders, tmp_path):
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    file = copy / "samples" / "step_000010.jsonl"
    file.write_text(file.read_text()[:-20].replace('"prompt": "', '"prompt": "\u2028', 1), "utf-8")  # U+2028 ends no line
    assert [len(g["rows"]) for g in read_groups(copy, 100)[0]] == [2, 2, 2, 1]


def test_curve_of_known_points():
    line = curves.Line("#000000", np.array([0.0, 10.0]), np.array([0.0, 1.0]), np.array([0.0, 0.5]), np.array([0.5, 1.0]))
    picture = curves.svg('x"<', [line])
    assert 'data-metric="x&quot;&lt;"' in picture
    path = re.search(r'class="line"[^>]* d="([^"]*)"', picture)[1]
    # 46 to 350 across; 10 to 166 down, of which the values take all but 6% on either side
    bottom, top = 166 - 156 * 0.06 / 1.12, 166 - 156 * 1.06 / 1.12
    assert path.startswith(f"M46.0 {bottom:.1f}L350.0 {top:.1f}")
    assert path.endswith(f"M350.0 {(bottom + top) / 2:.1f}V{top:.1f}")


def test_values_of_many_magnitudes_are_drawn_logarithmically():
    picture = curves.svg("x", [curves.Line("#000", np.arange(4.0), 10.0 ** np.arange(4))])
    heights = [(float(y), label) for y, label in re.findall(r'y="([^"]*)" text-anchor="end">([^<]*)<', picture)]
    assert [label for _, label in sorted(heights)] == ["1000", "100", "10", "1"]
    assert np.allclose(np.diff(sorted(y for y, _ in heights)), 156 / 1.12 / 3, atol=0.1)


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-1e-30, 1e-30], [1e30, 2e30]])
def test_flat_and_extreme_curves_can_be_drawn(values):
    picture = curves.svg("x", [curves.Line("#000", np.arange(float(len(values))), np.array(values))])
    assert "nan" not in picture and "inf" not in picture


def test_thinning_keeps_the_mean():
    x, y = curves.thin(np.arange(1000.0), np.arange(1000.0) ** 2, 100)
    assert len(x) == len(y) == 100 and np.isclose(y.mean(), (np.arange(1000.0) ** 2).mean())


def test_script_is_valid(page):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    script = Path(curves.__file__).with_name("page.js")
    assert subprocess.run(["node", "--check", script], capture_output=True).returncode == 0


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_page_in_a_browser(page):
    result = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
                            capture_output=True, text=True, timeout=60)
    dom = result.stdout
    assert "<title>&lt;b&gt;one, two</title>" in dom  # no sample took it
    rows = dom[dom.index('<table id="rows"'):dom.index('class="pager"')]
    assert rows.count('<tr class="prompt">') == 8 and rows.count('class="number"') == 16 * 3
    assert rows.count("&lt;/script&gt;") == 2 * (2 + 2 + 2 + 5)  # as prompt, as completion and, in the last page, as 4 tokens
    assert "<script" not in rows and "<img" not in rows and "\\u001b" in rows and "\\udc80" in rows and "\\u202e" in rows
    assert "8 of 8 groups" in dom and "page 1 of 1" in dom
    for option in ("advantage", "probability ratio", "entropy", "log-probability"):
        assert option in dom


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_the_address_chooses_the_view(page, tmp_path):
    view = f"{page.as_uri()}#samples?color=advantages&step=3&nothing=1"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,700", f"--screenshot={tmp_path / 'page.png'}"]
    result = subprocess.run([BROWSER, *options, "--dump-dom", view], capture_output=True, text=True, timeout=60)
    rows = result.stdout[result.stdout.index('<table id="rows"'):result.stdout.index('class="pager"')]
    assert 0 < rows.count('<tr class="prompt">') < 8 and "background: rgba(0, 114, 178" in rows and "rgba(213, 94, 0" in rows


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_conversations_show_who_speaks_what_is_called_and_what_is_not_trained(tmp_path):
    run = make_run(tmp_path / "run")
    with_messages(run, 0)
    page = write_page(read_runs([run]), tmp_path / "page.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    spoken, tokens = (subprocess.run([BROWSER, *options, page.as_uri() + view], capture_output=True, text=True,
                                     timeout=60).stdout for view in ("#samples?step=0", "#samples?step=0&color=entropies"))
    rows = spoken[spoken.index('<table id="rows"'):spoken.index('class="pager"')]
    assert rows.count('class="message"') == 4 * 2 and rows.count('class="message masked"') == 4
    assert rows.count("assistant  reward of the turn: 0.25") == 4 and rows.count("assistant  reward of the turn: NaN") == 4
    assert rows.count('<span class="call">&lt;tool_call&gt;') == 4
    assert "<script" not in rows and "<img" not in rows and "<title>run</title>" in spoken
    rows = tokens[tokens.index('<table id="rows"'):tokens.index('class="pager"')]
    assert rows.count('<span class="masked">') == 4 and 'class="message' not in rows and "rgba(" in rows


def test_the_installed_package_has_the_files_of_the_page():
    folder = Path(curves.__file__).parent
    call = next(node for node in ast.walk(ast.parse((folder.parents[1] / "setup.py").read_text()))
                if isinstance(node, ast.keyword) and node.arg == "package_data")
    used = {path.name for path in folder.iterdir() if path.suffix in (".html", ".css", ".js")}
    assert set(ast.literal_eval(call.value)["jaxrl_llm.show"]) == used
