"""The search tool."""
import json

import pytest
from spoken import call, say

from jaxrl_llm import environments
from jaxrl_llm.environments import base, search

DOCUMENTS = [{"title": "Spiders", "text": "A spider has eight legs."}, {"text": "A horse has four legs and a mane."},
             {"title": "Tea", "text": "Tea is made of leaves. " + "x" * 2000}]


def test_search(tmp_path):
    pytest.importorskip("bm25s")
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, DOCUMENTS)) + "\n\n")
    environment = environments.make("tool_use", tools={"search": {"path": str(path), "results": 2}})
    state, _ = base.begin(environment, environment.task.train[0], 0)
    def ask(query):
        return base.advance(environment, state, say(call("search", query=query))).messages[0]["content"]
    actual = ask("How many legs has a spider?")
    assert actual.startswith("[1] Spiders\nA spider has eight legs.\n\n[2] \nA horse")
    assert ask("quantum chromodynamics") == ask("?! the") == ask("") == "(nothing found)"
    assert len(ask("tea leaves")) < 1100 and ask("spider " * 5000).startswith("[1] Spiders")
    path.write_text('{"text": "tea\u2028and\x85 milk"}\r\n{"title": null, "text": "horse"}\n',  # only \n ends a line
                    encoding="utf-8")
    assert search.read_documents(str(path)) == [("", "tea\u2028and\x85 milk"), ("", "horse")]
    for text, why in (("", "holds no documents"), ('{"text": "the of a"}', "1 documents without a word to find them by"),
                      ("{}", "line 1: expected an object with 'text'"), ("[1]", "line 1"),
                      ('{"text": 1}', "its text is not a text")):
        other = tmp_path / f"{len(text)}.jsonl"
        other.write_text(text)
        with pytest.raises(ValueError, match=why):
            environments.make("tool_use", tools={"search": {"path": str(other)}})


def test_search_says_which_package_is_missing(monkeypatch, tmp_path):
    import sys
    monkeypatch.setitem(sys.modules, "bm25s", None)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ValueError, match=r"needs the package bm25s, .*pip install 'jaxrl_llm\[environments\]'"):
        environments.make("tool_use", tools={"search": {"path": str(tmp_path / "x.jsonl")}})
