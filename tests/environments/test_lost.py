"""Lost trajectories on disk: what is kept, what a resume drops, and what plays again as it was."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import replay
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.runs.lost import FILE_NAME, KEPT, LostWriter, read_lost

ROOT = Path(__file__).parents[2]
TARGET = "faulty_environments:obedient"


def say(text):
    return {"role": "assistant", "content": text}


def make(folder, step=0, **settings):
    """A runner of which lost trajectories are written, their writer, and the lines for the terminal."""
    runner, shown = Runner(TARGET, **{"seed": 3, "kind": "threads", "retries": 0, "limit": 1.0, **settings}), []
    return runner, LostWriter(folder, step, runner, shown.append), shown


def fail(runner, said):
    """Opens trajectories and says to each the messages, the last of which fails."""
    runner.reset({uid: runner.environment.task.train[uid % 10] for uid in said})
    for turn in range(max(map(len, said.values()))):
        runner.step({uid: say(texts[turn]) for uid, texts in said.items() if turn < len(texts)})


def uids(folder):
    return [(step, lost.uid) for step, lost in read_lost(folder)]


def test_a_line_has_all_that_a_replay_needs(tmp_path):
    runner, _, shown = make(tmp_path)
    fail(runner, {7: ["a", "raise"], 8: ["raise"], 9: ["rubbish"]})
    (step, lost), *_ = sorted(read_lost(tmp_path), key=lambda record: record[1].uid)
    assert (step, lost.uid, lost.problem, lost.kind, lost.turn) == (0, 7, 7, "error", 2) and "KeyError" in lost.message
    assert lost.said == [say("a"), say("raise")] and lost.key == runner.recording(7).key
    assert [line.count(f" at turn 1: {kind}, ") for line, kind in zip(shown, ("error", "rubbish"))] == [1, 1]
    assert len(shown) == 2 and f"`python -m jaxrl_llm.audits.replay {tmp_path} 8` plays it again alone" in shown[0]


def test_the_newest_of_each_kind_are_kept(tmp_path):
    runner, writer, shown = make(tmp_path)
    fail(runner, {0: ["rubbish"]})
    count = 2 * KEPT
    fail(runner, {uid: ["raise"] for uid in range(1, count + 1)})
    assert uids(tmp_path) == [(0, uid) for uid in range(count + 1)]
    writer.step = 1
    fail(runner, {count + 1: ["raise"]})
    assert uids(tmp_path) == [(0, 0), *((0, uid) for uid in range(KEPT + 2, count + 1)), (1, count + 1)]
    assert len(shown) == 2  # one for each kind
    with pytest.raises(ValueError, match=f"no trajectory 5; the last ones that it has are .*{count + 1}. Of each kind"):
        replay.find(tmp_path, 5)


def test_a_resume_drops_what_is_done_again(tmp_path):
    runner, writer, _ = make(tmp_path)
    for writer.step, uid in ((1, 3), (2, 4), (2, 5), (3, 6)):
        fail(runner, {uid: ["raise"]})
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"step": 3, "uid"')  # cut short by a kill
    runner, writer, _ = make(tmp_path, step=2)
    assert uids(tmp_path) == [(1, 3), (2, 4), (2, 5)]
    fail(runner, {5: ["raise"], 7: ["raise"]})  # the evaluation after step 2 is repeated
    writer.step = 3
    fail(runner, {6: ["raise"]})
    assert uids(tmp_path) == [(1, 3), (2, 4), (2, 5), (2, 7), (3, 6)]
    make(tmp_path)  # a new run
    assert not (tmp_path / FILE_NAME).exists()


def test_a_runner_apart_reports_to_the_same_file(tmp_path):
    """Whenever it was made; the note of an error names what was lost last, wherever."""
    runner = Runner(TARGET, seed=3, kind="threads", retries=0, limit=1.0)
    apart, shown = runner.apart(), []
    writer = LostWriter(tmp_path, 0, runner, shown.append)
    fail(apart, {7: ["raise"]})
    assert uids(tmp_path) == [(0, 7)] and len(shown) == 1 and "trajectory 7: " in writer.note()
    fail(runner, {8: ["raise"]})
    fail(apart.apart(), {9: ["raise"]})
    assert [uid for _, uid in uids(tmp_path)] == [7, 8, 9] and "trajectory 9: " in writer.note()


def replayed(folder, uid):
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.run([sys.executable, "-m", "jaxrl_llm.commands.cli", "replay", folder, str(uid)], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": path})


@pytest.mark.slow
def test_an_environment_that_dies_dies_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 1, "config": {"environment": TARGET}}))
    runner, _, _ = make(tmp_path, kind="processes")
    try:
        fail(runner, {3: ["hello", "die"]})
    finally:
        runner.close()
    done = replayed(tmp_path, 3)
    assert done.returncode == 3, done.stderr  # the exit code of the environment
    key = read_lost(tmp_path)[0][1].key
    assert "crash at turn 2, the worker process ended with code 3" in done.stdout
    assert "[assistant]\nhello\n--- turn 1: reward 0.25, " in done.stdout and f"[user]\n{key} hello" in done.stdout
    assert done.stdout.endswith("[assistant]\ndie\n")


def test_what_does_not_fail_again_and_what_is_another(tmp_path, capsys):
    runner, _, _ = make(tmp_path, options={"folder": str(tmp_path)})
    fail(runner, {1: ["a", "once"]})
    _, lost = replay.find(tmp_path, 1)
    environment = environments.make(TARGET, folder=str(tmp_path))
    problem = replay.problem_of(environment.task, lost.problem)
    assert not replay.play(environment, problem, lost)
    shown = capsys.readouterr().out
    assert shown.endswith("--- it did not fail this time\n") and "--- turn 2: reward 0.25, " in shown
    assert replay.play(environment, problem, lost._replace(key=5, said=[say("b"), say("raise")]))
    assert "its turns before the failure are not those of the run" in capsys.readouterr().out
    with pytest.raises(ValueError, match="problem 25, and the task now has 25 problems"):
        replay.problem_of(environment.task, 25)
    assert replay.problem_of(environment.task, 24).id == 24  # held out
