"""The table at the end of a run."""
from types import SimpleNamespace

import pytest

from jaxrl_llm.evaluation.rates import Rate
from jaxrl_llm.runs.report import print_table
from jaxrl_llm.sampling.heldout import Evaluation


@pytest.mark.parametrize("problems, shown", [(1, "12.5% "), (2, "12.5% (10.0% to 20.0%) ")])
def test_a_single_problem_has_no_interval(capsys, problems, shown):
    rate, forest = Rate(0.125, 0.1, 0.2), SimpleNamespace(problems=[None] * problems, ends=[0] * 4 * problems)
    part = Evaluation(rate, None, rate, 1.0, 3.0, 0.0, forest)
    print_table({"after training": Evaluation(rate, None, rate, 1.0, 3.0, 0.0, forest, {"sums": part})})
    rows = [line.replace("│", "").split("  ", 1) for line in capsys.readouterr().out.splitlines() if "score" in line]
    assert len(rows) == 2 and all(value.strip() + " " == shown for _, value in rows)
