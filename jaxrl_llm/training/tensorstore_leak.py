"""Saves without tensorstore's memory leak.

Every string of a JSON value that tensorstore returns to Python is kept forever (seen in 0.1.78 to 0.1.86: `Spec.to_json`,
`experimental_collect_matching_metrics`). Orbax requests such values in each save: once for every tensor, for the specification
that it has just given, and twice for counters of bytes, which it prints at a disabled log level. A save of 50 tensors thus
leaked about 40 kB. Here orbax gets its own specification back, and no counters.
"""
import functools
from types import ModuleType, SimpleNamespace

import tensorstore


@functools.cache
def stop() -> None:
    """Stops orbax from requesting either in this process; its files stay the same."""
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError:  # another release, which may not request them
        return
    seen_by_orbax = ModuleType("tensorstore")
    seen_by_orbax.__dict__.update(vars(tensorstore))
    seen_by_orbax.__dict__["KvStore"] = SimpleNamespace(Spec=_spec, open=tensorstore.KvStore.open)
    tensorstore_utils.ts = seen_by_orbax
    tensorstore_utils.get_tensorstore_raw_bytes = lambda *arguments, **options: 0


def _spec(given):
    """`tensorstore.KvStore.Spec(given)`; for a folder its JSON form is exactly the given one."""
    if isinstance(given, dict) and given.keys() == {"driver", "path"} and given["driver"] == "file":
        return SimpleNamespace(to_json=lambda: given)
    return tensorstore.KvStore.Spec(given)
