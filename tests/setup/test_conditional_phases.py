"""Phases that a run has only where a key has a value, and the parts of phases with a method of their own."""
import pytest

from jaxrl_llm import methods
from jaxrl_llm.setup import phases
from jaxrl_llm.setup.config import default_config


def made(**changes):
    config = default_config()
    config.update_from_flattened_dict({"steps": 100, **changes})
    return [(one.name, one.config.method, one.config.steps) for one in phases.phases_of(config)]


@pytest.mark.parametrize("method, without, with_file", [
    ("t1", [("", "t1", 100)], [("imitate", "sft", 10), ("explore", "t1", 90)]),
    ("t1_oversampling", [("", "t1_oversampling", 100)], [("imitate", "sft", 10), ("explore", "t1_oversampling", 90)]),
    ("sage_skills", [("", "sage_skills", 100)], [("imitate", "sft", 10), ("practise", "sage_skills", 90)]),
    ("qwenlong_l1", [("short", "qwenlong_l1", 50), ("long", "qwenlong_l1", 50)],
     [("imitate", "sft", 10), ("short", "qwenlong_l1", 45), ("long", "qwenlong_l1", 45)])])
def test_rows_begin_with_supervised_learning_where_there_are_texts(method, without, with_file):
    assert made(method=method) == without and made(method=method, **{"texts.path": "texts.jsonl"}) == with_file


def test_a_phase_is_left_out_where_its_key_is_empty():
    text = "a(steps=30, where='texts.path'), b(sampling.group=2), c(where=wandb)"
    assert made(phases=text) == [("b", "grpo", 100)]
    assert made(phases=text, wandb="mine") == [("b", "grpo", 50), ("c", "grpo", 50)]
    config = default_config()
    config.phases = text
    assert phases.recorded(config).phases == "b(sampling.group=2)"
    assert phases.rows(phases.phases_of(config))[0][1].endswith("sampling.group=2")
    with pytest.raises(ValueError, match="where names the key 'texts.paths'.*texts.path"):
        made(phases="a(where=texts.paths), b")


def test_parts_change_the_method_of_the_whole_run_alone():
    config = default_config()
    config.update_from_flattened_dict({"objective": "+ kl(0.01)", "filters": "dynamic_sampling", "steps": 3,
                                       "phases": "imitate(method=sft), mine(method=dapo, objective='+ kl(0.5)'), last"})
    one, two, three = phases.phases_of(config)
    assert (one.config.objective, one.config.filters) == ("", "") and two.config.filters == ""
    assert two.config.objective == "+ kl(0.5)" and three.config.objective == "+ kl(0.01)"
    assert methods.get(one.config.method).source == "given"
