"""reasoning_gym data sets as tasks, with their own scorer."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm import rewards, tasks
from jaxrl_llm.rewards.pool import WorkerPool

reasoning_gym = pytest.importorskip("reasoning_gym")
EVALUATED = {  # files of the package that evaluate an answer
    "algebra/simple_integration.py", "algebra/intermediate_integration.py", "algebra/polynomial_multiplication.py",
    "games/puzzle24.py", "games/countdown.py", "algorithmic/string_insertion.py", "algorithmic/spiral_matrix.py",
    "algorithmic/binary_matrix.py", "games/n_queens.py"}
OWN_TEXT = {  # files that evaluate what they have made themselves, or have a parser of this name that evaluates nothing
    "code/codeio.py", "algorithmic/number_sorting.py", "arithmetic/gsm_symbolic/generators_00_49.py",
    "arithmetic/gsm_symbolic/generators_50_99.py", "arithmetic/bitwise_arithmetic.py", "arithmetic/basic_arithmetic.py",
    "logic/propositional_logic.py"}


@pytest.fixture(scope="module")
def scorer():
    """One process, so that what an answer does to it reaches the next one."""
    reward = rewards.make("reasoning_gym", workers=1, deadline=60.0)
    yield rewards.combine([reward])
    reward.fn.close()


def test_sides_are_disjoint_and_reproducible():
    options = {"dataset": "chain_sum", "train_size": 60, "heldout_size": 20, "seed": 7}
    task, again = (tasks.make("reasoning_gym", **options) for _ in "ab")
    train, heldout = ({tasks.text_of(p) for p in side} for side in (task.train, task.heldout))
    assert len(task.train) == 60 and not train & heldout
    assert [p.prompt for p in task.train] == [p.prompt for p in again.train]
    assert [p.id for p in task.heldout] == list(range(60, 60 + len(task.heldout)))


def test_heldout_drops_what_training_has():
    # One-digit sums of two: 81 questions, so 200 + 100 draws must collide.
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = tasks.make("reasoning_gym", dataset="chain_sum", train_size=60, heldout_size=100, config=config)
    train, heldout = ({tasks.text_of(p) for p in side} for side in (task.train, task.heldout))
    assert 0 < len(task.heldout) < 100 and not train & heldout


@pytest.mark.slow
def test_own_scorer():
    task = tasks.make("reasoning_gym", dataset="countdown", train_size=4, heldout_size=2)
    problem = task.train[0]
    score = rewards.combine([task.reward])
    right = problem.extra["entry"]["metadata"]["expression"]
    completions = [f"I think 1+1. <answer>1+1</answer> no: <answer> {right} </answer>", right, "<answer>1+1</answer>"]
    total = score(completions, [problem.answer] * 3, [problem] * 3).total
    assert total[0] == total[1] == 1.0 and total[2] < 0.1


@pytest.mark.slow
def test_options_of_a_data_set_may_be_lists(scorer):
    task = tasks.make("reasoning_gym", dataset="basic_arithmetic", train_size=3, heldout_size=2, config={"operators": ["+"]})
    result = scorer([f"<answer>{p.answer}</answer>" for p in task.train], [p.answer for p in task.train], list(task.train))
    assert result.total.tolist() == [1, 1, 1] and not result.failures


@pytest.mark.slow
def test_text_that_a_scorer_evaluates_cannot_act(tmp_path):
    # sympy's parser evaluates the answer: in an unrestricted process, without a guard, each of these leaves the marker.
    task, marker = tasks.make("reasoning_gym", dataset="countdown", train_size=1, heldout_size=1), tmp_path / "marker"
    problem = task.train[0]
    attacks = [f"__import__('pathlib').Path({str(marker)!r}).write_text('x')",
               f"__import__('os').system('touch {marker}')",
               f"__import__('subprocess').run(['touch', {str(marker)!r}])"]
    for attack in attacks:
        eval(attack)
        assert marker.exists()
        marker.unlink()
    scores = rewards.combine(["reasoning_gym"])(attacks, [problem.answer] * 3, [problem] * 3)
    assert scores.total.max() < 0.1 and not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(EVALUATED))
def test_an_answer_that_is_a_program_changes_no_score(scorer, file):
    # The program replaces the scorer by one that accepts everything.
    program = ("exec(\"import sys\\nm = sys.modules['jaxrl_llm.rewards.gym_scorer']\\n"
               "G = type('G', (), {'score_answer': lambda *a: 1.0})\\nm._generator = lambda *a, G=G: G()\")")
    task = tasks.make("reasoning_gym", dataset=Path(file).stem, train_size=20, heldout_size=3)
    problems = list(task.train)

    def scores(given):
        return scorer([f"<answer>{one}</answer>" for one in given], [p.answer for p in problems], problems).total.tolist()

    wrong = scores(["no idea"] * 20)
    assert max(wrong) < 0.1
    assert scores([program] * 10 + ["no idea"] * 10) == wrong and scores(["no idea"] * 20) == wrong
    # Some integrals of the package have no closed form, and are their own answer there.
    assert scores([p.answer for p in problems]) == [float("Integral" not in p.answer) for p in problems]


def test_a_question_is_not_its_own_answer(scorer):
    for dataset in ("simple_integration", "intermediate_integration"):
        problems = list(tasks.make("reasoning_gym", dataset=dataset, train_size=4, heldout_size=1).train)
        facts = [p.extra["entry"]["metadata"] for p in problems]
        given = [f"<answer>Integral({one['integrand']}, {one['variable']})</answer>" for one in facts]
        assert max(scorer(given, [p.answer for p in problems], problems).total) < 0.1


@pytest.mark.slow
def test_formulas_have_no_names_that_could_act():
    pool = WorkerPool("jaxrl_llm.rewards.gym_scorer:parse_formula", workers=1, deadline=60.0)
    read = {"10*(8 - 5) - 6": 24, "sqrt(4) + 1e1 - .5E+1": 7, "Abs(-3)*sin(0) + 2**3": 8}
    refused = ["chr(1)", "(1).real", "2exec(1)", "0or exec(1)", "1_0", "[1]", "'1'", '"1"', "{1}", "1:2", "1;2", "a\\b",
               "(lambda: 1)()", "\uff45\uff58\uff45\uff43(1)"]  # the last in letters that Python reads as those of exec
    outcomes = pool.map([(text,) for text in (*read, *refused)])
    pool.close()
    assert [outcome.value for outcome in outcomes[:3]] == list(read.values())
    for text, outcome in zip(refused, outcomes[3:]):
        assert outcome.status == "error" and "is not a formula: give numbers" in outcome.message, text


def test_files_that_evaluate_are_known():
    """A version of the package that evaluates in another file fails here: `gym_scorer` has no guard there yet."""
    folder = Path(reasoning_gym.__file__).parent
    evaluates = re.compile(r"\beval\(|\bexec\(|parse_expr|sympify")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if evaluates.search(path.read_text("utf-8"))}
    assert files == EVALUATED | OWN_TEXT


def test_errors():
    with pytest.raises(ValueError, match="data set 'leg_countin'. Near: leg_counting, .* lists all") as caught:
        tasks.make("reasoning_gym", dataset="leg_countin")
    assert str(caught.value).split("Near: ")[1].split(". ")[0].count(",") < 5  # at most five
    everything = re.search("`python -c '(.*)'`", str(caught.value))[1]
    assert subprocess.run([sys.executable, "-c", everything], capture_output=True, text=True).stdout.split() == sorted(
        reasoning_gym.factory.DATASETS)
    with pytest.raises(ValueError, match="refused the configuration {'min_animal': 1}.*min_animal"):
        tasks.make("reasoning_gym", dataset="leg_counting", config={"min_animal": 1})
    with pytest.raises(ValueError, match="refused the configuration {'operators': {'[+]'}}: .* not JSON"):
        tasks.make("reasoning_gym", dataset="basic_arithmetic", config={"operators": {"+"}})
    with pytest.raises(rewards.RewardError, match="needs problems of the reasoning_gym task"):
        rewards.combine(["reasoning_gym"])(["5"], ["5"])


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"this task needs the package reasoning-gym, .*pip install 'jaxrl_llm\[tasks\]'"):
        tasks.make("reasoning_gym", dataset="chain_sum")
