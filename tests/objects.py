"""A bucket for tests: whole objects by name in a local folder, which know no append, no rename and no folders of their own.

`register` makes it the s3:// and gs:// of this process, as the packages s3fs and gcsfs would. `serve` shows the same objects by
the JSON interface of Google's storage, in which tensorstore reads and writes.
"""
import contextlib
import http.server
import io
import json
import os
import re
import sys
import threading
import types
import urllib.parse
from pathlib import Path

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

FOLDER = "JAXRL_LLM_TEST_OBJECTS"  # the variable that names the folder


def register(folder: Path) -> None:
    os.environ[FOLDER] = str(folder)
    for name in ("s3", "gs", "gcs"):
        fsspec.register_implementation(name, Objects, clobber=True)


def file_of(name: str) -> Path:
    """The file of an object, "bucket/path"."""
    return Path(os.environ[FOLDER], urllib.parse.quote(name, safe=""))


def names(below: str = "") -> list[str]:
    """The names of all objects that begin so."""
    found = map(urllib.parse.unquote, os.listdir(os.environ[FOLDER]))
    return sorted(name for name in found if name.startswith(below) and not name.startswith("~"))


def put(name: str, content: bytes) -> None:
    """Replaces an object whole."""
    if (Path(os.environ[FOLDER]) / "~read-only").exists():
        raise PermissionError(f"403: no storage.objects.create for {name}")
    part = Path(os.environ[FOLDER], f"~{os.getpid()}-{threading.get_ident()}")
    part.write_bytes(content)
    os.replace(part, file_of(name))


class Objects(AbstractFileSystem):
    """The store as fsspec sees it."""

    protocol = ("s3", "gs", "gcs")
    cachable = False

    def _open(self, path, mode="rb", **settings):
        if mode == "rb":
            return io.BytesIO(file_of(path).read_bytes())
        if mode != "wb":
            raise NotImplementedError(f"an object store cannot open {path} with mode {mode}")
        return _Upload(path)

    def ls(self, path, detail=True, **settings):
        path = self._strip_protocol(path).rstrip("/")
        found = {}
        for name in names(path):
            if name == path:
                found[name] = {"name": name, "type": "file", "size": file_of(name).stat().st_size}
            elif name.startswith(f"{path}/"):
                child = path + "/" + name[len(path) + 1:].partition("/")[0]
                kind = "file" if child == name else "directory"
                found[child] = {"name": child, "type": kind, "size": file_of(name).stat().st_size if kind == "file" else 0}
        if not found:
            raise FileNotFoundError(path)
        return [*found.values()] if detail else [*found]

    def rm(self, path, recursive=False, **settings):
        path = self._strip_protocol(path).rstrip("/")
        found = [name for name in names(path) if name == path or recursive and name.startswith(f"{path}/")]
        if not found:
            raise FileNotFoundError(path)
        for name in found:
            file_of(name).unlink()

    def mkdir(self, path, create_parents=True, **settings):
        """There are no folders but the beginnings of names."""

    makedirs = mkdir

    def rmdir(self, path):
        raise FileNotFoundError(path)

    def _refused(self, *arguments, **settings):
        raise NotImplementedError("an object store cannot do this")

    mv = cp_file = rename = move = copy = _refused


class _Upload(io.BytesIO):
    """What is written becomes an object when it is closed, not before."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def __exit__(self, kind, value, traceback):
        if kind is None:
            self.close()

    def close(self):
        if not self.closed:
            put(self._name, self.getvalue())
        super().close()


@contextlib.contextmanager
def serve():
    """A server of the objects, named to tensorstore, and what orbax asks of the package google-cloud-storage."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Google)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{server.server_port}"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "token"
    package = types.ModuleType("google.cloud.storage")
    package.Client = lambda: types.SimpleNamespace(get_bucket=lambda name: types.SimpleNamespace(name=name))
    cloud = types.ModuleType("google.cloud")
    cloud.storage = package
    before = {name: sys.modules.get(name) for name in ("google.cloud", "google.cloud.storage")}
    sys.modules |= {"google.cloud": cloud, "google.cloud.storage": package}
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name)
            else:
                sys.modules[name] = module


class _Google(http.server.BaseHTTPRequestHandler):
    """Reads (whole or a range), writes of whole objects, deletions and lists, with generations."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def _asked(self):
        url = urllib.parse.urlsplit(self.path)
        bucket, _, name = url.path.partition("/b/")[2].partition("/o")
        return bucket, urllib.parse.unquote(name[1:]), dict(urllib.parse.parse_qsl(url.query))

    def _answer(self, status, content=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        bucket, name, query = self._asked()
        if not name:
            below = f"{bucket}/{query.get('prefix', '')}"
            found = [one.removeprefix(f"{bucket}/") for one in names(below)]
            kept = [one for one in found if query.get("startOffset", "") <= one and one < query.get("endOffset", "\U0010ffff")]
            items = [{"name": one, "generation": _generation(f"{bucket}/{one}"),
                      "size": str(file_of(f"{bucket}/{one}").stat().st_size)} for one in kept]
            return self._answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode())
        try:
            content, generation = file_of(f"{bucket}/{name}").read_bytes(), _generation(f"{bucket}/{name}")
        except FileNotFoundError:
            return self._answer(404)
        if query.get("ifGenerationNotMatch") == generation:
            return self._answer(304)
        if query.get("ifGenerationMatch", generation) != generation:
            return self._answer(412)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self._answer(200, content, x_goog_generation=generation)
        first, last = wanted.groups()
        start = int(first) if first else max(len(content) - int(last), 0)
        end = min(int(last) + 1, len(content)) if first and last else len(content)
        if start >= len(content):
            return self._answer(416)
        self._answer(206, content[start:end], x_goog_generation=generation,
                     Content_Range=f"bytes {start}-{end - 1}/{len(content)}")

    def do_POST(self):
        bucket, _, query = self._asked()
        content, name = self.rfile.read(int(self.headers["Content-Length"])), f"{bucket}/{query['name']}"
        there = _generation(name) if file_of(name).exists() else "0"
        if query.get("ifGenerationMatch", there) != there:
            return self._answer(412)
        put(name, content)
        facts = {"name": query["name"], "generation": _generation(name), "size": str(len(content))}
        self._answer(200, json.dumps(facts).encode())

    def do_DELETE(self):
        bucket, name, _ = self._asked()
        there = file_of(f"{bucket}/{name}").exists()
        file_of(f"{bucket}/{name}").unlink(missing_ok=True)
        self._answer(204 if there else 404)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store, whose lock beats quickly."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "store"))
    monkeypatch.setattr("jaxrl_llm.store.bucket.BEAT", 0.05)
    (tmp_path / "store").mkdir()
    register(tmp_path / "store")
    return tmp_path / "store"


def _generation(name: str) -> str:
    return str(file_of(name).stat().st_mtime_ns)
