"""A folder that runs share: its groups, files of others, and their lifetime."""
import json
import os
import threading

import pytest

from jaxrl_llm.replay.pool import FORMAT, Pool, digest, of_task
from jaxrl_llm.tasks.base import Problem

TASK = [Problem("1+1=", "2", 0), Problem("2+2=", "4", 1), Problem(({"role": "user", "content": "3+3"},), "6", 2),
        Problem("1+1=", "2", 3)]


def pool(folder, node, max_age=60.0):
    return Pool(folder, node, of_task(TASK), max_age)


def test_published_groups_are_read_by_others(tmp_path):
    a, b, c = (pool(tmp_path / "pool", name) for name in "abc")
    a.publish(3, [(TASK[1], ["4", "5"]), (TASK[2], ["6", "\ud800 x é"])])
    b.publish(1, [(TASK[3], ["2", "3"])])
    result, left = c.read(2)
    assert [(one.problem, one.completions, one.node, one.step) for one in result] == [
        (1, ("4", "5"), "a", 3), (2, ("6", "? x é"), "a", 3), (0, ("2", "3"), "b", 1)] and left == {}
    assert [one.node for one in a.read(2)[0]] == ["b"]  # not one's own
    assert c.read(3) == ([], {"size": 3})
    a.publish(3, [])
    assert [one.node for one in c.read(2)[0]] == ["b"]  # a step that is done again takes the place of the first


def test_problems_are_known_by_prompt_and_answer():
    """Equal ones are one; another answer, prompt or form is another problem. The digest is that of `sha256sum`."""
    assert digest(TASK[0]) == digest(TASK[3]) and len({digest(one) for one in TASK}) == 3 and len(of_task(TASK)) == 3
    assert digest(Problem("1+1=", "3", 0)) != digest(TASK[0]) != digest(Problem("1+1", "2", 0))
    assert digest(TASK[0]) == "f5ee968b8893e73e" and digest(Problem("1+1=", "2", 9, extra={"x": 1})) == digest(TASK[0])


def test_files_get_old(tmp_path):
    a, b = pool(tmp_path, "a", max_age=100), pool(tmp_path, "b", max_age=100)
    for step in (0, 1):
        a.publish(step, [(TASK[0], ["2", "3"])])
    os.utime(tmp_path / "a-0.json", (1e9, 1e9))
    result, left = b.read(2)
    assert [one.step for one in result] == [1] and left == {"old": 1}
    b.publish(5, [])
    assert (tmp_path / "a-0.json").exists()  # that of another is left alone
    a.publish(2, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1.json", "a-2.json", "b-5.json"]


HOSTILE = {
    "no JSON": b"{", "no UTF-8": b"\xff\xfe{}", "empty": b"", "an array": b"[]", "nested": b"[" * 100_000, "a number": b"1e999",
    "another format": json.dumps({"format": "other", "groups": []}).encode(),
    "no groups": json.dumps({"format": FORMAT, "groups": {"a": 1}}).encode(),
    "a group that is none": json.dumps({"format": FORMAT, "groups": ["x"]}).encode(),
    "completions that are none": json.dumps({"format": FORMAT, "groups": [{"problem": "x", "completions": [1, 2]}]}).encode(),
    "a text too long": json.dumps({"format": FORMAT, "groups": [
        {"problem": digest(TASK[0]), "completions": ["x" * (2**20 + 1), "y"]}]}).encode(),
    "a file too large": b" " * (2**24 + 1),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_garbage_is_counted_and_left(tmp_path, what):
    reader = pool(tmp_path, "reader")
    (tmp_path / "x-1.json").write_bytes(HOSTILE[what])
    pool(tmp_path, "good").publish(0, [(TASK[0], ["2", "3"])])
    result, left = reader.read(2)
    assert [one.node for one in result] == ["good"] and left == {"garbage": 1}


def test_nothing_but_plain_files_is_opened_and_nothing_is_waited_for(tmp_path):
    reader = pool(tmp_path / "pool", "reader")
    (tmp_path / "secret.json").write_text(json.dumps({"format": FORMAT, "groups": [
        {"problem": digest(TASK[0]), "completions": ["2", "3"]}]}))
    (tmp_path / "pool" / "link-1.json").symlink_to(tmp_path / "secret.json")
    os.mkfifo(tmp_path / "pool" / "pipe-1.json")
    (tmp_path / "pool" / "folder-1.json").mkdir()
    (tmp_path / "pool" / "../pool/.hidden-1.json.7").write_text("{}")
    (tmp_path / "pool" / "no name").write_text("{}")
    assert reader.read(2) == ([], {"garbage": 3, "name": 1})


def test_unknown_problems_are_left(tmp_path):
    a, b = pool(tmp_path, "a"), pool(tmp_path, "b")
    a.publish(0, [(Problem("9+9=", "18", 0), ["1", "2"]), (TASK[0], ["2", "3"])])
    result, left = b.read(2)
    assert [one.problem for one in result] == [0] and left == {"unknown": 1}
    for name in ("", "a/b", "../x", "a-b", "x" * 65):
        with pytest.raises(ValueError, match="names files"):
            pool(tmp_path, name)


def test_readers_see_only_whole_files(tmp_path):
    """Four nodes publish at once while another reads: every file that it reads is whole."""
    reader, stop, seen = pool(tmp_path, "reader"), threading.Event(), []

    def write(name):
        one, step = pool(tmp_path, name), 0
        while not stop.is_set():
            one.publish(step % 3, [(TASK[0], ["2" * 2000, "3"])] * 20)
            step += 1

    writers = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for one in writers:
        one.start()
    for _ in range(40):
        seen.append(reader.read(2))
    stop.set()
    for one in writers:
        one.join()
    assert not any(left for _, left in seen) and max(len(result) for result, _ in seen) >= 20
    assert all(len(result) % 20 == 0 for result, _ in seen)
