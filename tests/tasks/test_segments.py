"""Text files as a task: segments, items, what is held out, the rule that rewards, and bad input."""
import gzip

import pytest

from jaxrl_llm import rewards, tasks
from jaxrl_llm.rewards.segments import BEGIN, END
from jaxrl_llm.tasks.segments import Item, items, segments_of

TEXT = ('Ann (aged 3.5) ran. "Why?" he said! A title\n\nShe saw e.g. a dog... Then it slept.\n'
        "Mr Fox left. Nobody knew. All was well. The end came. It rained.")
PARTS = ["Ann (aged 3.5) ran. ", '"Why?" ', "he said! ", "A title\n\n", "She saw e.g. ", "a dog... ", "Then it slept.\n",
         "Mr Fox left. ", "Nobody knew. ", "All was well. ", "The end came. ", "It rained."]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(TEXT)
    return path


def test_segments_are_sentences_or_lines_and_lose_nothing():
    assert segments_of(TEXT) == PARTS and "".join(PARTS) == TEXT
    assert segments_of(" \n one\n\n\ntwo") == ["one\n\n\n", "two"] and segments_of("") == []


def test_items_of_five_segments():
    """The last two are held out: the training text is "a b c ", in which b alone has a segment on both sides."""
    parts = ["a ", "b ", "c ", "d ", "e "]
    assert items(parts, 0.2, ("next", "middle"), 1, 2) == (
        [Item("a ", "", "b c "), Item("a ", "c ", "b ")], [Item("c ", "", "d e "), Item("c ", "e ", "d ")])
    assert items(parts, 0.2, ("middle",), 9, 2)[1] == [Item("a b c ", "e ", "d ")]
    assert items(parts[:2], 0.2, ("next",), 1, 1) == ([], [])


def test_a_task_of_a_file(file):
    task = tasks.make("segments", path=str(file), kind="both", context=2, ahead=2, heldout_fraction=0.25)
    assert len(task.train) == 2 * 7 and len(task.heldout) == 2 * 2 and task.facts == ("middle",)
    following, middle = task.train[0], task.train[1]
    assert following.prompt[0]["content"] == (
        f"Read the text and predict what comes next. Think first, then write the prediction alone between {BEGIN} and {END}."
        "\n\nAnn (aged 3.5) ran. ")
    assert following.answer == '"Why?" he said!' and following.extra["middle"] == 0
    assert middle.prompt[0]["content"].endswith("\n\nAnn (aged 3.5) ran. <mask> he said! ") and middle.answer == '"Why?"'
    assert middle.extra["middle"] == 1 and [problem.id for problem in (*task.train, *task.heldout)] == list(range(18))
    words = " ".join(problem.prompt[0]["content"] + problem.answer for problem in task.train)
    assert not any(part.strip() in words for part in PARTS[9:])
    assert task.heldout[0].answer == "All was well. The end came."
    brief = tasks.make("segments", path=str(file), kind="middle", context=1, brief=True)
    assert brief.train[0].prompt == 'Ann (aged 3.5) ran. <mask> he said! ' and brief.reward == "segment_prefix(tags=False)"


def test_documents_of_patterns_of_compressed_files_and_of_separators(tmp_path):
    for name in ("a", "b"):
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt") as stream:
            stream.write("".join(f"{name}{n}. " for n in range(6)) + "\n---\n" + "".join(f"{name}x{n}. " for n in range(6)))
    task = tasks.make("segments", path=str(tmp_path / "*.txt.gz"), kind="next", separator="---", context=9, ahead=9, brief=True)
    assert [problem.prompt for problem in task.train] == [
        f"{name}{x}0. " + more for name in "ab" for x in ("", "x") for more in ("", f"{name}{x}1. ")]
    assert task.train[0].answer == "a1. a2. a3."  # of its own document, before what is held out


@pytest.mark.parametrize("said, right", [
    (f"hm{BEGIN}The dog ran home.{END}", True), (f"{BEGIN} The dog ran  home. Then it{END} done", True),
    (f"{BEGIN}The cat{END} no, {BEGIN}The dog ran{END}", True),  # the last pair counts
    (f"{BEGIN}The dog{END}", False), (f"{BEGIN}the dog ran{END}", False), (f"{BEGIN}The dog ran away{END}", False),
    ("The dog ran home.", False), (f"{BEGIN}The dog ran home.", False), (f"{BEGIN}{END}", False), ("", False),
    (f"{BEGIN}The dog ran home. Then it slept. And more.{END}", False)])
def test_a_prediction_is_right_if_it_is_how_the_text_goes_on(said, right):
    reference = "The dog ran home. Then it slept."
    assert rewards.make("segment_prefix").fn(said, reference, None) == right


def test_worked_example_of_the_rule():
    """References [1, 2, 3] and [4, 5], one token or more."""
    score = rewards.make("segment_prefix", tags=False, least=1).fn
    assert [score(said, "1 2 3", None) for said in ("1 2", "1 3")] == [1, 0]
    assert [score(said, "4 5", None) for said in ("4", "9")] == [1, 0]
    short = rewards.make("segment_prefix", tags=False, unit="character").fn
    assert [short(said, "No", None) for said in ("No", "N", "No way")] == [1, 0, 0]  # less than three: all of it


@pytest.mark.parametrize("options, message", [
    ({"kind": "last"}, "kind of segments"), ({"context": 0}, "context=0"), ({"heldout_fraction": 1.0}, "heldout_fraction=1.0")])
def test_bad_options(file, options, message):
    with pytest.raises(ValueError, match=message):
        tasks.make("segments", path=str(file), **options)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file; give a text file"):
        tasks.make("segments", path=str(tmp_path / "none.txt"))
    (tmp_path / "short.txt").write_text("One. Two. Three.")
    with pytest.raises(ValueError, match="make 0 training and 2 held-out items"):
        tasks.make("segments", path=str(tmp_path / "short.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes.txt is not text in UTF-8"):
        tasks.make("segments", path=str(tmp_path / "bytes.txt"))
    with pytest.raises(ValueError, match="unit of segment_prefix"):
        rewards.make("segment_prefix", unit="token")
