"""Some run reads every key of the configuration: reads are recorded over a few real, tiny runs."""
import sys

import chatter
import pytest
import tiny_config
from ml_collections import ConfigDict

from jaxrl_llm.runs import beginning, loop
from jaxrl_llm.runs.progress import Progress
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.keys import flat

# These look at values, and use none of them.
LOOKS = ("setup.check", "setup.resolve", "setup.why", "setup.unmet", "setup.values", "setup.keys", "tools.key_values")


@pytest.fixture
def read(monkeypatch):
    """The dotted names of the keys that are read where they are used."""
    found, sections, inner = set(), {}, ConfigDict.__getitem__

    def used():
        """Whether code of the package reads, other than what checks, resolves, copies and writes values."""
        frame = sys._getframe(2)
        while frame.f_code.co_name == "__getattr__":
            frame = frame.f_back
        name = frame.f_globals["__name__"]
        return name.startswith("jaxrl_llm.") and not name.endswith(LOOKS) and frame.f_code.co_name not in ("check_keys", "keys")

    def getitem(self, key):
        value = inner(self, key)
        prefix = sections.get(id(self), ("", None))[0]
        if isinstance(value, ConfigDict):
            sections[id(value)] = f"{key}.", value  # kept, so that no other object has its id
        elif used():
            found.add(f"{prefix}{key}")
        return value

    def to_dict(self, *arguments, **options):
        if id(self) in sections and used():
            found.update(f"{sections[id(self)][0]}{key}" for key in self._fields)
        return whole(self, *arguments, **options)

    whole = ConfigDict.to_dict
    monkeypatch.setattr(ConfigDict, "__getitem__", getitem)
    monkeypatch.setattr(ConfigDict, "to_dict", to_dict)
    return found


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"steps": 1, "eval.problems": 1, "prompts.per_step": 2, **changes})
    return config


@pytest.mark.slow
def test_some_run_reads_every_key(read, tmp_path):
    loop.train(tiny(method="ppo", steps=2, **{"critic.pretrain_steps": 0, "eval.every": 0}), tmp_path / "run")
    own = str(tmp_path / "run")
    run, params = setup.build(tiny(method="gopd", **{
        "model.path": own, "teacher.path": own, "teacher.base": own, "lora.rank": 2, "sampling.paged_cache": True}))
    setup.initial_state(run, params)
    setup.build(tiny(method="poise", **{"model.experts": 2}))
    setup.build(tiny(method="swarm_sapo", **{"pool.path": str(tmp_path / "pool"), "prompts.per_step": 4}))
    setup.build(tiny(**{"server.url": "http://127.0.0.1:1", "server.weights": str(tmp_path / "weights"), "model.path": own}))
    (tmp_path / "texts.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 4)
    setup.opened(tiny(method="sft", **{"texts.path": str(tmp_path / "texts.jsonl"), "texts.options": "chat=False"}))
    run, params = setup.build(chatter.get_config(**{"warmup.steps": 1, "warmup.batch": 2}))
    with Progress(1) as progress:
        beginning.warm_up(run, params, progress)
    with pytest.raises(ValueError, match="needs config.prior.weights"):
        setup.build(tiny(**{"budget.utility": "paper", "prior.source": "v0"}))
    assert flat(default_config()).keys() - read == set()
