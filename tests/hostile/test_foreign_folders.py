"""Run folders that someone else made: files that lead elsewhere, never end, or are no samples."""
import json
import os
import shutil

import pytest

from jaxrl_llm.compare import held_out, ledger, plan, report, suite
from jaxrl_llm.diagnostics.echo_chamber import numbers
from jaxrl_llm.runs.metrics import MetricWriter
from jaxrl_llm.runs.samples import write_samples
from jaxrl_llm.setup import stored
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.show import page, samples
from jaxrl_llm.show.runs import read_runs
from jaxrl_llm.store import workdir
from jaxrl_llm.store.lines import read_metrics
from jaxrl_llm.tools import files

PAGE = "samples/step_000009.jsonl"


@pytest.fixture
def run(tmp_path):
    """A small run with a page of samples, and a file outside of it that is nobody else's business."""
    folder = tmp_path / "runs" / "theirs"
    workdir.open_workdir(folder, default_config()).record()
    with MetricWriter(folder) as writer:
        writer.write(0, {"eval/score": 0.5})
    write_samples(folder, 9, ["q"], ["5"], [["a", "b"]], [[1.0, 0.0]], [[{"exact": 1.0}, {"exact": 0.0}]], [[2, 2]],
                  [["stop", "stop"]])
    (tmp_path / "secret").write_text("private")
    return folder


def pipe(file, _):
    os.mkfifo(file)


def endless(file, _):
    file.symlink_to("/dev/zero")


def outside(file, folder):
    shutil.copy(folder / "right", folder.parent / "right")
    file.symlink_to(folder.parent / "right")


READERS = {  # what reads a file of a folder
    "values.png": lambda run: page.write_page(read_runs([run]), run / "page.html"),
    PAGE: lambda run: samples.read_groups(run, 10),
    "config.json": lambda run: stored.stored_config(run),
    held_out.FILE: lambda run: held_out.measured(run, "a task"),
    suite.FILE_NAME: lambda run: suite.read(run)}
MORE = [(PAGE, lambda run: report.held_out_correct(run / PAGE)), (PAGE, lambda run: numbers(run / PAGE, (), ("other",))),
        ("config.json", lambda run: ledger.read_run(run)),
        ("config.json", lambda run: workdir.open_workdir(run, default_config(), "auto")),
        ("config.json", lambda run: plan.check_folder(plan.Job(None, 0, run, run), None))]


@pytest.mark.parametrize("made", [pipe, endless, outside])
@pytest.mark.parametrize("name, read", [*READERS.items(), *MORE])
def test_only_regular_files_of_the_folder_itself_are_read(run, name, read, made):
    file = run / name
    (run / "right").write_bytes(file.read_bytes() if file.exists() else b"{}\n")
    file.unlink(missing_ok=True)
    made(file, run)
    with pytest.raises(ValueError, match=f"{file.name} (is no regular file|lies outside of its folder)"):
        read(run)


def test_a_start_that_cannot_be_read_is_no_start(run):
    (run / "environment.json").unlink()
    os.mkfifo(run / "environment.json")
    assert workdir.starts_of(run) == []


def test_metrics_may_lie_on_another_disk_and_must_be_a_regular_file(run, tmp_path):
    (run / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    (run / "metrics.jsonl").symlink_to(tmp_path / "metrics.jsonl")
    assert read_metrics(run)["eval/score"].tolist() == [0.5]
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="metrics.jsonl is no regular file but a pipe"):
        read_metrics(run)


def test_the_page_holds_nothing_that_lies_elsewhere(run, tmp_path):
    """A figure of the folder itself is shown, also where the folder is a link; one that leads elsewhere is refused."""
    (run / "values.png").write_bytes(b"\x89PNG own")
    (tmp_path / "link").symlink_to(run)
    for folder in (run, tmp_path / "link"):
        assert "iVBORyBvd24=" in page.write_page(read_runs([folder]), tmp_path / "page.html").read_text()
    (run / "values.png").unlink()
    (run / "values.png").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="lies outside of its folder"):
        page.write_page(read_runs([run]), tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_files_beyond_the_limit_are_refused(run):
    with open(run / "values.png", "wb") as file:
        file.truncate(files.TEXT_LIMIT + 1)  # a hole: no bytes on the disk
    with pytest.raises(ValueError, match=f"values.png has {files.TEXT_LIMIT + 1} bytes; at most {files.TEXT_LIMIT} are read"):
        page.write_page(read_runs([run]), run / "page.html")
    with open(run / PAGE, "wb") as file:
        file.truncate(files.LINES_LIMIT + 1)
    with pytest.raises(ValueError, match=f"at most {files.LINES_LIMIT} are read"):
        samples.read_groups(run, 10)


ROW = {"prompt_index": 0, "step": 1, "prompt": "q", "answer": "a", "completion": "c", "reward": "1", "length": 1,
       "stop_reason": "stop", "components": {}}


@pytest.mark.parametrize("row", [[], {}, {"prompt_index": 0}, ROW, ROW | {"reward": 1, "components": []}])
def test_lines_that_are_no_samples_are_refused_by_file_and_line(run, row):
    with open(run / PAGE, "a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"step_000009\.jsonl, line 3 is no sample of a run"):
        samples.read_groups(run, 10)


def test_texts_with_line_separators_are_one_line(run):
    row = json.loads((run / PAGE).read_text().splitlines()[0])
    (run / PAGE).write_text(json.dumps(row | {"completion": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [one["text"] for group in samples.read_groups(run, 10)[0] for one in group["rows"]] == ["a\u2028b"]
