"""A new model in the sizes of a published one."""
import pytest

from jaxrl_llm import parallel
from jaxrl_llm.planning.presets import MODELS
from jaxrl_llm.setup import config, start
from jaxrl_llm.setup.check import check
from jaxrl_llm.setup.resolve import resolve


def test_sizes_of_a_published_model(monkeypatch):
    """Vocabulary included, of which the tokenizer spells the first part; weights are new."""
    small = start.model_config(config.default_config().model, 300)
    monkeypatch.setitem(MODELS, "smollm2_135m", small)
    c = config.default_config()
    c.model.sizes, c.model.hidden_size = "smollm2_135m", 32
    c = resolve(c, {})
    check(c)
    tokenizer, model, params = start.load_model(c.model, parallel.make_mesh())
    assert model.config == small and params["embed"].shape == (300, 128)
    assert tokenizer.vocab_size < 300 and tokenizer.decode([65, 299]) == "A"


def test_unknown_sizes_and_those_of_a_path_are_refused():
    c = resolve(config.default_config(), {})
    c.model.sizes = "smollm2_136m"
    with pytest.raises(ValueError, match="smollm2_135m"):
        check(c)
    c.model.sizes, c.model.path = "smollm2_135m", "models/x"
    with pytest.raises(ValueError, match="has its own sizes"):
        check(c)
