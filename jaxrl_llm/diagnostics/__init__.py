"""Diagnostics of finished runs, by name: `jaxrl_llm diagnose NAME RUN_FOLDER ...`. Each file is one and registers itself."""
from jaxrl_llm.diagnostics.base import DIAGNOSTICS, Diagnostic, diagnostic
from jaxrl_llm.tools import registry

__all__ = ["Diagnostic", "about", "diagnostic", "make", "names"]

registry.discover(__name__, __path__)


def names() -> list[str]:
    """All diagnostics, sorted."""
    return sorted(DIAGNOSTICS)


def make(slug: str, **options) -> Diagnostic:
    """The diagnostic of that name; ValueError for unknown names and options."""
    return DIAGNOSTICS.make(slug, **options)


def about(slug: str) -> str:
    """The first line of a diagnostic's docstring."""
    return (DIAGNOSTICS[slug].make.__doc__ or "").partition("\n")[0]
