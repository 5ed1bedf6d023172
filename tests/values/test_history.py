"""Histories on disk, episodes that never leak, and the encoder of a real model."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm import tokenizers
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.values import encoder, history

ROOT = Path(__file__).parents[2]
ROWS = [(policy, step, f"{n}+{n}=", float((n + step) % 2)) for policy in ("small", "large") for step in (0, 5)
        for n in range(20)]


def test_rows_of_one_result_become_one():
    result = history.of_rows([("b", 5, "x", 1.0), ("a", 5, "y", 0.0), ("b", 5, "x", 0.5), ("b", 6, "x", 0.0)])
    assert (result.policies, result.prompts) == (["a", "b"], ["x", "y"])
    assert list(zip(result.policy, result.step, result.prompt, result.outcome)) == [(1, 5, 0, 0.75), (0, 5, 1, 0), (1, 6, 0, 0)]
    assert len(set(result.snapshot)) == 3
    with pytest.raises(ValueError, match="outcome 1.5 of policy 'a' at step 0"):
        history.of_rows([("a", 0, "x", 1.5)])
    with pytest.raises(ValueError, match="no rows"):
        history.of_rows([])


def test_round_trip_through_array_records(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    before = history.of_rows(ROWS)
    folder = history.save(before, tmp_path)
    assert list(folder.glob("*array_record*"))
    after = history.load(folder)
    def rows(h):
        return {(h.policies[m], int(t), h.prompts[u], float(y))
                          for m, t, u, y in zip(h.policy, h.step, h.prompt, h.outcome)}
    assert rows(after) == rows(before) == set(ROWS)
    with pytest.raises(FileExistsError, match="choose another directory"):
        history.save(before, tmp_path)
    with pytest.raises(ValueError, match="holds no history"):
        history.load(tmp_path)


def test_without_the_package_histories_are_refused_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    message = r"history needs the package tensorflow-datasets, .*pip install 'jaxrl_llm\[data\]'"
    with pytest.raises(ValueError, match=message):
        history.save(history.of_rows(ROWS), tmp_path)
    with pytest.raises(ValueError, match=message):
        history.load(tmp_path)


@pytest.mark.slow
def test_results_are_not_recorded_without_the_package_that_keeps_them(tmp_path):
    """The script stops before it opens the first run, which does not exist."""
    (tmp_path / "tensorflow_datasets.py").write_text("raise ModuleNotFoundError(name='tensorflow_datasets')")
    script = ROOT / "experiments/record_history.py"
    done = subprocess.run([sys.executable, script, f"--runs={tmp_path}/absent", f"--out={tmp_path}"], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("ValueError: this history needs the package tensorflow-datasets")


@pytest.mark.parametrize("split", [False, True])
def test_episodes_stay_in_one_snapshot_and_queries_out_of_the_context(split):
    data = history.of_rows(ROWS)
    shared = np.arange(20) < 12 if split else None
    truth = {(m, t, u): y for m, t, u, y in zip(data.policy, data.step, data.prompt, data.outcome)}
    drawn = itertools.islice(history.episodes(data, np.random.default_rng(0), context=14, queries=6, shared=shared), 30)
    kinds = set()
    for e in drawn:
        known, asked = e.context[e.mask], e.queries
        assert not set(known) & set(asked) and len(set(known)) == len(known) == (12 if split else 14)
        assert e.context.shape == (14,) and e.queries.shape == e.labels.shape == (6,)
        if split:
            assert shared[known].all() and not shared[asked].any()
        results = list(zip(known, e.outcomes[e.mask])) + list(zip(asked, e.labels))
        matching = [(m, t) for m in (0, 1) for t in (0, 5) if all(truth[m, t, u] == y for u, y in results)]
        assert matching
        kinds.add(matching[0][1])
        assert (e.labels[e.positive[e.real]] == 1).all() and (e.labels[e.negative[e.real]] == 0).all()
    assert kinds == {0, 5}


def test_contexts_of_one_class_are_refused():
    data = history.of_rows([("a", 0, str(n), 1.0) for n in range(9)])
    with pytest.raises(ValueError, match="both right and wrong"):
        next(history.episodes(data, np.random.default_rng(0), context=4, queries=2))


def test_held_out_policies_and_prompts():
    data = history.of_rows(ROWS)
    policies, prompts = history.held_out(data, np.random.default_rng(0), prompts=0.3)
    assert policies.sum() == 1 and prompts.sum() == 6
    part = history.select(data, ~policies[data.policy] & ~prompts[data.prompt])
    assert len(part.outcome) == 1 * 2 * 14


def test_encoder_gives_the_states_of_the_model():
    tokenizer = tokenizers.load("bytes")
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
                         mlp_size=32)
    model = Transformer(config)
    params = jax.jit(model.init)(jax.random.key(0))
    texts = ["1+2=", "11+22=", "3*3="]
    result = encoder.of_model(model, params, tokenizer, batch=2)
    states, mask = result.encode(texts)
    ids = [tokenizer.encode(text, add_bos=tokenizer.adds_bos) for text in texts]
    assert result.size == 16 and states.shape == (3, 8, 16) and mask.sum(1).tolist() == [len(row) for row in ids]
    forward = jax.jit(lambda tokens: model.hidden_states(params, tokens, tokens >= 0)[0][0])
    for place in (0, 2):  # the last one is alone in the second batch of two
        np.testing.assert_allclose(states[place][mask[place]], forward(np.array([ids[place]])), atol=1e-5)
    summary = encoder.summary(states, mask)
    np.testing.assert_allclose(summary[1], np.concatenate([states[1][mask[1]].mean(0), states[1][mask[1]][-1]]), atol=1e-5)
    short, real = encoder.of_model(model, params, tokenizer, max_tokens=2).encode(texts[:1])
    np.testing.assert_allclose(short[0][real[0]], forward(np.array([ids[0][-2:]])), atol=1e-5)
