"""Endless shuffled batches of problems, sharded over processes, with a position that can be saved and restored."""

from collections.abc import Sequence

from jaxrl_llm.tasks.base import Problem

_EPOCHS = 2**31  # for ever; a repetition without a number has a length that overflows in batches of one


class Batches:
    """An iterator of lists of problems; `get_state()` is a small JSON-able dict, `set_state` continues from there."""

    def __init__(self, iterator, identity: dict[str, int]):
        self._iterator = iterator
        self._identity = identity

    def __iter__(self):
        return self

    def __next__(self) -> list[Problem]:
        return next(self._iterator)

    def get_state(self) -> dict[str, int]:
        return {"next_batch": int(self._iterator.get_state()["next_index"]), **self._identity}

    def set_state(self, state: dict[str, int]) -> None:
        """Raises ValueError when the state belongs to other data, another seed or another batch size."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise ValueError(f"the saved data position has {key}={state.get(key)}, this run has {key}={value}; "
                                 "restore with the same data, seed and batch size")
        self._iterator.set_state({"next_index": state["next_batch"]})


def batches(source: Sequence[Problem], batch_size: int, seed: int, process_index: int = 0,
            process_count: int = 1) -> Batches:
    """Batches of `batch_size` problems (over all processes together; each process yields `batch_size / process_count`).

    The problems form one endless stream: a new permutation every epoch, each epoch having every problem exactly once; a
    batch may span two epochs, so any batch size works. Process `i` of `n` takes elements `i, i + n, ...` of every
    global batch: which problems a batch holds, and the saved state, do not depend on the number of processes. Raises
    ValueError for an empty source or a batch size that the processes cannot share equally.
    """
    import grain

    if len(source) == 0:
        raise ValueError("the source has no problems; check the file, split or filter that it was made from")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index} is not in 0..{process_count - 1}")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(f"batch_size={batch_size} problems cannot be shared by {process_count} processes; "
                         f"use a positive multiple of {process_count}")
    stream = grain.MapDataset.source(source).seed(seed).shuffle().repeat(_EPOCHS)
    shard = stream[process_index::process_count].batch(batch_size // process_count, batch_fn=list)
    iterator = iter(shard.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
    return Batches(iterator, {"problems": len(source), "seed": seed, "batch_size": batch_size})
