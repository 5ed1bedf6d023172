"""Rows run by name under all settings at once: packed rows, LoRA, a mesh, an environment, and batches of older weights."""
import json
import subprocess
import sys

import composition_cases
import job
import pytest
from composition_cases import LAG, ROWS, config_of

from jaxrl_llm import methods
from jaxrl_llm.setup import setup

EVERYWHERE = ("environment", "packed", "lora", "fsdp")
# Rows whose loss has no ratio that corrects for older weights.
ON_POLICY = {slug for slug in ROWS if methods.get(slug).part("objective").name == "reinforce"}


# Rows with other numbers of the same parts, which are built and make no step.
RELATED = ("dppo_anchored", "gapo_token", "klpo_sequence", "pass_at_k_bootstrap", "pass_at_k_combined", "pass_at_k_full")


def settings_of(slug: str) -> tuple[str, ...]:
    """All settings that a row has together."""
    return EVERYWHERE if slug in ON_POLICY else (*EVERYWHERE, "lag")


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """What is wrong with each row that makes a step on two devices; None: nothing. One process shares the compiled sampler."""
    questions = tmp_path_factory.mktemp("rows") / "questions"
    questions.write_text("\n".join(json.dumps((False, (slug, *settings_of(slug)))) for slug in ROWS))
    done = subprocess.run([sys.executable, composition_cases.__file__, questions], cwd=job.ROOT, env=job.with_devices(2),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("answer ")]
    return dict(zip(ROWS, answers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("slug", ROWS)
def test_a_row_learns_from_a_batch_under_all_settings(answered, slug):
    assert answered[slug] is None, answered[slug]


@pytest.mark.slow
def test_a_row_without_a_correction_is_refused_with_lag():
    assert ON_POLICY
    for slug in ON_POLICY:
        config = config_of(slug)
        config.update_from_flattened_dict(LAG)
        with pytest.raises(ValueError, match="no ratio that corrects for it; methods with a correction are .*dppo"):
            setup.build(config)


def test_the_quickstart_refuses_no_row():
    """Its task has the fields that each row reads, and its groups fit."""
    for slug in (*ROWS, *RELATED):
        own = {key: value for key, value in ROWS.get(slug, {}).items() if not key.startswith("sampling.")}
        assert setup.against(slug, {"task": "arithmetic(level=digit)", "sampling.group": 8, **own}) == [], slug
