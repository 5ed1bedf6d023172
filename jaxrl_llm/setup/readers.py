"""The knobs that the parts of a run read, and the facts that they tell controllers, as each part declares them."""
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from ml_collections import ConfigDict

from jaxrl_llm.control import Fact
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.learning import controls, learner
from jaxrl_llm.replay import priorities
from jaxrl_llm.sampling import asked, stages, stream
from jaxrl_llm.sampling.stages import Stage
from jaxrl_llm.setup.parts import Parts, needed_stages
from jaxrl_llm.tools import written


def readers(config: ConfigDict | None = None, made: Parts | None = None) -> dict[str, tuple[Knob, ...]]:
    """The knobs by the words for the part that reads them; those of `config.stages`, and of stages for the `made`, included."""
    parts = {"sampling": stream, "the learner": learner, "a measure between steps": asked, **_chain()}
    found = {part: module.READS for part, module in parts.items() if hasattr(module, "READS")}
    return found | {f"the stage {name!r}": stage.reads for name, stage in _named(config, made)}


def facts(config: ConfigDict | None = None, made: Parts | None = None) -> dict[str, tuple[Fact, ...]]:
    """The facts by the words for the part that tells them; those of `config.stages`, and of stages for the `made`, included."""
    parts = {"the learner": controls, "updates on replayed groups": priorities, "a measure between steps": asked, **_chain()}
    found = {part: module.FACTS for part, module in parts.items() if hasattr(module, "FACTS")}
    return found | {f"the stage {name!r}": tuple(Fact(fact, "") for fact in stage.provides)
                    for name, stage in _named(config, made)}


def _chain() -> dict[str, ModuleType]:
    """The modules of the stages of the package."""
    return {f"the stage {one.name!r}": importlib.import_module(f"{stages.__name__}.{one.name}")
            for one in pkgutil.iter_modules(stages.__path__)}


def _named(config: ConfigDict | None, made: Parts | None) -> Iterator[tuple[str, Stage]]:
    """The stages that a configuration names, and those of your own that a run makes for its parts."""
    for name, numbers in written.calls(config.stages) if config is not None else ():
        yield name, stages.STAGES.make(name, **numbers)
    for name in needed_stages(config, made) if config is not None and made is not None else ():
        yield name, stages.STAGES.make(name)
