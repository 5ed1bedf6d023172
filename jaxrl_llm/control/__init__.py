"""Control of the training loop: which prompts and rollouts to train on, how to sample, when to reset.

    keep = control.make_filter("dynamic_sampling").keep(rollouts)
    schedule = control.make("acereason_temperature", target=0.3)

Other functions of this folder are parts for your own loop; docs/methods.md lists them.
"""
import functools

from jaxrl_llm.control.base import CONTROLLERS, FILTERS, Controller, Fact, Filter, Known, controller, prompt_filter
from jaxrl_llm.tools import registry

__all__ = ["Controller", "Fact", "Filter", "Known", "controller", "filter_names", "make", "make_filter", "names", "parameters",
           "prompt_filter"]


@functools.cache
def _discover() -> None:
    """Imports the folder's files at first use: estimators and objectives import some of them separately."""
    registry.discover(__name__, __path__)


def names() -> list[str]:
    """All controllers, sorted."""
    _discover()
    return sorted(CONTROLLERS)


def make(slug: str, **hyper) -> Controller:
    """The controller of that name; ValueError for unknown names and keywords."""
    _discover()
    return CONTROLLERS.make(slug, **hyper)


def parameters(slug: str) -> list[str]:
    """The keywords of the controller of that name; ValueError for unknown names."""
    _discover()
    return list(CONTROLLERS.parameters(slug))


def filter_names() -> list[str]:
    """All filters, sorted."""
    _discover()
    return sorted(FILTERS)


def make_filter(slug: str, **hyper) -> Filter:
    """The filter of that name; ValueError for unknown names and keywords."""
    _discover()
    return FILTERS.make(slug, **hyper)
