"""A supervised warm-up that is killed goes on where it was saved, and micro-batches change nothing of it."""
import types

import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.runs import warm_starts, warmup
from jaxrl_llm.setup import setup
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.tasks.loader import batches

PROGRESS = types.SimpleNamespace(phase=lambda *words: None)


def broken(data, after):
    """The batches, of which the one behind `after` others is never made."""
    for number, batch in enumerate(data):
        if number == after:
            raise KeyboardInterrupt
        yield batch


def test_runs_with_other_micro_batches_share_no_warm_start():
    """Sums over other parts of a batch round otherwise."""
    run, params = setup.build(tiny_config.get_config())
    before = warm_starts.key_of(run, params)
    assert before == warm_starts.key_of(run, params)
    run.config.learner.micro_batches = 2
    assert before != warm_starts.key_of(run, params)


@pytest.mark.slow
def test_a_killed_warm_up_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(warmup, "EVERY", 2)
    run, params = setup.build(tiny_config.get_config())

    def warmed(after=99, **options):
        data = batches(run.source.task.train, 8, seed=1)
        return warmup.imitate(
            run.learner.policy, jax.tree.map(np.copy, params), broken(data, after), run.source.stream.tokenizer, steps=6,
            learning_rate=1e-2, prompt_tokens=16, max_tokens=8, overlong="fail", progress=PROGRESS,
            seek=lambda n: data.set_state(data.get_state() | {"next_problem": 8 * n, "draws": n}), **options)

    straight, losses = warmed()
    assert len(losses) == 6 and losses[-1] < losses[0]
    with Checkpoints(tmp_path, keep=1) as kept, pytest.raises(KeyboardInterrupt):
        warmed(after=5, kept=kept)
    with Checkpoints(tmp_path, keep=1) as kept:
        assert kept.steps() == [4]
        again, late = warmed(kept=kept)
    assert late == losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(straight))
    _, parts = warmed(micro_batches=4)
    np.testing.assert_allclose(parts, losses, rtol=1e-4)
