"""Twelve kinds of runs give the same bits as before over three steps, on kinds of machines whose digests `net.json` holds.

A change that moves code and no number passes as it is. A change that is meant to alter numbers writes the digests again, and
its commit says which ones and why: `JAXRL_LLM_NET=write python -m pytest tests/integration/test_net.py`. On a new kind of
machine the same command at the commit before a change makes the digests to compare with.
"""
import hashlib
import itertools
import json
import os
from pathlib import Path

import chatter
import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.learning import schedules
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup

FILE = Path(__file__).with_name("net.json")
TOOLS = {"environment": "tool_use(tools=('calculator',), options={'level': 'digit', 'chat': True}, turns=3)",
         "prompts.max_tokens": 0, "sampling.max_tokens": 96, "sampling.turn_tokens": 12}


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"steps": 3} | changes)
    return config


KINDS = {
    "single turns": tiny(),
    "tools": chatter.get_config(**TOOLS),
    "game": chatter.get_config(environment="chatter:alphabet"),
    "poise": tiny(method="poise", **{"learner.minibatches": 2}),
    "v0_5": tiny(method="v0_5", **{"sampling.max_group": 8}),
    "replay": tiny(method="sil"),
    "teacher": tiny(method="gopd"),
    "controllers": chatter.get_config(method="scaling_inter_rl"),
    "packed": tiny(method="dapo", **{"learner.packed_rows": 4}),
    "lora": tiny(**{"lora.rank": 4}),
    "mixture": tiny(**{"model.experts": 4, "objective": "+ balance(0.01)"}),
    "slots": tiny(**{"sampling.engine": "slots", "sampling.micro_batches": 2}),
}


def machine() -> str:
    """What bits depend on: the processor's instructions and cores, the version of jax, the compiler's flags."""
    info = Path("/proc/cpuinfo")
    flags = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "") if info.exists() else ""
    found = (flags, os.cpu_count(), jax.__version__, os.environ.get("XLA_FLAGS"))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def digest(tree) -> str:
    """One hash of all leaves with their names, types and shapes."""
    total = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        leaf = np.asarray(leaf)
        total.update(repr((jax.tree_util.keystr(path), str(leaf.dtype), leaf.shape)).encode() + leaf.tobytes())
    return total.hexdigest()[:16]


def without_stamps(rollouts):
    """The rollouts without what says how old they are, which the source or the learner may add."""
    return rollouts.replace(extras={name: x for name, x in rollouts.extras.items() if name not in ("age", "current_version")})


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The folder of a short run, whose weights teach."""
    folder = tmp_path_factory.mktemp("taught")
    loop.train(tiny(steps=1, seed=5, samples_every=0), folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_before(kind, request):
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    write = os.environ.get("JAXRL_LLM_NET") == "write"
    if not write and kind not in stored.get(machine(), {}):
        pytest.skip(f"{FILE.name} has no digests of this kind of machine; this file's first lines say how they are written")
    config = KINDS[kind].copy_and_resolve_references()
    if kind == "teacher":
        config.teacher.path = request.getfixturevalue("taught")
    run, params = setup.build(config)
    state, frozen, found = setup.initial_state(run, params), run.learner.frozen(params), {}
    for number, step in enumerate(itertools.islice(schedules.make("sync").steps(run.source, run.learner, state, frozen), 3)):
        found[f"rollouts {number}"], learned = digest(without_stamps(step.finished.rollouts)), step.learned.state
    found["weights"] = digest((learned.params, learned.lora))
    if write:
        stored.setdefault(machine(), {})[kind] = found
        FILE.write_text(json.dumps(stored, indent=1) + "\n")
    assert found == stored[machine()][kind]
