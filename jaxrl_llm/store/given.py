"""Weights that recorders read from elsewhere at each start, and no checkpoint holds: whether a resumed run has the same."""
from collections.abc import Iterable, Mapping

from jaxrl_llm.recorders import Recorder
from jaxrl_llm.store.checkpoints import checksums

Sums = Mapping[str, Mapping[str, int]]


def sums_of(recorders: Iterable[Recorder]) -> Sums:
    """Checksums of the tensors of each recorder's `given` weights, by its name."""
    return {one.name: checksums(one.given) for one in recorders if one.given is not None}


def check_same(sums: Sums, saved: Sums) -> None:
    """Raises ValueError if weights differ from those whose checksums were `saved`; recorders that are new have none."""
    for name, own in sums.items():
        before = saved.get(name, own)
        differing = [tensor for tensor in sorted({*own, *before}) if own.get(tensor) != before.get(tensor)]
        if differing:
            raise ValueError(f"the weights of the recorder {name!r} are not those that this run learned from ({len(differing)} "
                             f"of {len(own)} tensors differ, {differing[0]} first): config.teacher leads to another model, or "
                             "to a run that went on; name the earlier weights, or start a new run")
