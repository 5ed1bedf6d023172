"""What rewards read of a problem is checked for all rows when a run starts, and the first that lacks it is named."""
import json

import pytest

from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.judge import make_judge
from jaxrl_llm.setup.problems import make_sets, make_task

TEST = {"input": "1", "output": "2"}
GOOD = {"answer": "5", "tests": [TEST], "box": [1, 2, 3, 4], "image": [9, 9], "answers": ["b"], "files": {"a": "x"},
        "new_files": {"a": "y"}, "gym": ["chain_sum"]}


def rows(tmp_path, fields):
    """A file of twelve rows that all rewards can read, the eighth of which has other fields."""
    lines = [json.dumps({"prompt": f"q{n}", **(fields if n == 7 else GOOD)}) for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


def configured(**changes):
    config = default_config()
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(("named", "fields", "message"), [
    ("last_number", {"answer": "about 38"}, "last_number needs a number as reference answer, got 'about 38'"),
    ("numeric", {"answer": "x"}, "numeric needs a number"),
    ("exact, numeric(weight=0.1)", {"answer": "x"}, "numeric needs a number"),
    ("code", {"answer": "1", "tests": [{"input": 3, "output": "2"}]}, "needs problem.extra.'tests'.: tests are a list"),
    ("code", {"answer": "1", "tests": [{**TEST, "testtype": "functional"}]}, "lacks its name"),
    ("code", {"answer": "1"}, "needs problem.extra.'tests'."),
    ("box", {"answer": "1", "box": [1, 2, 3], "image": [9, 9]}, "four numbers x1, y1, x2, y2 .* got .1, 2, 3. and .9, 9."),
    ("box", {"answer": "1", "box": [1, 2, 3, 4]}, "a width and a height, got .1, 2, 3, 4. and None"),
    ("box", {"answer": "1", "box": [3, 2, 1, 4], "image": [9, 9]}, "x1 < x2"),
    ("token_f1", {"answer": "a", "answers": "b"}, "reads problem.extra.'answers'., a list of texts, got 'b'"),
    ("swe_rl", {"answer": "a", "files": {"a": "x"}}, "needs problem.extra.'files'. and"),
    ("reasoning_gym", {"answer": "a"}, "needs problems of the reasoning_gym task"),
])
def test_of_the_task(tmp_path, named, fields, message):
    config = configured(task=f"jsonl(path={rows(tmp_path, fields)})", rewards=named)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 8: .*{message}.*Correct it, or remove it from the data"):
        make_judge(config)
    config.reward_errors = "zero"  # such completions score 0 and are counted
    make_judge(config)
    make_judge(configured(task=f"jsonl(path={rows(tmp_path, GOOD)})", rewards=named))


def test_of_several_tasks_evaluation_sets_and_environments(tmp_path):
    path, wrong = rows(tmp_path, {"answer": "about 38"}), r"rows\.jsonl, line 8: last_number needs a number"
    with pytest.raises(ValueError, match=wrong):
        make_judge(configured(task=f"arithmetic(level=digit), jsonl(path={path}, reward=last_number)"))
    sets = configured(**{"eval.sets": f"dataset(path={path}, heldout={path}, split='', reward=last_number)"})
    with pytest.raises(ValueError, match=wrong):
        make_sets(sets, make_task("arithmetic(level=digit)"))
    for name in ("single", "sequence", "solver_verifier", "tool_use", "memory_use"):
        options = f"task=jsonl, options={{'path': '{path}'}}, reward=last_number"
        with pytest.raises(ValueError, match=wrong):
            make_judge(configured(environment=f"{name}({options})"))
