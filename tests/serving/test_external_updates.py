"""Ways to give a server other weights: requests of SGLang and of vLLM, and a folder that it reads by itself."""
import json

import pytest
from asking import (
    MODEL,
    as_vllm,
    asking,
    assert_same_nodes,
    collected,
    error,
    hand_over,
    make_engine,
    requests,
    troubled,
    untagged,
    weights,
)
from starlette.responses import Response

from jaxrl_llm.engines import server as external
from jaxrl_llm.models import weights as files

pytestmark = pytest.mark.usefixtures("short_waits")

RELOAD, CLEAR = "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"


def test_vllm_reads_weights_and_drops_what_it_kept_of_earlier_ones(url, folder, worker, healthy):
    seen = []
    with troubled(url, as_vllm(url, seen)) as at, asking(at, folder, "vllm") as server:
        server.publish(weights(51))
        engine = make_engine(server)
        assert seen == [RELOAD, CLEAR, RELOAD, CLEAR] and worker.tag == server.tag
        engine.submit(*requests(range(12)))
        assert_same_nodes(collected(engine), healthy)


@pytest.mark.parametrize(("path", "troubles"), (
    (RELOAD, [error(500), error(503)]),
    (CLEAR, [error(500), Response("<html>"), Response(json.dumps({"success": False}))])))
def test_what_vllm_may_take_later_is_repeated(url, folder, worker, path, troubles):
    left, seen = list(troubles), []
    vllm = as_vllm(url, seen)

    def trouble(asked, body):
        return left.pop() if asked == path and left else vllm(asked, body)

    with troubled(url, trouble) as at, asking(at, folder, "vllm") as server:
        server.publish(weights(52))
        assert not left and seen == [RELOAD, CLEAR] and worker.tag == server.tag


@pytest.mark.parametrize(("path", "answer", "kind", "reason"), (
    (RELOAD, Response("<html>"), external.Refusal, "did not take the weights: <html>"),
    (RELOAD, Response("{}"), external.Refusal, "did not take the weights: {}"),
    (RELOAD, Response(json.dumps({"results": []})), external.Refusal, "did not take the weights"),
    (RELOAD, Response(json.dumps({"results": [None, "no such file"]})), external.Refusal, "no such file"),
    (CLEAR, Response("[]"), external.Fault, "did not drop keys and values .*the last of 5 attempts")))
def test_what_vllm_refuses_ends_the_run(url, folder, path, answer, kind, reason):
    vllm = as_vllm(url, [])
    with troubled(url, lambda asked, body: answer if asked == path else vllm(asked, body)) as at, \
            asking(at, folder, "vllm") as server, pytest.raises(kind, match=reason):
        server.publish(weights(53))


def test_a_server_that_has_no_such_request_is_named_the_way_that_works(url, folder):
    with asking(url, folder, "vllm") as server, pytest.raises(
            external.Refusal, match="/collective_rpc: status 404: .* no such request, start vLLM, .*VLLM_SERVER_DEV_MODE=1"):
        server.publish(weights(54))
    with troubled(url, as_vllm(url, [])) as at, asking(at, folder) as server, pytest.raises(
            external.Refusal, match="weights_from_disk: status 404: .*Not Found.* no such request, set server.reload to vllm"):
        server.publish(weights(54))


@pytest.mark.parametrize("failing", ("/v1/models", "/update_weights_from_disk"))
def test_weights_that_a_server_did_not_take_are_handed_over_again(url, folder, worker, failing):
    """It does not report its weights, so the run remembers what failed."""
    fails, seen = [], []

    def trouble(path, body):
        if fails and path == failing:
            return error(400)
        seen.extend(["handed over"] * (path == "/update_weights_from_disk"))
        return untagged(path)

    old, new = weights(55), weights(56)
    with troubled(url, trouble) as at, asking(at, folder) as server:
        before = server.publish(old)
        for given in (new, old):
            fails.append(1)
            with pytest.raises(external.Refusal, match="status 400: not now"):
                server.publish(new)
            fails.clear()
            assert server.publish(given) == worker.tag and (worker.tag == before) == (given is old)
            seen.clear()
            assert server.publish(given) == worker.tag and not seen
            server.publish(old)


# --- the folder alone --------------------------------------------------------------------------------------------------------


def test_weights_lie_whole_in_the_folder_and_nothing_is_requested(url, tmp_path):
    """The server reports no weights, so nobody can wait for them."""
    seen = []
    with troubled(url, lambda path, body: (seen.append(path), untagged(path))[1]) as at, \
            asking(at, tmp_path, "folder") as server:
        tags = [server.publish(weights(seed)) for seed in (61, 62, 63, 62)]
        assert set(seen) == {"/v1/models"} and len(set(tags)) == 3
    assert {path.name for path in tmp_path.iterdir()} == {tags[2], tags[3], "latest"}
    assert (tmp_path / "latest").resolve() == tmp_path.resolve() / tags[3]
    config, params = files.load(tmp_path / "latest")
    assert config.num_layers == MODEL.config.num_layers and (params["embed"] == weights(62)["embed"]).all()


def test_a_server_that_reads_the_folder_is_awaited(url, folder, worker, healthy):
    asked = []
    with asking(url, folder) as server:
        server.publish(weights(65))

    async def trouble(path, body):
        if path == "/v1/models":
            asked.append(worker.tag)
            if len(asked) == 4:
                await hand_over(url, (folder / "latest").resolve())

    with troubled(url, trouble) as at, asking(at, folder, "folder", deadline=60) as server:
        engine = make_engine(server)
        assert len(asked) == 4 and asked[-1] != server.tag == worker.tag
        engine.submit(*requests(range(12)))
        assert_same_nodes(collected(engine), healthy)


def test_a_server_that_never_reads_the_folder_ends_the_run(url, folder, worker):
    with asking(url, folder, "folder", deadline=0.5) as server, pytest.raises(external.Fault) as value:
        server.publish(weights(64))
    assert f"serves the weights {worker.tag!r}, not yet {server.tag!r}" in str(value.value)
