"""A prepared TensorFlow Datasets builder read as random-access ArrayRecord files, without TensorFlow."""

from jaxrl_llm.tasks.base import Problem, Source, Task, optional


def tfds(*, builder: str, data_dir: str | None = None, prompt_key: str = "question", answer_key: str = "answer",
         train_split: str = "train", heldout_split: str = "test", chat: bool = True) -> Task:
    """Splits of a TFDS builder (`"name"`, `"name/config:version"`); each feature key names a text or an integer.

    The data must have been prepared in the ArrayRecord format. Raises ValueError when it was not, for an unknown
    builder, split or key, and for splits that share examples.
    """
    tensorflow_datasets = optional("tensorflow_datasets")
    try:
        prepared = tensorflow_datasets.builder(builder, data_dir=data_dir)
    except tensorflow_datasets.core.DatasetNotFoundError as error:
        raise ValueError(f"no TFDS builder {builder!r} (data_dir={data_dir}); check the spelling, import the module "
                         "that defines it, or give the data_dir it was prepared in") from error
    _check_prepared(prepared)
    _check_disjoint(prepared, train_split, heldout_split)
    for key in (prompt_key, answer_key):
        if key not in prepared.info.features:
            raise ValueError(f"TFDS builder {builder!r} has no feature {key!r}; "
                             f"it has {sorted(prepared.info.features)}")

    def build(record: dict, number: int) -> Problem:
        question = _text(record[prompt_key])
        prompt = ({"role": "user", "content": question},) if chat else question
        extra = {key: _text(value) if isinstance(value, bytes) else value
                 for key, value in record.items() if key not in (prompt_key, answer_key)}
        return Problem(prompt, _text(record[answer_key]), number, extra=extra)

    train, heldout = (prepared.as_data_source(split) for split in (train_split, heldout_split))
    return Task(f"tfds/{builder}", Source(train, build), Source(heldout, build, len(train)), reward="boxed")


def _check_prepared(prepared) -> None:
    how = f"prepare it with: tfds build {prepared.name} --file_format=array_record"
    if not prepared.is_prepared():
        raise ValueError(f"TFDS builder {prepared.name!r} is not prepared in {prepared.data_path}; {how}")
    if prepared.info.file_format.value != "array_record":
        raise ValueError(f"TFDS builder {prepared.name!r} is prepared as {prepared.info.file_format.value}, which has "
                         f"no random access; {how}")


def _check_disjoint(prepared, train_split: str, heldout_split: str) -> None:
    ranges = []
    for split in (train_split, heldout_split):
        try:
            instructions = prepared.info.splits[split].file_instructions
        except (KeyError, ValueError) as error:
            raise ValueError(f"TFDS builder {prepared.name!r} has no split {split!r}; it has "
                             f"{sorted(prepared.info.splits)}") from error
        ranges.append([(part.filename, part.skip, part.skip + part.take) for part in instructions])
        if not ranges[-1]:
            raise ValueError(f"split {split!r} of TFDS builder {prepared.name!r} is empty")
    for name, start, stop in ranges[0]:
        for other, first, last in ranges[1]:
            if name == other and start < last and first < stop:
                raise ValueError(f"splits {train_split!r} and {heldout_split!r} of TFDS builder {prepared.name!r} "
                                 "share examples; use disjoint ones, for example 'train[:90%]' and 'train[90%:]'")


def _text(value) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
