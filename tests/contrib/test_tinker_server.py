"""A real server on a loopback port and Tinker's own client: what a user of that API does, and faults on purpose."""
import importlib.util
import re
import threading
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
from server import sampled
from test_tinker_service import merged
from tinker_server import make_service, serving

if importlib.util.find_spec("tinker") is None:
    pytest.skip("needs Tinker's client: pip install 'jaxrl_llm[tinker]'", allow_module_level=True)

import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from jaxrl_llm.contrib.tinker import wire
from jaxrl_llm.serving.requests import RequestError

KEY = "tml-secret"
PROMPT = list(b"a prompt")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    with serving(folder, make_service(folder, models=16), token=KEY, hold=0.1) as (url, service):
        yield url, service


@pytest.fixture(scope="module")
def client(server):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TINKER_TELEMETRY", "0")
        with tinker.ServiceClient(base_url=server[0], api_key=KEY) as one:
            yield one


@pytest.fixture(scope="module")
def training(client):
    return client.create_lora_training_client("tiny", rank=3, seed=1).result(60)


def datum(text=b"hello world", **fields):
    ids = list(text)
    targets = np.array(ids[1:])
    fields = {name: np.asarray(value, np.float32) for name, value in fields.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": targets, **fields})


def ask(server, route, body, key=KEY, **options):
    options = {"json": body} if isinstance(body, dict) else {"content": body, **options}
    headers = {"X-API-Key": key, **({} if "json" in options else {"Content-Type": "application/x-protobuf"})}
    return httpx.post(f"{server[0]}/api/v1/{route}", headers=headers, timeout=60, **options)


def result_of(server, pending):
    """The result of a raw request."""
    while (answer := ask(server, "retrieve_future", pending).json()).get("type") == "try_again":
        pass
    return answer


@pytest.mark.slow
def test_a_short_loop_lowers_the_loss_and_samples_have_the_new_weights(client, training, server):
    first = training.save_weights_and_get_sampling_client().result(60)
    data, losses = [datum(weights=[0, 0, 1, 1, 1, 1, 1, 1, 1, 1])], []
    for _ in range(5):
        forward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.02))
        losses.append(forward.result(60).metrics["loss:sum"])
        assert step.result(60).metrics["grad_norm"] > 0
    assert losses[-1] < 0.7 * losses[0]
    after = training.forward(data, "cross_entropy").result(60)
    logprobs = after.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert after.metrics["loss:sum"] == pytest.approx(-logprobs[2:].sum(), rel=1e-5)
    np.testing.assert_allclose(after.loss_fn_outputs[0]["elementwise_loss"].to_numpy(), [0, 0, *-logprobs[2:]], rtol=1e-6)
    last = training.save_weights_and_get_sampling_client().result(60)
    base = client.create_sampling_client(base_model="tiny").result(60)
    scores = last.compute_logprobs(types.ModelInput.from_ints(list(b"hello world"))).result(60)
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], logprobs, atol=1e-4)
    params = types.SamplingParams(max_tokens=8, seed=20)
    adapter = jax.device_get(server[1].model(training.model_id).adapter.tree)
    untrained = sampled(PROMPT, (20, 21), 8)
    for sampler, expected in ((last, merged(adapter, (20, 21), 8)), (base, untrained.values()), (first, untrained.values())):
        result = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params, include_prompt_logprobs=True).result(60)
        for one, node in zip(result.sequences, expected, strict=True):
            assert one.tokens == node.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, node.logprobs, atol=1e-4)
            assert one.stop_reason == {"limit": "length", "stop": "stop"}[node.finish]
        assert len(result.prompt_logprobs) == len(PROMPT)


def test_reinforcement_on_samples_of_the_sampler(training):
    """Log-probs of the sampler are those of the learner, so the ratio is 1 and the loss -sum(A)."""
    sampler = training.save_weights_and_get_sampling_client().result(60)
    params = types.SamplingParams(max_tokens=6, seed=1, stop=[])
    result = sampler.sample(types.ModelInput.from_ints(PROMPT), 3, params).result(60)
    data = []
    for i, one in enumerate(result.sequences):
        ids, before = PROMPT + one.tokens, len(PROMPT) - 1
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={
            "target_tokens": np.array(ids[1:]), "logprobs": np.array([0.0] * before + one.logprobs, np.float32),
            "advantages": np.array([0.0] * before + [i - 0.5] * len(one.tokens), np.float32)}))
    total = sum((i - 0.5) * len(one.tokens) for i, one in enumerate(result.sequences))
    for loss, settings in (("importance_sampling", None), ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})):
        outcome = training.forward(data, loss, settings).result(60)
        assert outcome.metrics["loss:sum"] == pytest.approx(-total, abs=1e-3)
        np.testing.assert_allclose(outcome.loss_fn_outputs[1]["logprobs"].to_numpy()[len(PROMPT) - 1:],
                                   result.sequences[1].logprobs, atol=1e-4)


def test_states_and_named_weights_come_back(client, training):
    data = [datum()]
    info = training.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == ("tiny", 3, True)
    path = training.save_state("middle").result(60).path
    restored = client.create_training_client_from_state_with_optimizer(path).result(60)
    assert restored.model_id != training.model_id and restored.get_info().lora_rank == 3
    losses = [one.forward(data, "cross_entropy").result(60).metrics["loss:sum"] for one in (training, restored)]
    assert losses[0] == losses[1]
    named = restored.save_weights_for_sampler("named").result(60).path
    sampler = client.create_sampling_client(model_path=named).result(60)
    assert sampler.get_base_model() == "tiny"
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(list(b"hello world"))).result(60)
    assert -sum(scores[1:]) == pytest.approx(losses[0], rel=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="does not exist on this server"):
        client.create_training_client_from_state("tinker://none/weights/none").result(60)


def test_stops_are_texts_tokens_or_none(client):
    sampler = client.create_sampling_client(base_model="tiny").result(60)
    def sample(limit=20, **fields):
        params = types.SamplingParams(max_tokens=limit, seed=4, **fields)
        return sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result(60).sequences[0]
    whole = sample(stop=[])
    assert len(whole.tokens) == 20 and whole.stop_reason == "length"
    token = next(t for t in whole.tokens if 32 < t < 127)
    at = whole.tokens.index(token) + 1
    for stop in ([token], chr(token), [chr(token)]):
        cut = sample(stop=stop)
        assert cut.tokens == whole.tokens[:at] and cut.stop_reason == "stop"
    def asked(stop):
        return types.SampleRequest(prompt=types.ModelInput.from_ints(PROMPT), sampling_params=types.SamplingParams(stop=stop))
    assert wire.requests_of(asked(" a"), (), 128, 1)[0].stops_in_context
    for many in ([*range(17)], [chr(97 + i) for i in range(17)], ["a" * 1001]):
        with pytest.raises(RequestError, match="give up to 16, texts of up to 1000 letters"):
            wire.requests_of(asked(many), (), 128, 1)
    greedy = sample(temperature=0.0, stop=[])
    assert sample(temperature=1.0, top_k=1, stop=[]).tokens == greedy.tokens
    assert sample(temperature=1.0, top_p=1e-6, stop=[]).tokens == greedy.tokens


def test_a_future_is_asked_for_until_it_is_there(server, training):
    """The worker is blocked: raw answers ask to try again, and the client waits."""
    let_go = threading.Event()
    server[1].worker.call(lambda engine: let_go.wait(30))
    forward = training.forward([datum()], "cross_entropy")
    pending = ask(server, "save_weights", {"model_id": training.model_id, "seq_id": 1000, "path": "late"}).json()
    try:
        for _ in range(3):
            answer = ask(server, "retrieve_future", pending)
            assert answer.json() == {"type": "try_again", "request_id": pending["request_id"], "queue_state": "active"}
        assert not forward.future().done()
    finally:
        let_go.set()
    assert forward.result(60).metrics["loss:sum"] > 0
    assert result_of(server, pending)["path"].endswith("/weights/late")
    unknown = ask(server, "retrieve_future", {"request_id": "nobody:0"})
    assert unknown.status_code == 410 and "was dropped" in unknown.json()["error"]["message"]


@pytest.mark.slow
def test_a_request_that_comes_twice_is_done_once(server, client):
    model = client.create_lora_training_client("tiny", rank=2, seed=3).result(60)
    model.forward_backward([datum()], "cross_entropy").result(60)
    body = {"model_id": model.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    first, again = (ask(server, "optim_step", body).json() for _ in range(2))
    assert first == again
    answers = [result_of(server, first) for _ in range(2)]
    assert answers[0] == answers[1] and answers[0]["metrics"]["grad_norm"] > 0
    third = ask(server, "optim_step", body | {"seq_id": 3}).json()
    failed = result_of(server, third)
    assert failed["category"] == "user" and "call forward_backward first" in failed["error"]


def test_a_wrong_key_is_refused(server):
    for key in ("tml-wrong", ""):
        answer = ask(server, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "1"}, key=key)
        assert answer.status_code == 401 and "X-API-Key" in answer.json()["error"]["message"]
    assert httpx.get(f"{server[0]}/api/v1/healthz").json() == {"status": "ok"}
    with pytest.raises(tinker.AuthenticationError, match="no or wrong token"):
        tinker.ServiceClient(base_url=server[0], api_key="tml-wrong").create_lora_training_client("tiny").result(60)


def test_malformed_requests_get_a_clear_error(server, training):
    def refused(route, body, message, status=400):
        answer = ask(server, route, body)
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    refused("forward_backward", b"\xff\xff\xff", "no ForwardBackwardRequest")
    refused("optim_step", b"{}", "must be JSON", 415)
    refused("optim_step", {"model_id": training.model_id}, "the body is no OptimStepRequest: ")
    refused("optim_step", {"model_id": "x", "adam_params": {"learning_rate": "fast"}}, "learning_rate")
    refused("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": "tiny"}, "LoRA adapters alone")
    refused("save_weights_for_sampler", {"model_id": "x", "seq_id": 1}, "give one of them")
    refused("weights_info", {"path": "x"}, "tinker_path")
    empty = {"prompt": {"chunks": []}, "sampling_params": {}}
    refused("asample", empty, "create a sampling session first")
    refused("asample", empty | {"sampling_session_id": "x", "seq_id": 0}, "no sampler 'x'")
    refused("session_heartbeat", {"session_id": "gone"}, "make a new ServiceClient", 410)
    refused("nowhere", {}, "Not Found; see docs", 404)
    image = messages.ForwardBackwardRequest(loss_fn="ppo")
    image.data.add().model_input.add().image.data = b"x"
    refused("forward_backward", image.SerializeToString(), "reads tokens alone")
    sparse = messages.ForwardBackwardRequest(loss_fn="ppo")
    sparse.data.add().loss_fn_inputs["target_tokens"].shape.extend([2, 3])
    refused("forward_backward", sparse.SerializeToString(), "one number for each token")


def test_the_client_gets_the_reason_of_an_error(client, training):
    def failed(message, call):
        with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=message):
            call().result(60)
    failed("Did you mean 'ppo'", lambda: training.forward([datum()], "ppo2"))
    failed("ppo reads logprobs, advantages, and may have weights", lambda: training.forward([datum()], "ppo"))
    failed("takes 1 to 4", lambda: client.create_lora_training_client("tiny", rank=32))
    failed("this server has 'tiny'", lambda: client.create_lora_training_client("Qwen/Qwen3-8B", rank=2))
    failed("this server has 'tiny'", lambda: client.create_sampling_client(base_model="Qwen/Qwen3-8B"))
    failed("takes adam_params", lambda: training.optim_step(types.DimuonParams(learning_rate=0.1)))


def test_losses_of_the_client_go_through_cross_entropy(client):
    torch = pytest.importorskip("torch")
    one, other = (client.create_lora_training_client("tiny", rank=2, seed=9).result(60) for _ in range(2))
    def custom(data, logprobs):
        return torch.stack([-(x * torch.arange(len(x))).sum() for x in logprobs]).sum(), {"examples": len(data)}
    own = one.forward_backward_custom([datum(), datum(b"other")], custom)
    assert own.result(60).metrics["examples"] == 2
    other.forward_backward([datum(weights=np.arange(10)), datum(b"other", weights=np.arange(4))], "cross_entropy").result(60)
    norms = [model.optim_step(types.AdamParams()).result(60).metrics["grad_norm"] for model in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.slow
def test_the_example_of_the_guide_runs(server, capsys):
    page = (Path(__file__).parents[2] / "docs/guides/serving.md").read_text(encoding="utf-8")
    code, = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    ids = re.search(r"= \[([\d, ]+)\]", code)[1]
    changed = {"http://127.0.0.1:8000": server[0], "tml-local": KEY, '"smollm2"': '"tiny"', "rank=16": "rank=4",
               ids: ", ".join(str(int(x) % 256) for x in ids.split(","))}  # the tiny model knows bytes
    for old, new in changed.items():
        assert old in code
        code = code.replace(old, new)
    exec(code, {})
    *losses, tokens = capsys.readouterr().out.splitlines()
    assert len(losses) == 8 and float(losses[-1]) < float(losses[0]) and 0 < len(tokens.split(",")) <= 8


def test_capabilities_and_the_end_of_a_session(server, tmp_path):
    result = tinker.RestClient(base_url=server[0], api_key=KEY).get_server_capabilities().result(60).supported_models[0]
    assert (result.model_name, result.max_context_length, result.trainable, result.sampleable) == ("tiny", 64, True, True)
    service = make_service(tmp_path, models=1)
    with serving(tmp_path, service) as (url, _):
        for _ in range(2):  # the second one has room as the first session has ended
            with tinker.ServiceClient(base_url=url, api_key="tml-any") as client:
                client.create_lora_training_client("tiny", rank=2).result(60)
                assert len(service._models) == 1
        assert not service._models
