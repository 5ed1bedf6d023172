"""The table of programs: the reward `code` errs nowhere, LiveCodeBench's rules where they are stricter or looser."""
import pytest

from jaxrl_llm.audits import program_cases
from jaxrl_llm.audits.cases import wrong


@pytest.mark.slow
def test_the_reward_judges_every_case_as_by_hand():
    cases = program_cases.PROGRAM_CASES
    assert len(cases) == 54 and sum(case.right for case in cases) == 32
    assert wrong(cases, program_cases.by_code(cases)) == ([], [])


def test_the_rules_of_live_code_bench():
    same = program_cases.same_lines
    assert same("YES\n0.50", "YES\n0.5") and same(" 1 2\n3\n", "1 2\n3") and same("1.0", "1")
    assert not same("YES 0.50", "YES 0.5") and not same("1e-12", "0.0") and not same("1\n2", "1 2") and not same("a  b", "a b")
    between = program_cases.between_fences
    assert between("a\n```python\nx\n```\nb") == "x" and between("```\nx") == "" and between('```\ns = "```"\n```') == ""
