"""JSONL problems: valid lines, and the exact place of an error."""

import bz2
import gzip
import json
import lzma

import pytest

from jaxrl_llm import tasks


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


GOOD = {"prompt": "1+1=", "answer": "2"}
OTHER = {"prompt": "9+9=", "answer": "18"}


def read_problems(path):
    """The problems of a file, with another one held out."""
    other = path + ".heldout.jsonl"
    with open(other, "w") as file:
        file.write(json.dumps(OTHER) + "\n")
    return list(tasks.make("jsonl", path=path, heldout_path=other).train)


def test_reads_text_messages_level_and_extra(tmp_path):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
    path = write(tmp_path / "a.jsonl", {**GOOD, "level": "easy", "by": "me"}, "", {"messages": messages, "answer": 4})
    first, second = read_problems(path)
    assert (first.prompt, first.answer, first.id, first.level, first.extra) == ("1+1=", "2", 0, "easy", {"by": "me"})
    assert (second.prompt, second.answer, second.id) == (tuple(messages), "4", 1)
    assert tasks.text_of(second) == "Be short.\n2+2?"


def test_split_by_hash_is_disjoint_and_independent_of_order(tmp_path):
    rows = [{"prompt": f"question {i}", "answer": str(i)} for i in range(50)]
    task = tasks.make("jsonl", path=write(tmp_path / "a.jsonl", *rows))
    back = tasks.make("jsonl", path=write(tmp_path / "b.jsonl", *rows[::-1]))
    heldout = {p.prompt for p in task.heldout}
    assert 2 <= len(heldout) <= 20 and len(task.train) + len(heldout) == 50
    assert not heldout & {p.prompt for p in task.train}
    assert heldout == {p.prompt for p in back.heldout}
    assert [p.id for p in [*task.train, *task.heldout]] == list(range(50))


def test_two_files_may_not_share_a_prompt(tmp_path):
    train = write(tmp_path / "train.jsonl", GOOD, {"prompt": "2+2=", "answer": "4"})
    heldout = write(tmp_path / "test.jsonl", {"prompt": "3+3=", "answer": "6"})
    task = tasks.make("jsonl", path=train, heldout_path=heldout)
    assert [p.answer for p in task.train] == ["2", "4"] and [(p.answer, p.id) for p in task.heldout] == [("6", 2)]
    with pytest.raises(ValueError, match=r"1 prompts are in both .*train.jsonl and .*shared.jsonl.*'1\+1='"):
        tasks.make("jsonl", path=train, heldout_path=write(tmp_path / "shared.jsonl", GOOD))


def test_prompts_that_differ_in_case_and_white_space_are_one(tmp_path):
    rows = [{"prompt": f"question {i}", "answer": str(i)} for i in range(50)]
    plain = tasks.make("jsonl", path=write(tmp_path / "a.jsonl", *rows))
    again = [{"prompt": f" Question\n{i} ", "answer": str(i)} for i in range(50)]
    twice = tasks.make("jsonl", path=write(tmp_path / "b.jsonl", *rows, *again))
    for side, both in ((plain.train, twice.train), (plain.heldout, twice.heldout)):
        assert [p.prompt for p in both][:len(side)] == [p.prompt for p in side]  # in place where no prompt comes again
        assert [p.answer for p in both] == [p.answer for p in side] * 2
    with pytest.raises(ValueError, match="50 prompts are in both .*'question 0'"):
        tasks.make("jsonl", path=write(tmp_path / "c.jsonl", *rows), heldout_path=write(tmp_path / "d.jsonl", *again))


@pytest.mark.parametrize(("line", "message"), [
    ('{"prompt": "x", "answer": ', "Expecting value"),
    ("[1, 2]", "expected a JSON object, got list"),
    ({"prompt": "x"}, "'answer' is missing"),
    ({"question": "x", "answer": "1"}, "exactly one of 'prompt' and 'messages'"),
    ({"prompt": "x", "messages": [], "answer": "1"}, "exactly one of"),
    ({"prompt": "", "answer": "1"}, "'prompt' must be a non-empty string"),
    ({"prompt": 3, "answer": "1"}, "'prompt' must be a non-empty string"),
    ({"prompt": "x", "answer": ""}, "'answer' must be"),
    ({"prompt": "x", "answer": None}, "'answer' must be an answer, got None"),
    ({"prompt": "x", "answer": {"value": 5}}, "got a dict, .*for example answer='answer.ground_truth'"),
    ({"messages": [{"role": "user"}], "answer": "1"}, "'messages' must be"),
    ({"messages": [], "answer": "1"}, "'messages' must be"),
])
def test_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 3: .*{message}"):
        read_problems(write(tmp_path / "bad.jsonl", GOOD, "", line, GOOD))


@pytest.mark.parametrize(("given", "answer"), [
    (0.5, "0.5"), (5.0, "5.0"), (-1e-7, "-1e-07"), (True, "true"), (False, "false"), ([1, "é"], '[1, "é"]'), (0, "0")])
def test_answers_are_taken_as_they_are_written(tmp_path, given, answer):
    assert [p.answer for p in read_problems(write(tmp_path / "a.jsonl", {"prompt": "x", "answer": given}))] == [answer]


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_compressed_files_and_patterns_of_files(tmp_path, ending, pack):
    for name, rows in (("a1", [GOOD]), ("a2", [{"prompt": "2+2=", "answer": "4"}, {"prompt": "x"}])):
        (tmp_path / f"{name}.jsonl{ending}").write_bytes(pack("\n".join(map(json.dumps, rows)).encode()))
    first = str(tmp_path / f"a1.jsonl{ending}")
    good = tasks.make("dataset", path=first, split="", heldout=first)
    assert [(p.answer, p.prompt) for p in good.heldout] == [("2", ({"role": "user", "content": "1+1="},))]
    with pytest.raises(ValueError, match=rf"a2\.jsonl{ending}, line 2: 'answer' is missing"):
        tasks.make("dataset", path=str(tmp_path / f"a*.jsonl{ending}"))
    for broken in (b"no", pack(b"x" * 999)[:-9]):
        (tmp_path / f"b.jsonl{ending}").write_bytes(broken)
        with pytest.raises(ValueError, match=rf"b\.jsonl{ending} cannot be decompressed"):
            tasks.make("dataset", path=str(tmp_path / f"b.jsonl{ending}"))


def test_bad_bytes_empty_file_and_missing_file(tmp_path):
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"bytes\.jsonl, line 1: 'utf-8' codec"):
        read_problems(str(path))
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no rows; .*a text to imitate 'prompt' and 'response'"):
        read_problems(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(FileNotFoundError):
        read_problems(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="needs the keyword 'path'"):
        tasks.make("jsonl")
