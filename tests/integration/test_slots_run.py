"""Runs whose single turns use the slot engine: the tokens of the scan sampler, and a resumed run continues exactly."""
import json
import types

import jax
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.training import loop, parts, setup


def config(**changes):
    c = tiny_config.get_config()
    c.update_from_flattened_dict({"eval.every": 0, "sampling.group": 4, "prompts.per_step": 4, "steps": 3,
                                  "sampling.micro_batches": 4, "checkpoint.every": 1, "samples_every": 1, **changes})
    return c


def written(workdir):
    return [[(row["prompt"], row["tokens"]) for row in map(json.loads, path.read_text().splitlines())]
            for path in sorted((workdir / "samples").glob("*.jsonl"))]


@pytest.mark.slow
def test_slots_and_scan_learn_the_same_and_a_resumed_run_continues_exactly(tmp_path):
    for name in ("scan", "slots"):
        loop.train(config(**{"sampling.engine": name}), tmp_path / name)
    loop.train(config(**{"sampling.engine": "slots", "sampling.paged_cache": True}), tmp_path / "pages")
    assert written(tmp_path / "slots") == written(tmp_path / "scan") == written(tmp_path / "pages")
    assert len(written(tmp_path / "scan")) > 2
    slots, scan = (run_files.saved(tmp_path / name, config()) for name in ("slots", "scan"))
    for name, leaf in scan.items():
        np.testing.assert_allclose(slots[name], leaf, atol=1e-6, err_msg=name)
    for line in run_files.lines(tmp_path / "slots")[1:]:
        assert line["max/mismatch"] < 2e-5
    halted = config(**{"sampling.engine": "slots", "steps": 1})
    loop.train(halted, tmp_path / "resumed")
    loop.train(config(**{"sampling.engine": "slots"}), tmp_path / "resumed", resume=True)
    run_files.assert_same(run_files.saved(tmp_path / "resumed", config()), slots)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ("scan", "slots"))
def test_runs_learn_with_caches_in_eight_bits(tmp_path, sampler):
    loop.train(config(**{"sampling.engine": sampler, "model.int8_cache": True}), tmp_path)
    gaps = [line["max/mismatch"] for line in run_files.lines(tmp_path)[1:]]
    assert len(gaps) == 3 and 2e-5 < max(gaps) < 0.3  # between sampler and learner


def test_one_rule_chooses_the_sampler():
    stops, [cpu], gpu = (1,), jax.devices()[:1], types.SimpleNamespace(platform="gpu")
    for changes, devices, prompt, ends, slots in (
            ({}, [cpu], 6, stops, True), ({"sampling.micro_batches": 2}, [cpu], 6, stops, False),
            ({}, [cpu] * 2, 6, stops, False),
            ({}, [cpu], 6, (), False), ({}, [cpu], 7, stops, False), ({}, [gpu], 6, stops, False),
            ({"server.url": "http://a"}, [cpu], 6, stops, False), ({"sampling.engine": "scan"}, [cpu], 6, stops, False),
            ({"sampling.engine": "slots", "sampling.micro_batches": 1}, [gpu], 9, (), True)):
        assert parts.in_slots(config(**changes), devices, prompt, ends) is slots, changes
    for changes, devices in (({}, [cpu] * 2), ({"server.url": "http://a"}, [cpu])):
        with pytest.raises(ValueError, match="sampling.engine='slots' samples on one device"):
            parts.in_slots(config(**changes, **{"sampling.engine": "slots"}), devices, 6, stops)
    with pytest.raises(ValueError, match="sampling.paged_cache=True is about the slot engine, which does not sample here; set"):
        setup.build(config(**{"sampling.engine": "scan", "sampling.paged_cache": True}))
    with pytest.raises(ValueError, match="config.sampling.engine"):
        setup.build(config(**{"sampling.engine": "slot"}))
