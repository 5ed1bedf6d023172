"""Data sets of every form by one mapping of columns: rows, held-out rows, and errors that name the row or column."""
import gzip
import json
import sys

import pytest

from jaxrl_llm import rewards, tasks
from jaxrl_llm.engines.prompts import encode_problem
from jaxrl_llm.tasks import columns
from jaxrl_llm.tokenizers import ByteTokenizer

datasets = pytest.importorskip("datasets")
SUMS = [{"question": f"{n} + {n}?", "answer": f"It is {n} and {n}.\n#### {2 * n:,}", "source": {"name": f"book {n}"}}
        for n in range(500, 530)]
GSM8K = {"prompt": "{question}\nPut the number in \\boxed{}.", "extract": "gsm8k"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows in all forms; a folder of two splits; what `save_to_disk` writes."""
    path = tmp_path_factory.mktemp("data")
    cache = path / "cache"
    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, cache
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(SUMS)
    table.to_parquet(path / "sums.parquet")
    table.remove_columns("source").to_csv(path / "sums.csv")
    (path / "sums.json").write_text(json.dumps(SUMS))
    (path / "sums.jsonl").write_text("\n".join(map(json.dumps, SUMS)))
    splits = datasets.DatasetDict({"train": table.select(range(24)), "test": table.select(range(24, 30))})
    splits.save_to_disk(path / "saved")
    (path / "hub").mkdir()
    for name, part in splits.items():
        part.to_parquet(path / "hub" / f"{name}-00000-of-00001.parquet")
    yield path
    datasets.config.HF_DATASETS_CACHE = before


def prompts(side):
    return [tasks.text_of(problem) for problem in side]


@pytest.mark.parametrize("form", ["sums.parquet", "sums.csv", "sums.json", "sums.jsonl", "sums*.parquet"])
def test_all_forms_of_a_file_are_the_same_task(folder, form):
    task = tasks.make("dataset", path=str(folder / form), **GSM8K)
    everything = [*task.train, *task.heldout]
    assert sorted(prompts(everything)) == [f"{n} + {n}?\nPut the number in \\boxed{{}}." for n in range(500, 530)]
    assert {p.prompt[0]["content"].split()[0]: p.answer for p in everything} == {str(n): f"{2 * n:,}" for n in range(500, 530)}
    assert [p.id for p in everything] == list(range(30)) and 2 <= len(task.heldout) <= 12 and task.reward == "boxed"
    if form != "sums.csv":
        assert everything[0].extra["source"] == {"name": "book " + everything[0].prompt[0]["content"].split()[0]}
        assert everything[0].extra["answer"].startswith("It is")  # the text that the answer is taken from


def test_the_answer_of_a_data_set_is_what_its_reward_accepts(folder):
    task = tasks.make("dataset", path=str(folder / "sums.parquet"), **GSM8K)
    problem = task.train[0]
    number = int(problem.answer.replace(",", ""))
    scores = rewards.combine(["boxed"])([rf"so \boxed{{{number}}}", rf"so \boxed{{{number + 1}}}"], [problem.answer] * 2)
    assert scores.total.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["saved", "hub"])
def test_a_folder_of_splits(folder, name):
    task = tasks.make("dataset", path=str(folder / name), **GSM8K)
    assert (len(task.train), len(task.heldout)) == (24, 6) and prompts(task.heldout)[0].startswith("524")
    share = tasks.make("dataset", path=str(folder / name), heldout=0.5, split="test", **GSM8K)
    assert len(share.train) + len(share.heldout) == 6
    few = tasks.make("dataset", path=str(folder / name), limit=4, **GSM8K)
    assert prompts(few.train) == prompts(task.train)[:4] and prompts(few.heldout) == prompts(task.heldout)[:4]
    if name == "hub":
        part = tasks.make("dataset", path=str(folder / name), split="train[:25%]", heldout="train[25%:50%]", **GSM8K)
        assert prompts(part.train) == prompts(task.train)[:6] and prompts(part.heldout) == prompts(task.train)[6:12]
        stream = tasks.make("dataset", path=str(folder / name), streaming=True, limit=5, **GSM8K)
        assert prompts(stream.train) == prompts(task.train)[:5] and len(stream.heldout) == 5


def test_a_data_set_to_be_measured_on_alone(folder):
    task = tasks.make("dataset", path=str(folder / "saved"), split="", heldout="train", **GSM8K)
    assert len(task.train) == 0 and [p.id for p in task.heldout] == list(range(24))
    with pytest.raises(ValueError, match="split='' has no training problems: heldout names .*, got None, and shots=0"):
        tasks.make("dataset", path=str(folder / "saved"), split="", **GSM8K)


def test_the_held_out_share_depends_on_the_words_alone(folder):
    plain = tasks.make("dataset", path=str(folder / "sums.parquet"), **GSM8K)
    dressed = tasks.make("dataset", path=str(folder / "sums.csv"), system="Be brief.", shots=2, **GSM8K)
    assert [p.prompt[-1] for p in dressed.heldout] == [p.prompt[-1] for p in plain.heldout]
    assert [p.prompt[-1] for p in dressed.train] == [p.prompt[-1] for p in plain.train][2:]


def test_system_message_and_worked_examples_come_first(folder):
    plain = tasks.make("dataset", path=str(folder / "saved"), **GSM8K)
    task = tasks.make("dataset", path=str(folder / "saved"), system="Be brief.", shots=1, **GSM8K)
    assert len(task.train) == 23
    assert task.heldout[0].prompt == (
        {"role": "system", "content": "Be brief."}, *plain.train[0].prompt,
        {"role": "assistant", "content": "It is 500 and 500.\n#### 1,000"}, *plain.heldout[0].prompt)
    raw = tasks.make("dataset", path=str(folder / "saved"), shots=1, chat=False, prompt="Q: {question}\nA: ", extract="gsm8k")
    assert raw.heldout[0].prompt == "Q: 500 + 500?\nA: It is 500 and 500.\n#### 1,000\n\nQ: 524 + 524?\nA: "


def test_keys_of_columns_and_messages(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"q{n}"}], "reward_model": {"ground_truth": str(n)}} for n in range(20)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "verl.parquet")
    task = tasks.make("dataset", path=str(tmp_path / "verl.parquet"), prompt="{prompt}", answer="reward_model.ground_truth")
    plain = tasks.make("dataset", path=str(tmp_path / "verl.parquet"), answer="reward_model.ground_truth")
    for made in (task, plain):
        assert len(made.train) > 9 and all(p.prompt == ({"role": "user", "content": f"q{p.answer}"},) for p in made.train)
    with pytest.raises(ValueError, match="no column 'reward_model.truth'; there are reward_model.ground_truth"):
        tasks.make("dataset", path=str(tmp_path / "verl.parquet"), answer="reward_model.truth")
    with pytest.raises(ValueError, match="no column 'reward_model.truth'; there are reward_model.ground_truth"):
        tasks.make("dataset", path=str(tmp_path / "verl.parquet"), prompt="{prompt}", answer="reward_model.truth")


def called(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": name, "arguments": arguments}}]}


TALK = {"messages": [
    {"role": "user", "content": "What is 1+1?"}, called("add", a=1),
    {"role": "tool", "content": "2", "name": "add"}, {"role": "user", "content": "and twice?"}], "answer": "4"}
OTHER = {"messages": [{"role": "user", "content": "What is 2+2?"}, called("half", x=8)], "answer": "4", "level": "easy",
         "hint": {"a": "b"}}


def test_nulls_that_tables_write_for_absent_keys_are_absent(tmp_path):
    rows = [TALK, OTHER, {"prompt": "5+5=", "answer": "10", "hint": {"c": "d"}}]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    every = dict.fromkeys(("prompt", *OTHER))
    datasets.Dataset.from_list([every | row for row in rows]).to_parquet(tmp_path / "talks.parquet")
    lines, table = (tasks.make("dataset", path=str(tmp_path / f"talks.{form}"), heldout=0.7, chat=False)
                    for form in ("jsonl", "parquet"))
    for side in ("train", "heldout"):
        assert [(p.prompt, p.level, p.extra) for p in getattr(table, side)] == [
            (p.prompt, p.level, p.extra) for p in getattr(lines, side)]
    problems = {p.prompt if isinstance(p.prompt, str) else p.prompt[0]["content"]: p for p in (*table.train, *table.heldout)}
    assert problems["What is 1+1?"].prompt == tuple(TALK["messages"])
    assert [(problems[q].level, problems[q].extra) for q in ("What is 1+1?", "What is 2+2?", "5+5=")] == [
        ("", {}), ("easy", {"hint": {"a": "b"}}), ("", {"hint": {"c": "d"}})]
    template = ("{% for m in messages %}{% if 'tool_calls' in m %}<call {{ m.tool_calls[0].function.arguments }}>{% else %}"
                "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}")
    ids = encode_problem(problems["What is 1+1?"], ByteTokenizer(template))
    assert bytes(ids).decode() == "<user>What is 1+1?<call {'a': 1}><tool>2<user>and twice?"


def test_a_null_is_a_result_of_a_function_and_no_level(tmp_path):
    tests = [{"function": "f", "args": [1], "result": None}]
    rows = [{"prompt": f"p{n}", "answer": None, "tests": tests, "kind": None} for n in range(4)]
    (tmp_path / "programs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for options in ({"tests": "tests"}, {}):
        path = str(tmp_path / "programs.jsonl")
        if not options:
            (tmp_path / "programs.jsonl").write_text("\n".join(json.dumps({**row, "answer": "a"}) for row in rows))
        task = tasks.make("dataset", path=path, heldout=0.5, level="kind", **options)
        assert all(p.extra["tests"] == tests and p.level == "" for p in (*task.train, *task.heldout))


def test_messages_in_the_forms_of_openai():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
             {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "tool_calls": [call]}]
    assert columns.messages(given, "messages") == ({"role": "user", "content": "1+1?"}, called("f", a=1), called("f", a=1))
    for wrong in ({"role": "user", "content": None}, {"role": "user"}, {"role": "user", "content": 1}, {"content": "a"}, "a"):
        with pytest.raises(ValueError, match="'messages' must be a non-empty list of objects"):
            columns.messages([wrong], "messages")
    with pytest.raises(ValueError, match=r"messages\[0\].content=.*image.*; give a text, or parts of type 'text' only"):
        columns.messages([{"role": "user", "content": [{"type": "image"}]}], "messages")


@pytest.mark.parametrize("place", ["codes.csv", "codes.csv.gz", "folder"])
def test_cells_of_csv_files_are_the_texts_of_the_file(folder, tmp_path, place):
    wanted = {"q1": "01", "q2": "NA", "q3": "None", "q4": "0.50", "q5": "1e3", "q6": "true", "q7": 'a "b"'}
    text = "q,a,level\n" + "".join('"{}","{}",\n'.format(q, a.replace('"', '""')) for q, a in wanted.items())
    (tmp_path / "folder").mkdir()
    for file in ("codes.csv", "folder/codes.csv"):
        (tmp_path / file).write_text(text)
    (tmp_path / "codes.csv.gz").write_bytes(gzip.compress(text.encode()))
    task = tasks.make("dataset", path=str(tmp_path / place), prompt="{q}", answer="a", chat=False, heldout=0.5)
    assert {p.prompt: (p.answer, p.level) for side in (task.train, task.heldout) for p in side} == {
        q: (a, "") for q, a in wanted.items()}


@pytest.mark.parametrize(("options", "message"), [
    ({"prompt": "{questoin}"}, r"no column 'questoin'; there are answer, question, source. Did you mean 'question'\?"),
    ({"prompt": "{question}", "answer": "solution"}, "no column 'solution'; there are answer, question, source"),
    ({"prompt": "{question}", "level": "kind"}, "no column 'kind'; there are answer"),
    ({"prompt": "{question}", "answer": "answer.text"}, "no column 'answer.text': 'answer' holds no keys, but '"),
    ({"prompt": "{question}", "answer": "source.nam"}, r"no column 'source.nam'; there are source\..*Did you mean 'source\."),
    ({"prompt": "{source}"}, "row 0: 'source' must be a non-empty string"),
    ({"prompt": "{question}: {source}"}, "column 'source' holds a dict"),
    ({"prompt": "{question}", "extract": "boxed"}, "row 0: extract='boxed' finds no answer in column 'answer'"),
    ({"prompt": "{question}", "extract": "gsm8k "}, "gsm8k, boxed, or a regular expression with one group"),
    ({"prompt": "{question}", "extract": "(a"}, r"extract='\(a' is no regular expression"),
    ({"prompt": "{question}", "split": "dev"}, "saved without a split 'dev'; it has"),
    ({"prompt": "{question}", "heldout": "validation"}, "saved without a split 'validation'"),
    ({"prompt": "{question}", "invalid": "ignore"}, "Allowed: fail, skip"),
    ({"prompt": "{question}", "streaming": True}, "give limit"),
    ({"prompt": "{question}", "chat": False, "system": "x"}, "a system message needs chat=True"),
    ({"prompt": "{question}", "tests": "answer"}, "column 'answer' is no JSON"),
    ({}, r"expected exactly one of 'prompt' and 'messages', got keys .* say by prompt="),
])
def test_wrong_options_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        tasks.make("dataset", path=str(folder / "saved"), **options)


def test_unreadable_data_are_named(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="subset None, split 'dev': Unknown split"):
        tasks.make("dataset", path=str(folder / "hub"), split="dev", **GSM8K)
    for name in ("a.tsv", "a.jsonl.zst", "a"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match="its ending is unknown; files end in one of .parquet, .*.gz, .bz2, .xz behind"):
            tasks.make("dataset", path=str(tmp_path / name), **GSM8K)
    with pytest.raises(FileNotFoundError, match="none.parquet"):
        tasks.make("dataset", path=str(tmp_path / "none.parquet"), **GSM8K)

    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match="cannot read the data set 'openai/gsm8k'.*download it elsewhere and give its folder"):
        tasks.make("dataset", path="openai/gsm8k", subset="main", **GSM8K)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"this task needs the package datasets, .*pip install 'jaxrl_llm\[data\]'"):
        tasks.make("dataset", path="openai/gsm8k")


def test_rows_without_an_answer_and_prompts_on_both_sides_are_skipped_on_demand(tmp_path):
    train = [{"q": "a", "a": "1"}, {"q": "b", "a": ""}, {"q": "c", "a": "3"}, {"q": "d", "a": None}]
    for name, rows in (("train", train), ("test", [{"q": "c", "a": "3"}, {"q": "e", "a": "5"}])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"path": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "test.jsonl"), "prompt": "{q}", "answer": "a"}
    with pytest.raises(ValueError, match=r"train.jsonl, line 2: 'a' must be .*dataset\(invalid=skip\)"):
        tasks.make("dataset", **options)
    with pytest.warns(RuntimeWarning) as warned:
        task = tasks.make("dataset", **options, invalid="skip")
    assert [str(one.message)[:12] for one in warned] == ["2 of 4 rows ", "1 prompts of"]
    assert prompts(task.train) == ["a"] and prompts(task.heldout) == ["c", "e"]


@pytest.mark.parametrize("value", [
    [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "6\n"}],
    {"input": ["1\n", "5\n"], "output": ["2\n", "6\n"]}, '{"inputs": ["1\\n", "5\\n"], "outputs": ["2\\n", "6\\n"]}',
    {"inputs": [["1", ""], ["5", ""]], "outputs": [["2", ""], ["6", ""]]}])
def test_tests_of_programs_in_the_forms_that_data_sets_have(tmp_path, value):
    rows = [{"description": f"Add one. {n}", "tests": value} for n in range(10)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "code.parquet")
    task = tasks.make("dataset", path=str(tmp_path / "code.parquet"), prompt="{description}", tests="tests")
    assert task.reward == "code"
    assert task.train[0].extra["tests"] == [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "6\n"}]


def test_tests_of_functions_read_the_name_beside_them(tmp_path):
    """The form of LiveCodeBench: tests as JSON, the function's name in the JSON of another column."""
    made = {"function": "f", "args": [[1, 2], 3], "result": 6}
    test = {"input": "[1, 2]\n3", "output": "6"}
    rows = [{"q": f"q{n}", "metadata": '{"func_name": "f"}', "tests": json.dumps([{**test, "testtype": "functional"}])}
            for n in range(9)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "lcb.parquet")
    task = tasks.make("dataset", path=str(tmp_path / "lcb.parquet"), prompt="{q}", tests="tests")
    assert all(problem.extra["tests"] == [made] for problem in task.train)
    assert columns.tests({"inputs": ["[1, 2]\n3"], "outputs": ["6"], "fn_name": "f"}, "t") == [made]
    assert columns.tests({"inputs": [[[1, 2], 3]], "outputs": [6]}, "t", {"metadata": {"func_name": "f"}}) == [made]
    assert columns.tests("assert f([1, 2], 3) == 6", "t") == [{**made, "args": "[[1, 2], 3]"}]
    with pytest.raises(ValueError, match="column 't'.*testtype 'x'"):
        columns.tests({"inputs": ["1"], "outputs": ["2"], "testtype": "x"}, "t")


def test_templates_and_answers_inside_of_texts():
    row = {"a": "x", "b": 3, "c.d": "e", "f": {"g": "h"}}
    assert columns.filled(r"{a} {b} {c.d} {f.g} {{a}} \boxed{} {not a name}", row) == r"x 3 e h {a} \boxed{} {not a name}"
    assert columns.names_in("{a}{{b}}{c.d}") == ["a", "c.d"]
    assert columns.extractor("gsm8k")("#### 3 then\n#### 1,234") == "1,234"
    assert columns.extractor("boxed")(r"first \boxed{1}, then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert columns.extractor("answer: (\\d+)")("answer: 1, answer: 22") == "22"
    assert columns.extractor("answer: (\\d+)")("none") is None
    calls = columns.tests('{"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}', "t")
    assert calls == [{"function": "f", "args": [1, 2], "result": 3}]
    wrapped = columns.tests({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[[3]], [4, 5]]}, "t")
    assert wrapped == [{"function": "f", "args": [1], "result": [[3]], "wrapped": True},
                       {"function": "f", "args": [2], "result": [4, 5]}]
    assert columns.tests({"inputs": [3, ["3", 4.5]], "outputs": [9, ""]}, "t") == [
        {"input": "3", "output": "9"}, {"input": "3\n4.5", "output": ""}]
    for bad in ([], {}, {"input": ["1"], "output": []}, [{"input": "1"}], "[1", [1], "[null]",
                [{"input": "1", "output": " \n"}], [{"input": "1", "output": True}], [{"input": "1", "output": ["2", None]}],
                [{"output": "1"}, {"output": {}}], {"fn_name": "f", "inputs": ["[1]"], "outputs": [3]},
                {"inputs": ["1", "2"], "outputs": ["", []]}):
        with pytest.raises(ValueError, match="column 't'"):
            columns.tests(bad, "t")
