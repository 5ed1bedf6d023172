"""A TFDS builder in ArrayRecord files, written and read without TensorFlow."""

import subprocess
import sys

import pytest

from jaxrl_llm import tasks

tensorflow_datasets = pytest.importorskip("tensorflow_datasets")


class TinySums(tensorflow_datasets.core.GeneratorBasedBuilder):
    """Twelve sums to train on and four to hold out."""

    VERSION = tensorflow_datasets.core.Version("1.0.0")

    def _info(self):
        text = tensorflow_datasets.features.Text
        features = tensorflow_datasets.features.FeaturesDict({"sum": text(), "total": text(), "note": text()})
        return tensorflow_datasets.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(range(12)), "test": self._generate_examples(range(12, 16))}

    def _generate_examples(self, numbers):
        for number in numbers:
            yield number, {"sum": f"{number} + 1 = ?", "total": str(number + 1), "note": "\u00e9"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("tfds"))
    TinySums(data_dir=directory, file_format="array_record").download_and_prepare()
    return directory


def make(data_dir, **options):
    keys = {"path": "tfds:tiny_sums", "data_dir": data_dir, "prompt": "{sum}", "answer": "total"}
    return tasks.make("dataset", **(keys | options))


def test_reads_every_example_as_text(data_dir):
    task = make(data_dir)
    assert {(tasks.text_of(p), p.answer) for p in task.train} == {(f"{n} + 1 = ?", str(n + 1)) for n in range(12)}
    assert {p.answer for p in task.heldout} == {"13", "14", "15", "16"}
    assert [p.id for p in task.heldout] == [12, 13, 14, 15]
    assert task.train[0].prompt[0]["role"] == "user"
    assert task.train[0].extra == {"note": "\u00e9"}
    assert isinstance(make(data_dir, chat=False).train[0].prompt, str)


def test_parts_of_one_split(data_dir):
    task = make(data_dir, split="train[:75%]", heldout="train[75%:]")
    assert (len(task.train), len(task.heldout)) == (9, 3)
    assert not {p.answer for p in task.train} & {p.answer for p in task.heldout}


@pytest.mark.parametrize(("options", "message"), [
    ({"path": "tfds:tiny_sumz"}, "no TFDS builder 'tiny_sumz'"),
    ({"prompt": "{question}"}, "there is no column 'question'; there are note, sum, total"),
    ({"split": "training"}, "no split 'training'; it has"),
    ({"heldout": "train[:10%]"}, "1 prompts are in both tfds:tiny_sums and train"),
    ({"heldout": "train[:0%]"}, r"split 'train\[:0%\]' of tfds:tiny_sums has no rows"),
    ({"streaming": True, "limit": 3}, "streaming and subset are for Hugging Face"),
])
def test_bad_options(data_dir, options, message):
    with pytest.raises(ValueError, match=message):
        make(data_dir, **options)


def test_files_that_vanish_are_named(tmp_path):
    TinySums(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    for file in tmp_path.rglob("*train.array_record*"):
        file.unlink()
    with pytest.raises(RuntimeError, match="No such file or directory.*tiny_sums-train.array_record-00000-of-00001"):
        make(str(tmp_path))


def test_unprepared_builder(tmp_path):
    with pytest.raises(ValueError, match="is not prepared in .*tfds build tiny_sums --file_format=array_record"):
        make(str(tmp_path))


def test_reading_does_not_import_tensorflow(data_dir):
    code = ("import sys; from jaxrl_llm import tasks; "
            f"t = tasks.make('dataset', path='tfds:tiny_sums', data_dir={data_dir!r}, prompt='{{sum}}', "
            "answer='total'); "
            "assert len([*t.train]) == 12 and t.heldout[0].answer; print('tensorflow' in sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False"]


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ValueError, match=r"this task needs the package tensorflow-datasets, .*pip install 'jaxrl_llm\[data\]'"):
        tasks.make("dataset", path="tfds:gsm8k")
