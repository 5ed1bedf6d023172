"""Fails a run that recompiles unexpectedly: a step that recompiles costs more than any tuning of it saves."""
import threading
from collections.abc import Callable

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_counts = threading.local()


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == _COMPILED:
        _counts.number = getattr(_counts, "number", 0) + 1
        _counts.seconds = getattr(_counts, "seconds", 0.0) + duration_secs


_listening: list[bool] = []


class RecompilationError(RuntimeError):
    """A function compiled again after its shapes were settled."""


class Guarded:
    """Wraps a jitted function; each of at most `shapes` argument signatures may compile once, and nothing after that.

    Attributes:
      compile_seconds: seconds spent in the compiler so far.
    """

    def __init__(self, name: str, function: Callable, shapes: int = 1):
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_listen)
            _listening.append(True)
        self.name, self.function, self.shapes = name, function, shapes
        self.compile_seconds = 0.0
        self._seen: dict[tuple, dict[str, str]] = {}

    def __call__(self, *args, **kwargs):
        leaves = {jax.tree_util.keystr(path): _describe(leaf)
                  for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs))}
        signature = jax.tree.structure((args, kwargs)), *leaves.items()  # the structure includes static arguments
        known = signature in self._seen
        if not known and len(self._seen) >= self.shapes:
            raise RecompilationError(f"{self.name} was called with a new shape after warm-up ({self.shapes} allowed): "
                                     + self._difference(leaves))
        before, seconds = getattr(_counts, "number", 0), getattr(_counts, "seconds", 0.0)
        out = self.function(*args, **kwargs)
        if known and getattr(_counts, "number", 0) > before:
            raise RecompilationError(f"{self.name} compiled again for shapes it had compiled for; a sharding, a weak type "
                                     "or a static argument changed. Run with JAX_EXPLAIN_CACHE_MISSES=1 to see which")
        self.compile_seconds += getattr(_counts, "seconds", 0.0) - seconds
        self._seen[signature] = leaves
        return out

    def _difference(self, leaves: dict[str, str]) -> str:
        last = list(self._seen.values())[-1]
        changed = [f"{path}: {last.get(path, 'absent')} -> {leaves.get(path, 'absent')}"
                   for path in {**last, **leaves} if last.get(path) != leaves.get(path)]
        return "; ".join(changed[:8]) or "what is static in it changed"


def _describe(leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)
