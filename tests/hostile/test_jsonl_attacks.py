"""Lines of a JSONL file that break readers, or make a problem that an empty completion solves: refused by file and line."""
import json
import warnings

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.control import r3l
from jaxrl_llm.store.lines import read_metrics

GOOD = '{"prompt": "1+1=", "answer": "2"}'


def read_problems(path):
    """The problems of a file, with another one held out."""
    with open(path + ".heldout.jsonl", "w") as file:
        file.write('{"prompt": "9+9=", "answer": "18"}\n')
    return list(tasks.make("jsonl", path=path, heldout_path=path + ".heldout.jsonl").train)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


ATTACKS = {
    "lists": ('{"prompt": "x", "answer": "1", "a": ' + "[" * 5000 + "]" * 5000 + "}", "nested deeper than 100 levels"),
    "objects": ('{"prompt": "x", "answer": "1", "a": ' + '{"a":' * 5000 + "1" + "}" * 5001, "nested deeper than 100 levels"),
    "just_too_deep": ('{"prompt": "x", "answer": "1", "a": ' + "[" * 100 + "]" * 100 + "}", "nested deeper than 100 levels"),
    "surrogate": (r'{"prompt": "x\ud800", "answer": "1"}', r"'\\ud800', half of a surrogate pair"),
    "surrogate_in_answer": (r'{"prompt": "x", "answer": "\uDC00"}', r"'\\udc00', half of a surrogate pair"),
    "surrogate_in_message": (r'{"messages": [{"role": "user", "content": "\ude00\ud83d"}], "answer": "1"}', r"'\\ude00', half"),
    "surrogate_in_key": (r'{"prompt": "x", "answer": "1", "\ud800": 1}', "half of a surrogate pair"),
    "space": ('{"prompt": "x", "answer": " "}', "'answer' must be .* an empty completion would be right"),
    "spaces": (r'{"prompt": "x", "answer": "\t\n\u00a0\u3000"}', "an empty completion would be right"),
    "invisible": (r'{"prompt": "x", "answer": "\u200b\u2060"}', "an empty completion would be right"),
    "nan": ('{"prompt": "x", "answer": "1", "weight": NaN}', "NaN is no JSON"),
    "infinity": ('{"prompt": "x", "answer": "1", "weight": -Infinity}', "-Infinity is no JSON"),
    "digits": ('{"prompt": "x", "answer": ' + "1" * 5000 + "}", "5000 digits"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_line_is_refused_by_its_number(tmp_path, name):
    line, message = ATTACKS[name]
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 3: .*{message}"):
        tasks.make("jsonl", path=write(tmp_path / "bad.jsonl", GOOD, "", line, GOOD))


def test_what_looks_alike_but_is_text_is_read(tmp_path):
    deep = "[" * 99 + "]" * 99
    path = write(tmp_path / "good.jsonl", r'{"prompt": "\ud83d\ude00", "answer": "\ud83d\ude00"}',
                 '{"prompt": "' + "[" * 5000 + '", "answer": 0}', '{"prompt": "x", "answer": "1", "a": ' + deep + "}",
                 r'{"prompt": "\\ud800", "answer": " 7 "}', r'{"prompt": "\u0000", "answer": "\u0000 1"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = read_problems(path)
    assert [(p.prompt[:7], p.answer) for p in result] == [
        ("\U0001f600", "\U0001f600"), ("[[[[[[[", "0"), ("x", "1"), ("\\ud800", " 7 "), ("\0", "\0 1")]
    assert json.dumps(result[2].extra["a"]) == deep


def test_keys_that_are_given_twice_are_warned_of_and_the_last_counts(tmp_path):
    twice = '{"prompt": "x", "answer": "1", "answer": "2"}'
    path = write(tmp_path / "twice.jsonl", GOOD, twice, '{"prompt": "y", "answer": "3", "a": {"b": 1, "b": 2, "b": 3}}')
    with pytest.warns(RuntimeWarning, match=r"twice\.jsonl, line 2: the key 'answer' is given twice, the last one counts "
                                            r"\(and so in 1 further lines\)"):
        result = read_problems(path)
    assert [p.answer for p in result] == ["2", "2", "3"] and result[2].extra == {"a": {"b": 3}}


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\n")
    assert read_problems(str(tmp_path / "a.jsonl"))[0].prompt == "1+1="


def test_other_readers_of_json_survive_deep_nesting(tmp_path):
    """A reflection that a policy writes, and an edited line of metrics."""
    assert r3l.parse_reflection('{"outcome": ' + "[" * 5000, 3) is None
    with pytest.raises(ValueError, match="line 1 is no JSON object with a step"):
        read_metrics(write(tmp_path / "metrics.jsonl", "[" * 5000))
