"""Files of texts: every form of rows to the last id, and what is refused, with its line and key."""
import json

import numpy as np
import pytest

from jaxrl_llm.data import reading
from jaxrl_llm.tokenizers import ByteTokenizer

# <user>, <assistant>: ids 60..62; the end of a turn is the end token, 258
CHAT = ("{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + ('<|eos|>' if m.role == 'assistant' else '') }}"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}")
DROPS = CHAT.replace("m.content +", "(m.content if loop.last else m.content.split(';')[-1]) +")
ASK, SAY = {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}
TOKENIZER = ByteTokenizer(CHAT)


@pytest.fixture
def read(tmp_path):
    def of(*rows, tokenizer=TOKENIZER, **options):
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return reading.read(str(path), tokenizer, **options)

    return of


@pytest.mark.parametrize("row", [
    {"messages": [ASK, SAY]}, {"messages": [ASK, SAY, {"role": "user", "content": "thanks"}]},
    {"prompt": "2+3", "response": "5"}, {"prompt": [ASK], "completion": [SAY]}, {"prompt": [ASK], "response": "5"},
    {"prompt": "never mind", "messages": [ASK, SAY], "response": None}])
def test_every_form_of_a_conversation_has_these_ids(read, row):
    (text,) = read(row).texts
    assert text.ids.tolist() == [*b"<u>2+3<a>5", 258] and text.ids.dtype == np.int32
    assert text.trained.tolist() == [False] * 9 + [True, True]
    assert (text.prompt, text.weight, text.writer, text.logprobs) == (9, 1.0, "", None)
    assert text.place.endswith("texts.jsonl, line 1")


def test_plain_texts_are_read_as_they_are(read):
    whole, behind = read({"text": "ab"}, {"prompt": "2+3=", "response": "5", "weight": 0.5, "writer": "qwen"}, chat=False).texts
    assert whole.ids.tolist() == [257, *b"ab", 258] and whole.trained.tolist() == [False, True, True, True]
    assert behind.ids.tolist() == [257, *b"2+3=5", 258] and behind.prompt == 5
    assert (behind.weight, behind.writer) == (0.5, "qwen")


def test_columns_of_other_names_are_named_by_templates(read):
    (text,) = read({"question": "2+3", "why": "so", "answer": 5}, prompt="{question}", response="{why}: {answer}").texts
    assert text.ids.tolist() == [*b"<u>2+3<a>so: 5", 258]
    row = {"messages": [ASK, SAY], "chosen": "7", "question": "2+4", "answer": 6}
    (text,) = read(row, prompt="{question}", response="{answer}").texts
    assert text.ids.tolist() == [*b"<u>2+4<a>6", 258]


def test_all_turns_are_learned_or_the_last_one(read):
    row = {"messages": [ASK, SAY, {"role": "tool", "content": "no"}, {"role": "assistant", "content": "6"}]}
    (both,), (last,) = read(row).texts, read(row, turns="last").texts
    assert both.ids.tolist() == last.ids.tolist() == [*b"<u>2+3<a>5", 258, *b"<t>no<a>6", 258]
    assert both.trained.tolist() == [False] * 9 + [True] * 2 + [False] * 8 + [True] * 2
    assert last.trained.tolist() == [False] * 19 + [True] * 2 and last.prompt == 19


def test_turns_of_templates_that_drop_thoughts_are_counted(read):
    row = {"messages": [ASK, {"role": "assistant", "content": "hm;5"}, ASK, {"role": "assistant", "content": "so;6"}]}
    given = read(row, {"messages": [ASK, SAY]}, tokenizer=ByteTokenizer(DROPS))
    assert [bytes(text.ids[text.trained][:-1].tolist()) for text in given.texts] == [b"hm;5", b"so;6", b"5"]
    assert given.counts == {"rows": 2, "examples": 3, "divided": 1, "too_long": 0, "invalid": 0,
                            "no_answer": 0, "contradicts": 0}


@pytest.mark.parametrize("row", [
    {"prompt": "2+3", "chosen": "5", "rejected": "6"},
    {"chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "6"}]},
    {"prompt": "2+3", "chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "6"}], "messages": [ASK, SAY]},
    {"prompt": [ASK], "chosen": [SAY], "rejected": [{"role": "assistant", "content": "6"}]},
    {"prompt": [{**ASK, "tool_calls": None}], "chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "6"}]}])
def test_every_form_of_a_pair_has_these_ids(read, row):
    given = read(row)
    ((chosen, rejected),) = given.pairs
    assert not given.texts and given.counts["examples"] == 1
    assert chosen.ids.tolist() == [*b"<u>2+3<a>5", 258] and rejected.ids.tolist() == [*b"<u>2+3<a>6", 258]
    assert chosen.trained.tolist() == rejected.trained.tolist() == [False] * 9 + [True, True]


def test_log_probs_stand_at_the_tokens_that_are_learned(read):
    (text,) = read({"messages": [ASK, SAY], "logprobs": [-0.5, None]}).texts
    assert np.isnan(text.logprobs[:9]).all() and text.logprobs[9] == -0.5 and np.isnan(text.logprobs[10])


@pytest.mark.parametrize(("row", "error"), [
    ({"messages": [ASK]}, "no message of the assistant"),
    ({"messages": [ASK, {"role": "asistant", "content": "5"}]},
     r"messages\[1\]\.role: Unknown role 'asistant'\. Did you mean 'assistant'"),
    ({"messages": [{"role": "human", "content": "5"}, SAY]}, r"messages\[0\]\.role: Unknown role 'human'.*Did you mean 'user'"),
    ({"messages": [ASK, {"role": "assistant", "content": 5}]}, r"'messages' must be .*messages\[1\].content is 5"),
    ({"messages": [ASK, {"role": "assistant"}]}, r"messages\[1\] has no 'content'"),
    ({"messages": [ASK, "5"]}, r"messages\[1\] is '5'"),
    ({"messages": "5"}, "'messages' must be a non-empty list"),
    ({"prompt": "2+3"}, "'prompt' without a 'response' is a problem"),
    ({"response": "5"}, "lacks its 'prompt'"),
    ({"prompt": "2+3", "response": ""}, "'response' is an empty text"),
    ({"question": "2+3"}, r"keys \['question'\]; give 'messages'.*, or name other columns, prompt='\{COLUMN\}' and response="),
    ({"prompt": "2+3", "chosen": "5"}, "lacks 'rejected'"),
    ({"chosen": "5", "rejected": "6"}, "lacks its 'prompt'"),
    ({"prompt": "2+3", "chosen": "5", "rejected": "5"}, "are equal, '5'"),
    ({"prompt": "2*3", "chosen": [ASK, SAY], "rejected": [ASK, {"role": "assistant", "content": "6"}]}, "'prompt' is '2"),
    ({"messages": [ASK, SAY], "weight": -1}, "'weight' is -1"),
    ({"messages": [ASK, SAY], "logprobs": [-1]}, "'logprobs' has 1 entries, and what is learned has 2 tokens"),
    ({"messages": [ASK, SAY], "logprobs": [-1, 0.5]}, r"'logprobs' is \[-1, 0.5\]; give a list of numbers of at most 0"),
    ({"messages": [ASK, SAY], "tools": "{"}, "'tools' is no JSON"),
    ({"prompt": [ASK], "response": [ASK]}, r"response\[0\].role is 'user'")])
def test_bad_rows_are_refused_with_their_line(read, row, error):
    with pytest.raises(ValueError, match=r"texts\.jsonl, line 2: .*" + error):
        read({"messages": [ASK, SAY]}, row)


def test_bad_rows_may_be_left_out(read):
    with pytest.warns(RuntimeWarning, match="1 are malformed and left out, the first: .*line 2: no message of the assistant"):
        given = read({"messages": [ASK, SAY]}, {"messages": [ASK]}, invalid="skip")
    assert given.counts["invalid"] == 1 and len(given.texts) == 1


def test_long_rows_are_counted_and_never_cut(read):
    rows = [{"messages": [ASK, SAY]}, {"prompt": "2+3", "response": "5."}]
    with pytest.warns(RuntimeWarning, match="of the 2 rows of .*, 1 have more than 11 tokens and are left out"):
        given = read(*rows, longest=11)
    assert [len(text.ids) for text in given.texts] == [11] and given.counts["too_long"] == 1
    with pytest.raises(ValueError, match="none of the 2 rows of .* can be learned from: 2 have more than 10 tokens"):
        read(*rows, longest=10)


@pytest.mark.parametrize(("wrong", "left"), [("keep", 3), ("drop", 1)])
def test_rows_without_the_right_answer_are_counted_and_kept_or_dropped(read, wrong, left):
    rows = [{"prompt": "2+3", "response": said, "answer": 5} for said in ("It is 5.", "hm", "It is 6.")]
    with pytest.warns(RuntimeWarning, match=f"1 end without an answer; 1 end with another answer than theirs; wrong={wrong}"):
        given = read(*rows, reward="last_number", wrong=wrong)
    assert (given.counts["no_answer"], given.counts["contradicts"], len(given.texts)) == (1, 1, left)
    with pytest.raises(ValueError, match="line 1: there is no column 'answer'"):
        read({"prompt": "2+3", "response": "5"}, reward="last_number")


def test_texts_and_pairs_are_not_mixed_and_messages_need_a_template(read):
    with pytest.raises(ValueError, match=r"has texts \(.*line 1\) and pairs \(.*line 2\)"):
        read({"messages": [ASK, SAY]}, {"prompt": "2+3", "chosen": "5", "rejected": "6"})
    with pytest.raises(ValueError, match="set config.model.chat_template .*, in a run config.texts.options='chat=False'"):
        read({"messages": [ASK, SAY]}, tokenizer=ByteTokenizer())
    with pytest.raises(ValueError, match="the turns of 'chosen' are no single text"):
        read({"prompt": "2+3", "chosen": [{"role": "assistant", "content": "hm;5"}, ASK, SAY], "rejected": "6"},
             tokenizer=ByteTokenizer(DROPS))


def test_rows_may_come_from_a_function(tmp_path, monkeypatch):
    (tmp_path / "rows_of_mine.py").write_text("def rows():\n    return [{'prompt': '2+3', 'response': '5'}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    (text,) = reading.read("rows_of_mine:rows", TOKENIZER).texts
    assert text.ids.tolist() == [*b"<u>2+3<a>5", 258] and text.place == "rows_of_mine:rows, row 0"


@pytest.mark.slow
def test_parquet_has_the_same_texts(read, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [ASK, SAY], "weight": 2.0}, {"messages": [ASK, SAY, {"role": "tool", "content": "6"}, SAY]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "texts.parquet")
    ours, theirs = read(*rows).texts, reading.read(str(tmp_path / "texts.parquet"), TOKENIZER).texts
    assert [(text.ids.tolist(), text.trained.tolist(), text.weight) for text in ours] == [
        (text.ids.tolist(), text.trained.tolist(), text.weight) for text in theirs]
