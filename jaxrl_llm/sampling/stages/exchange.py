"""Compares what the processes of a run sample: they must agree before a batch and on the batch."""
from jaxrl_llm import parallel
from jaxrl_llm.sampling.exchange import check_same
from jaxrl_llm.sampling.stages.base import Origin, Stage, Unfinished


def before() -> Stage:
    """Raises ValueError if knobs or positions of the processes differ."""
    def begin(batch: Unfinished, source: Origin) -> Unfinished:
        if parallel.several():
            place = {"the next uid": source.next_uid, "the position in the data": str(source.data.get_state())}
            check_same({**batch.knobs, **place}, f"before batch {batch.snapshot.version + 1}")
        return batch

    return Stage("before", begin)


def after() -> Stage:
    """Raises ValueError if the batches of the processes differ."""
    def end(batch: Unfinished, source: Origin) -> Unfinished:
        if parallel.several():
            numbers = {name: column for name, column in batch.forest.columns.items() if column.dtype != object}
            check_same(numbers | dict(batch.forest.facts) | dict(batch.counts), f"of batch {batch.snapshot.version + 1}")
        return batch

    return Stage("after", end=end)
