"""The rows of experiments/agent_rows.py: every method of agents is among them, and each configuration makes a run."""
import pytest

from jaxrl_llm import methods, sandbox
from jaxrl_llm.experiments import agent_rows
from jaxrl_llm.sampling.dialogue import Dialogue
from jaxrl_llm.setup import setup

ANYWHERE = {"aepo_advantage", "aepo_clip", "b_coder", "spear"}  # methods of agents that also run on a task
TEXTS = {"rlpt"}  # methods of text files, see test_text_runs.py
TEACHER = "the recorder `teacher` with config.teacher.path"


def test_every_method_of_agents_has_a_row():
    named = [row.method for row in agent_rows.ROWS]
    agents = {slug for slug in methods.runnable_elsewhere() if any(lack.who != TEACHER for lack in methods.lacks(slug))}
    assert len(named) == len({*named}) and {*named} == agents - TEXTS | ANYWHERE
    assert ANYWHERE <= {*methods.runnable()} and {row.world for row in agent_rows.ROWS} == agent_rows.WORLDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("row", agent_rows.ROWS, ids=lambda row: row.method)
def test_its_configuration_makes_a_run(row):
    if row.world == "chain of skills" and sandbox.best().missing:
        pytest.skip("no sandbox with all barriers on this machine")
    run, _ = setup.build(agent_rows.config_of_row(row, seed=1, steps=20))
    assert run.method.slug == row.method and run.config.steps == 20 and run.config.seed == 1
    assert isinstance(run.source.stream.partner, Dialogue) == bool(run.config.environment)
    if run.config.environment:
        run.source.stream.partner.runner.close()
