"""The knobs that the parts of a run read, as each part declares them."""
import importlib
import pkgutil

from ml_collections import ConfigDict

from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.learning import learner
from jaxrl_llm.sampling import asked, stages, stream
from jaxrl_llm.tools import written


def readers(config: ConfigDict | None = None) -> dict[str, tuple[Knob, ...]]:
    """The knobs by the words for the part that reads them; those of `config.stages` included."""
    chain = {f"the stage {one.name!r}": importlib.import_module(f"{stages.__name__}.{one.name}")
             for one in pkgutil.iter_modules(stages.__path__)}
    parts = {"sampling": stream, "the learner": learner, "a measure between steps": asked, **chain}
    found = {part: module.READS for part, module in parts.items() if hasattr(module, "READS")}
    named = written.calls(config.stages) if config is not None else ()
    return found | {f"the stage {name!r}": stages.STAGES.make(name, **numbers).reads for name, numbers in named}
