"""Repeated measurements: a continued one equals an uninterrupted one, each belongs to one task, greedy needs one repetition."""
import json
import os
import subprocess
import sys

import chatter
import jax
import pytest
from run_folders import ROOT, base

from jaxrl_llm.compare import evaluation_page, held_out
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.environments import base as environments
from jaxrl_llm.evaluation import summary
from jaxrl_llm.runs import trained
from jaxrl_llm.sampling import fitting, heldout
from jaxrl_llm.setup import setup

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
    header, joined = held_out.measured(tmp_path, HEADER["task"])
    assert header == HEADER and joined == held_out.by_problem(whole) and {len(row["correct"]) for row in joined.values()} == {6}
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


def test_the_header_has_all_that_draws_and_scores_depend_on(tmp_path):
    """Weights, rewards and settings of sampling are in it, the place of the run and what a draw costs are not."""
    def header(**changes):
        return held_out.header_of(trained.untrained(base(**changes)), problems=6, temperature=1.0, seed=0)

    first, file = header(), tmp_path / "completions.jsonl"
    assert held_out.stored(file, first) == held_out.stored(file, header(**{"sampling.micro_batches": 2, "steps": 9})) == []
    assert [path.name for path in tmp_path.iterdir()] == ["completions.jsonl"]  # replaced in one piece
    for changes, differs in (({"seed": 1}, "settings.seed, weights"), ({"lora.rank": 2}, "weights"),
                             ({"rewards": "format(pattern='a')"}, "settings.rewards"), ({"sampling.top_k": 3}, "settings"),
                             ({"prompts.per_step": 2}, "settings.prompts.per_step"),
                             ({"model.chat_template": "{{ messages }}"}, "chat_templates"),
                             ({"sampling.stop_strings": ("a",)}, "settings.sampling.stop_strings")):
        with pytest.raises(ValueError, match="holds another measurement") as error:
            held_out.stored(file, header(**changes))
        assert all(name in str(error.value) for name in differs.split(", ")), (differs, error.value)
    assert json.loads(file.read_text()) == first


def test_what_two_measurements_differ_in_is_named_beside_their_difference(policy, capsys):
    """Other weights are what is compared; another temperature, length, reward or template is not."""
    def header(temperature=1.0, **changes):
        return held_out.header_of(trained.untrained(base(**changes)), problems=6, temperature=temperature, seed=0)

    first = header()
    assert held_out.differing(first, header(**{"seed": 1, "prompts.per_step": 2, "sampling.group": 4}) | {"problems": 3}) == {}
    other = header(0.3, **{"sampling.max_tokens": 9, "rewards": "format(pattern='a')", "model.chat_template": "{{ messages }}"})
    differing = held_out.differing(first, other)
    assert set(differing) == {"temperature", "sampling.max_tokens", "rewards", "chat_templates"}
    assert differing["temperature"] == (1.0, 0.3) and differing["sampling.max_tokens"][1] == 9
    earlier = {**first, "settings": {key: value for key, value in first["settings"].items() if key != "sampling.min_p"}}
    assert held_out.differing(first, earlier) == {}, "a key that a version did not have is at its default"
    joined = held_out.by_problem(draw(policy))
    evaluation_page.print_evaluation("step 3", {"all": summary.measure(joined), "levels": {}, "against": {
        "file": "runs/base", "differing": differing, **summary.compare(joined, joined)}})
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "not the policies alone: temperature" in text and "1.0 here, 0.3 there" in text


def test_a_measurement_that_is_complete_reads_no_weights(policy, monkeypatch):
    """A server that is no longer there is not asked; nothing is kept of the weights after a draw."""
    whole, (run, params) = draw(policy), policy
    assert run.source.held_out._engine._weights == (None, None)
    monkeypatch.setattr(run.source.held_out, "publish", None)
    assert held_out.draw(run.source, params, None, problems=6, samples=5, temperature=1.0, key=jax.random.key(0),
                         done=whole) == whole


def test_a_draw_that_is_stored_twice_counts_once(policy):
    whole = draw(policy)
    run, params = policy
    again = held_out.draw(run.source, params, None, problems=6, samples=5, temperature=1.0, key=jax.random.key(0),
                          done=[*whole[:6], *({**row, "start": 2} for row in whole[2:4])])
    assert again == whole


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


def played(problems=2, samples=8, done=(), **changes):
    """The records of trajectories of held-out problems, four in a group."""
    run = trained.untrained(chatter.get_config(**changes))
    return held_out.draw(run.source, run.params, run.lora, problems=problems, samples=samples, temperature=1.0,
                         key=jax.random.key(0), done=done)


def broken(place):
    """The environment that loses the trajectories of the held-out problem at `place`, and how much of them is allowed."""
    problems = fitting.held_out(chatter.letters().task.heldout, 8)
    return {"environment": f"chatter:letters(broken={problems[place].id})", "environment_invalid": 0.9}


@pytest.mark.parametrize("environment, contexts", [("letters", 1), ("forgetful", 3)])
def test_the_length_of_a_trajectory_is_all_that_the_policy_wrote(environment, contexts):
    changes = {} if contexts == 1 else {"sampling.max_turns": 6, "sampling.max_tokens": 64}
    run = trained.untrained(chatter.get_config(environment=f"chatter:{environment}", **changes))
    forest = heldout.sample_held_out(run.source, run.params, run.lora, 4, jax.random.key(0))
    lengths = [n for row in held_out.rows_of(forest, 0, 0) for n in row["lengths"]]
    own = forest.role == Role.POLICY
    assert lengths == [forest.length[own & (forest.uid == uid)].sum() for uid in forest.uid[forest.ends]]
    assert max(lengths) > 4 * contexts  # more than a turn of each context


def test_no_two_trajectories_have_the_same_key_of_the_environment(monkeypatch):
    keys, key_of = [], environments.key_of
    monkeypatch.setattr(environments, "key_of", lambda seed, uid: keys.append(key_of(seed, uid)) or keys[-1])
    whole = played(problems=6)
    played_keys = keys[-6 * 8:]
    assert len(set(played_keys)) == 6 * 8 and len(whole) == 6 * 2
    assert played(problems=6, done=whole[:4]) == whole  # continued after the first batch


def test_problems_whose_trajectories_are_lost_have_no_completions():
    rows = played(**broken(0))  # the first of two problems, in both repetitions
    assert [len(row["correct"]) for row in rows] == [0, 4, 0, 4]
    joined = held_out.by_problem(rows, 8)
    assert [len(row["correct"]) for row in joined.values()] == [8] and summary.measure(joined)["samples"] == 8
    alone = played(problems=3, samples=4, **broken(2), **{"prompts.per_step": 2})  # the only one of its batch
    assert [len(row["correct"]) for row in alone] == [4, 4, 0] and alone[2]["start"] == 2


@pytest.mark.slow
def test_evaluate_measures_what_an_environment_has_not_lost(tmp_path):
    def evaluate(place, problems):
        options = [f"--config.{key}={value}" for key, value in broken(place).items()]
        return subprocess.run(
            [sys.executable, "experiments/evaluate.py", "--config=tests/chatter.py", f"--out={tmp_path / str(problems)}",
             f"--problems={problems}", "--samples=8", *options], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})

    done = evaluate(0, 2)
    assert done.returncode == 0 and "1 of 2 problems have no completion and are left out" in done.stdout, done.stderr[-2000:]
    facts = json.loads((tmp_path / "2/evaluation.json").read_text())
    assert facts["task"].startswith("chatter:letters") and (facts["all"]["problems"], facts["all"]["samples"]) == (1, 8)
    assert evaluate(0, 2).returncode == 0  # nothing is drawn again
    nothing = evaluate(0, 1)
    assert nothing.returncode == 1 and "lost the trajectories of all problems (1), so there is nothing to" in nothing.stderr


def test_the_page_of_an_evaluation(policy, tmp_path, capsys):
    joined = held_out.by_problem(draw(policy))
    facts = {"all": summary.measure(joined), "levels": summary.by_level(joined),
             "against": {"file": "runs/base", **summary.compare(joined, joined)}}
    facts = json.loads(json.dumps(facts))
    evaluation_page.print_evaluation("step 3", facts)
    text = capsys.readouterr().out
    assert "6 x 6" in text and "pass@4" in text and "maj@6" in text and "gained, lost, kept" in text
    assert evaluation_page.draw(facts, tmp_path / "pass_at_k.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
