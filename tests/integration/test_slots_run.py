"""Runs whose single turns use the slot engine: the tokens of the scan sampler, and a resumed run continues exactly."""
import json
import types

import jax
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.engines import base, kinds
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup


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
    stops, [cpu], gpu = (1,), jax.devices()[:1], types.SimpleNamespace(platform="gpu", process_index=0)
    server = types.SimpleNamespace(check=print, url="http://a:1")
    model = Transformer(ModelConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
                                    mlp_size=8))

    def chosen(name, devices, prompt=6, ends=stops, parts=4, server=None):
        mesh = types.SimpleNamespace(devices=np.array(devices), size=len(devices), shape={"tensor": 1})
        wanted = {"mesh": f"a mesh of {len(devices)} devices"} if len(devices) > 1 else {}
        return kinds.choose(name, base.Wanted(model, mesh, None, 4, 4, parts, prompt, 6, ends, (), server=server), wanted).name

    for devices, changes, name in (
            ([cpu], {}, "slots"), ([cpu], {"parts": 2}, "scan"), ([cpu] * 2, {}, "scan"), ([cpu], {"ends": ()}, "scan"),
            ([cpu], {"prompt": 7}, "scan"), ([gpu], {}, "scan"), ([cpu], {"server": server}, "server")):
        assert chosen("auto", devices, **changes) == name, changes
    assert chosen("scan", [cpu]) == "scan" and chosen("slots", [gpu], 9, (), 1) == "slots"
    assert chosen("slots", [cpu] * 2) == "slots"
    with pytest.raises(ValueError, match="sampling.engine='slots' samples in this process, and server.url names a server"):
        chosen("slots", [cpu], server=server)
    with pytest.raises(ValueError, match="sampling.paged_cache=True needs an engine that keeps caches in pages"):
        setup.build(config(**{"sampling.engine": "scan", "sampling.paged_cache": True}))
    with pytest.raises(ValueError, match="config.sampling.engine"):
        setup.build(config(**{"sampling.engine": "slot"}))
