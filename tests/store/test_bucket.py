"""Run folders in a bucket that knows whole objects only: records, locks and checkpoints."""
import time

import jax.numpy as jnp
import objects
import pytest

from jaxrl_llm.runs import loop
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.store import bucket
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.store.workdir import checkpoint_steps

store = objects.store


def test_what_changes_in_the_folder_is_replaced_whole_and_what_is_removed_is_deleted(store):
    objects.put("bucket/run/", b"")  # as a console makes a folder
    objects.put("bucket/run/old.json", b"{}")
    objects.put("bucket/run/samples/page.txt", b"page")
    with bucket.kept(bucket.place("s3://bucket/run"), continued=True) as (folder, write):
        assert [path.name for path in folder.iterdir()] == ["old.json"]  # nothing continues from pages
        (folder / "old.json").unlink()
        with open(folder / "lines", "a") as file:
            for line in ("one\n", "two\n"):
                file.write(line)
                file.flush()
                write()
        assert objects.file_of("bucket/run/lines").read_bytes() == b"one\ntwo\n"
        (folder / "new.tmp").write_text("half")
        (folder / "deep").mkdir()
        (folder / "new.tmp").rename(folder / "deep/new")
    assert objects.names() == ["bucket/run/", "bucket/run/deep/new", "bucket/run/lines", "bucket/run/samples/page.txt"]
    copy = bucket.local("s3://bucket/run", "deep")
    assert sorted(path.name for path in copy.rglob("*")) == ["deep", "lines", "new"]


def test_a_bucket_has_one_run_at_a_time(store):
    home = bucket.place("s3://bucket/run")
    with bucket.kept(home):
        with pytest.raises(RuntimeError, match=r"s3://bucket/run is in use by another run \(host .*, process \d+, seen at 20"):
            with bucket.kept(home):
                pass
        lock = objects.file_of("bucket/run/run.lock").read_bytes()
    assert objects.names() == []
    objects.put("bucket/run/run.lock", lock)  # of a run that was killed
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="in use by another run"), bucket.kept(home) as (folder, _):
        assert time.monotonic() - began >= bucket.PATIENCE * bucket.BEAT
        objects.put("bucket/run/run.lock", lock)  # of two that began within the same moment the first ends
        (folder / "metrics.jsonl").touch()
    assert objects.names() == ["bucket/run/run.lock"]


@pytest.mark.parametrize("scheme", ("gs", "s3"))
def test_a_comparison_has_checkpoints_and_pages_of_its_runs_again(store, scheme):
    there = [f"bucket/out/runs/{name}" for name in ("checkpoints/2/commit_success.txt", "checkpoints/2/state/a", "samples/a")]
    for name in there:
        objects.put(name, b"a")
    with bucket.kept(bucket.place(f"{scheme}://bucket/out")) as (folder, _):
        assert bucket.steps_in(folder / "runs/checkpoints") == [2] and (folder / "runs/samples/a").read_text() == "a"
        (folder / "runs/checkpoints/2/state/a").unlink()
    assert objects.names() == [there[0], there[2]]


def test_a_checkpoint_that_is_being_written_is_not_copied(store):
    for name in ("2/host/metadata", "2/commit_success.txt", "3/host/metadata", "3/_CHECKPOINT_METADATA"):
        objects.put(f"bucket/live/checkpoints/{name}", b"{}")
    copy = bucket.local("gs://bucket/live", "checkpoints") / "checkpoints"
    assert [path.name for path in copy.iterdir()] == ["2"]


def test_a_run_that_copies_something_large_lives(store, monkeypatch):
    """Another one starts while it writes an object at its end, and while the next one reads it at the start."""
    put, read, home, met = objects.put, objects.Objects._open, bucket.place("s3://bucket/run"), []

    def meet(name):
        if name.endswith("large"):
            with pytest.raises(RuntimeError, match="in use by another run"), bucket.kept(home):
                pass
            met.append(name)

    def slow_put(name, content):
        meet(name)
        put(name, content)

    def slow_read(self, path, mode="rb", **settings):
        meet(path if mode == "rb" else "")
        return read(self, path, mode, **settings)

    monkeypatch.setattr(objects, "put", slow_put)
    monkeypatch.setattr(objects.Objects, "_open", slow_read)
    for started in range(2):
        with bucket.kept(home) as (folder, _):
            if not started:
                (folder / "large").touch()
    assert met == ["bucket/run/large"] * 2 and objects.names() == ["bucket/run/large"]


@pytest.mark.parametrize("url, error", (
    ("http://bucket/run", "is a URL of another kind; give a local or mounted folder, or gs://BUCKET/FOLDER"),
    ("gs://bucket", "is a URL of another kind"),
    ("az://bucket/run", "az://bucket/run needs a package: pip install adlfs"),
    ("s3://bucket/a*b", "orbax, which writes the checkpoints, reads 'a.b' as a pattern"),
))
def test_other_addresses_are_refused_before_anything_is_built(store, url, error):
    with pytest.raises(ValueError, match=error):
        loop.train(default_config(), url)


def test_a_bucket_that_cannot_be_written_ends_the_run_before_it_builds(store):
    (store / "~read-only").touch()
    with pytest.raises(OSError, match="cannot reach or write s3://bucket/run: PermissionError: 403: no storage.objects.create "
                                      "for bucket/run/run.lock; check that the bucket exists and this machine may list, read"):
        loop.train(default_config(), "s3://bucket/run")
    assert objects.names() == []


def test_checkpoints_on_gs_are_written_by_orbax(store):
    """Through tensorstore's own driver, against a server that speaks the interface of Google's storage."""
    place = bucket.place("gs://bucket/run/checkpoints")
    with objects.serve():
        with Checkpoints(place, keep=2) as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(step, {"w": jnp.full(3, float(step))}, {"at": step})
        assert checkpoint_steps(place) == [2, 3]
        objects.file_of("bucket/run/checkpoints/3/commit_success.txt").unlink()  # a save that was cut short
        assert checkpoint_steps(place) == [2]
        with pytest.warns(RuntimeWarning, match="restored step 2.*step 3: its save was cut short"), Checkpoints(place) as again:
            assert again.restore({"w": jnp.zeros(3)}).state["w"].tolist() == [2, 2, 2]
            again.save(3, {"w": jnp.full(3, 4.0)})
            again.wait()
            objects.put("bucket/run/checkpoints/3/host/metadata", b"{")
            with pytest.raises(OSError, match="no intact checkpoint in gs://.*step 3: .*try again; if it stays so, delete"):
                again.restore({"w": jnp.zeros(3)})
            with pytest.warns(RuntimeWarning, match=r"checkpoints \[2, 3\] of the old one are now deleted"):
                again.abandon(2)
        assert objects.names("bucket/run/checkpoints/3/") == []
