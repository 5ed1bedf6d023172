"""Whole runs that sample from a server."""
import json

import chatter
import jax
import numpy as np
import pytest
import run_files
from asking import MODEL, as_vllm, asking, choice, error, make_worker, troubled, untagged, weights
from server import serving
from starlette.responses import Response

from jaxrl_llm.engines import server as external
from jaxrl_llm.engines.server.server import digest
from jaxrl_llm.learning import schedules
from jaxrl_llm.models.lora import merge
from jaxrl_llm.runs import loop, pages
from jaxrl_llm.runs.trained import trained
from jaxrl_llm.setup import setup

pytestmark = pytest.mark.usefixtures("short_waits")


def config_of(url, folder, **changes):
    """A short run that is rewarded for lower-case letters, on the game with `environment`, else in single turns."""
    c = chatter.get_config(**{"server.url": url, "server.weights": str(folder), "server.deadline": 60.0, "eval.every": 0,
                              "environment": "", "task": "arithmetic(level=digit)",
                              "rewards": "format(pattern='(?s).*[a-z].*')", "sampling.max_tokens": 8, **changes})
    return c


GAME = {"environment": "chatter:letters", "task": "arithmetic", "rewards": "", "sampling.max_tokens": 32}


@pytest.mark.slow
@pytest.mark.parametrize("changes", (
    {"sampling.temperature": 0.7, "sampling.stop_strings": ("zz",), "lora.rank": 2}, GAME,
    GAME | {"method": "grpo", "guidance": "experts"}), ids=("adapters", "game", "guide"))
def test_a_run_samples_from_a_server(url, worker, tmp_path, folder, changes):
    config = config_of(url, folder, **changes)
    loop.train(config, tmp_path)
    lines = run_files.lines(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["skipped_updates"] == 0 and line["grad_norm"] > 0 and line["max/mismatch"] < 2e-5
    result = trained(tmp_path)  # which samples by itself
    assert result.source.stream.kind.name != "server" and result.step == 3
    whole = result.params if result.lora is None else merge(result.params, result.lora)
    assert worker.tag == digest(jax.device_get(whole))  # of the evaluation after the last step


@pytest.mark.slow
def test_a_run_whose_server_fails_continues_with_the_next(url, tmp_path, folder):
    """It ends with the step before saved, and a resumed run equals an uninterrupted one."""
    asked = []

    def dies(path, body):
        asked.extend([1] if path == "/v1/completions" else [])
        return error(400) if len(asked) > 2 * 16 + 5 + 16 else None  # in the second step, behind the evaluation

    config = config_of(url, folder)
    loop.train(config, tmp_path / "straight")
    assert all(line["max/mismatch"] < 2e-5 for line in run_files.lines(tmp_path / "straight")[1:])
    with troubled(url, dies) as at, pytest.raises(external.Refusal, match="status 400: not now") as result:
        loop.train(config_of(at, folder), tmp_path / "broken")
    assert "trajectory" in result.value.__notes__[0]
    with pytest.warns(RuntimeWarning, match="server.url"):
        loop.train(config, tmp_path / "broken", resume=True)
    plain = config_of("", folder)
    run_files.assert_same(*(run_files.saved(tmp_path / name, plain) for name in ("broken", "straight")))


def steps_of(config):
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    return schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params))


@pytest.mark.slow
def test_a_server_with_other_weights_ends_the_run(url, folder):
    """It claims to serve the published weights, and does not: the log-probs show it."""
    tag = []
    with asking(url, folder) as server:
        server.publish(weights(41))

    def pretend(path, body):
        if path == "/update_weights_from_disk":
            tag[:] = [body["weight_version"]]
            return Response(json.dumps({"success": True}))
        if path == "/v1/models":
            return lambda answer: answer["data"][0].update(metadata={"weight_version": tag[0] if tag else "another"})
        return choice(lambda one: one.update(weight_versions=tag * len(one["token_ids"])))

    with troubled(url, pretend) as at:
        with pytest.raises(external.Mismatch) as result:
            next(steps_of(config_of(at, folder)))
        message = f"{at} says that it serves the weights {tag[0]!r}; the run published {tag[0]!r}"
        assert message in str(result.value) and "more than server.max_mismatch=0.05" in str(result.value)
        next(steps_of(config_of(at, folder, **{"server.max_mismatch": 100.0})))


@pytest.mark.slow
def test_a_run_publishes_to_vllm(url, folder, worker):
    seen = []
    with troubled(url, as_vllm(url, seen)) as at:
        steps = steps_of(config_of(at, folder, **{"server.reload": "vllm"}))
        gaps = [next(steps).learned.metrics["max/mismatch"] for _ in range(2)]
    assert max(gaps) < 2e-5 and seen == ["/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"] * 2


@pytest.mark.slow
def test_a_folder_that_no_server_reads_ends_the_run(url, folder):
    with asking(url, folder) as server:
        server.publish(weights(42))
    with troubled(url, lambda path, body: untagged(path)) as at, \
            pytest.raises(external.Mismatch, match="serves the weights None"):
        next(steps_of(config_of(at, folder, **{"server.reload": "folder"})))


def test_a_mismatch_that_is_no_number_is_left_to_the_learner(server):
    server.check({"mismatch/kl": float("nan")})
    server.check({})
    for gap in (0.06, -0.06):
        with pytest.raises(external.Mismatch, match="mismatch/kl is -?0.06 nats a token"):
            server.check({"mismatch/kl": gap})


def test_entropies_of_a_server_that_has_none_are_missing_from_the_page(url, folder, tmp_path):
    def vague(path, body):
        return choice(lambda one: [one.pop(name) for name in ("entropies", "weight_versions")]
                      ) if path == "/v1/completions" else None

    with troubled(url, vague) as at:
        run, params = setup.build(config_of(at, folder))
        forest = run.source.next(run.learner.publish(setup.initial_state(run, params))).forest
    assert np.isnan(forest.entropies[forest.logprobs < 0]).all() and (forest.logprobs < 0).any()
    pages.write_page(tmp_path, 1, run.source, forest, {})
    for row in (tmp_path / "samples/step_000001.jsonl").read_text().splitlines():
        assert "NaN" not in row and "logprobs" in json.loads(row) and "entropies" not in json.loads(row)


def test_a_server_that_holds_too_few_tokens_is_refused_before_the_first_step(tmp_path, folder):
    with serving(make_worker(slot_tokens=20), config=MODEL.config, weights_from=folder) as at, \
            pytest.raises(external.Refusal, match=r"may have 24 tokens, and .* holds 20; start it for 24"):
        next(steps_of(config_of(at, folder)))


@pytest.mark.parametrize(("changes", "reason"), (
    ({"server.weights": ""}, "config.server.weights to a folder that both see"),
    ({"server.url": "127.0.0.1:8000"}, "give an address such as http://127.0.0.1:8000"),
    ({"server.url": "http:///v1"}, "give an address such as"),
    ({"server.url": "http://127.0.0.1:abc"}, "server.url='http://127.0.0.1:abc'; give an address such as"),
    ({"server.url": "http://127.0.0.1:99999"}, "give an address such as"),
    ({"server.url": "http://127.0.0.1:0"}, "give an address such as"),
    ({"server.url": "http://[::1"}, "give an address such as"),
    ({"server.deadline": 0.0}, "server.deadline is 0.0"),
    ({"server.max_mismatch": -1.0}, "server.max_mismatch"),
    ({"method": "aepo_advantage"}, "needs an engine that measures the entropy of each draw, and 'server' does not")))
def test_impossible_settings_are_refused_before_any_request(changes, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        setup.build(config_of("http://127.0.0.1:1", tmp_path, **changes))
