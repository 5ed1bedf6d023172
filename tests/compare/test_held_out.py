"""Repeated measurements: a continued one equals an uninterrupted one, each belongs to one task, greedy needs one repetition."""
import json

import jax
import pytest
from run_folders import base

from jaxrl_llm.compare import evaluation_page, held_out
from jaxrl_llm.evaluation import summary
from jaxrl_llm.training import setup

HEADER = {"task": "arithmetic(level=mixed)", "seed": 0}


@pytest.fixture(scope="module")
def policy():
    return setup.build(base(task="arithmetic(level=mixed)", **{"sampling.max_tokens": 4}))


def draw(policy, file=None, **options):
    run, params = policy
    options = {"problems": 6, "samples": 5, "temperature": 1.0} | options
    done = held_out.stored(file, HEADER) if file else ()
    keep = (lambda rows: held_out.append(file, rows)) if file else lambda rows: None
    return held_out.draw(run.source, params, None, key=jax.random.key(0), done=done, keep=keep, **options)


def test_an_interrupted_measurement_continues(policy, tmp_path):
    whole = draw(policy)  # 5 samples are 3 repetitions of 2; 6 problems are batches of 4 and 2
    assert len(whole) == 18 and [row["start"] for row in whole] == ([0] * 4 + [4] * 2) * 3
    file = tmp_path / "completions.jsonl"
    draw(policy, file, samples=2)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:40])  # killed while it wrote its second batch
    assert draw(policy, file) == whole
    assert held_out.stored(file, HEADER) == whole and draw(policy, file, samples=2) == whole[:6]
    joined = held_out.measured(tmp_path, HEADER["task"])
    assert joined == held_out.by_problem(whole) and {len(row["correct"]) for row in joined.values()} == {6}
    assert all(len(row["components"]["exact"]) == 6 == len(row["answers"]) for row in joined.values())
    assert len({tuple(row["lengths"]) for row in joined.values()} | {tuple(row["answers"]) for row in joined.values()}) > 2


def test_a_file_belongs_to_one_measurement(policy, tmp_path):
    file = tmp_path / "completions.jsonl"
    draw(policy, file, samples=1)
    with pytest.raises(ValueError, match="other seed"):
        held_out.stored(file, HEADER | {"seed": 1})
    with pytest.raises(ValueError, match="measured the task 'arithmetic"):
        held_out.measured(tmp_path, "arithmetic(level=digit)")
    with pytest.raises(FileNotFoundError, match="no measurement"):
        held_out.measured(tmp_path / "absent", "arithmetic")


def test_solved_problems_are_left_alone(policy):
    """The second batch has an unsolved problem and continues to the last repetition; the first batch is solved and stops."""
    whole = draw(policy, samples=8)
    whole[0]["correct"] = [1, 0]
    for row in whole[1:4]:
        row["correct"] = [0, 1]
    run, params = policy
    done = [row for row in whole if row["repetition"] == 0]
    assert {row["start"] for row in done} == {0, 4}
    more = held_out.draw(run.source, params, None, problems=6, samples=8, temperature=1.0, key=jax.random.key(0), done=done,
                         until=1)
    repetitions = [row["repetition"] for row in more if row["start"] == 0]
    assert repetitions == [0] * 4 and max(row["repetition"] for row in more if row["start"] == 4) == 3
    assert [row for row in more if row["start"] == 4] == [row for row in whole if row["start"] == 4]


def test_greedy_is_measured_once(policy):
    rows = draw(policy, temperature=0.0, samples=50)
    assert len(rows) == 6 and all(len(row["correct"]) == len(row["lengths"]) == 1 for row in rows)
    assert all(len(row["components"]["exact"]) == 1 for row in rows)


def test_the_page_of_an_evaluation(policy, tmp_path, capsys):
    joined = held_out.by_problem(draw(policy))
    facts = {"all": summary.measure(joined), "levels": summary.by_level(joined),
             "against": {"file": "runs/base", **summary.compare(joined, joined)}}
    facts = json.loads(json.dumps(facts))
    evaluation_page.print_evaluation("step 3", facts)
    text = capsys.readouterr().out
    assert "6 x 6" in text and "pass@4" in text and "maj@6" in text and "gained, lost, kept" in text
    assert evaluation_page.draw(facts, tmp_path / "pass_at_k.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
