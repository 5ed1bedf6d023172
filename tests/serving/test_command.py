"""The command `jaxrl_llm serve` as a process, with the checkpoint of a run, and what it serves."""
import importlib.util
import os
import signal

import jax
import openai
import pytest

from jaxrl_llm.engines import Sampling
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.experiments import serve
from jaxrl_llm.models import ModelConfig, Transformer, weights
from jaxrl_llm.runs import loop
from jaxrl_llm.serving import policy
from jaxrl_llm.setup.config import default_config


def greedy(loaded, prompt, limit):
    engine = SlotEngine(loaded.model, loaded.params, jax.random.key(0), slots=1, slot_tokens=64)
    engine.submit(Request(0, limit, prompt, sampling=Sampling(0.0), stop_tokens=loaded.tokenizer.stop_ids))
    return engine.collect()[0].tokens.tolist()


@pytest.mark.slow
def test_a_checkpoint_of_a_run_is_served(tmp_path, command):
    c = default_config()
    c.task, c.rewards = "arithmetic(level=digit)", "format(pattern='(?s).*[a-z].*')"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens, c.lora.rank = 1, 4, 4, 6, 2
    c.eval.problems, c.samples_every, c.optimizer.learning_rate = 4, 0, 0.03
    loop.train(c, tmp_path / "run")
    loaded = policy.of_run(tmp_path / "run")
    assert loaded.tag == "run-step-1"
    ids, first = [257, *b"1+1"], policy.of_run(tmp_path / "run", 0)
    two = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=2"])
    line, process = command("--workdir=run", "--slots=2", "--slot_tokens=64", "--mesh=data=2", JAXRL_LLM_TOKEN="key",
                            XLA_FLAGS=two)
    assert line.startswith("run (run-step-1) at http://127.0.0.1:") and "2 slots of 64 tokens, with a token" in line
    with openai.OpenAI(base_url=line.split()[3].rstrip(","), api_key="key") as client:
        answer = client.completions.create(model="run", prompt=ids, temperature=0, max_tokens=20,
                                           extra_body={"return_token_ids": True})
    assert answer.metadata == {"weight_version": "run-step-1"}
    assert answer.choices[0].token_ids == greedy(loaded, ids, 20)
    differ = jax.tree.map(lambda x, y: bool((x != y).any()), loaded.params["layers"], first.params["layers"])
    assert any(jax.tree.leaves(differ))  # the adapters are merged in
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM) and "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_tinkers_client_trains_what_is_served(tmp_path, command):
    tinker = pytest.importorskip("tinker")
    c = ModelConfig(vocab_size=259, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=16)
    weights.save_hf(tmp_path / "tiny", c, jax.device_get(Transformer(c).init(jax.random.key(0))))
    arguments = ("--tinker", "--model=tiny", "--tokenizer=bytes", "--slots=2", "--slot_tokens=32", "--checkpoints=saved")
    line, process = command(*arguments, JAXRL_LLM_TOKEN="tml-key")
    assert line.startswith("tiny (tiny) at http://127.0.0.1:") and "2 slots of 32 tokens, with a token" in line
    with tinker.ServiceClient(base_url=line.split()[3].rstrip(","), api_key="tml-key") as client:
        model = client.create_lora_training_client("tiny", rank=2).result(60)
        path = model.save_state("first").result(60).path
        if importlib.util.find_spec("transformers"):
            assert model.get_tokenizer().encode("1+1=", add_special_tokens=False) == [*b"1+1="]
    assert path.endswith("/weights/first") and len(list((tmp_path / "saved").rglob("first.safetensors"))) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM) and "Traceback" not in process.stderr.read()
    for more, reason in (({"JAXRL_LLM_TOKEN": "key"}, "begin with 'tml-'"), ({}, "--weights_from goes with OpenAI's format")):
        line, process = command(*arguments, *([] if more else ["--weights_from=x"]), **more)
        assert not line and process.wait(60) == 1 and reason in process.stderr.read()


@pytest.mark.slow
def test_what_cannot_be_served_is_refused(command):
    for arguments, reason in (((), "give one of --model"), (("--model=nowhere",), "nowhere does not exist"),
                              (("--model=a", "--host=0.0.0.0"), "JAXRL_LLM_TOKEN"),
                              (("--model=a", "--step=3"), "--step=3 goes with --workdir"),
                              (("--workdir=a", "--dtype=float32"), "--tokenizer, --dtype and --int8_cache go with --model"),
                              (("--workdir=a", "--int8_cache"), "--tokenizer, --dtype and --int8_cache go with --model")):
        line, process = command(*arguments)
        assert not line and process.wait(60) == 1
        errors = process.stderr.read()
        assert reason in errors and "Traceback" not in errors


@pytest.mark.parametrize("host, local", [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
                                         ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)])
def test_others_than_this_machine_need_a_token(host, local):
    serve.check_token(host, "token")
    if local:
        serve.check_token(host, "")
    else:
        with pytest.raises(ValueError, match="JAXRL_LLM_TOKEN"):
            serve.check_token(host, "")


def test_meshes_are_named_by_their_axes():
    assert serve.mesh_of("") is None and serve.mesh_of("tensor=1").size == serve.mesh_of("data = -1").size == 1
    for text in ("4", "data=two", "data=1,data=1", "fsdp=2"):
        with pytest.raises(ValueError, match="give sizes of data and tensor, such as 'data=2,tensor=4'"):
            serve.mesh_of(text)
    with pytest.raises(ValueError, match="mesh data=1 x fsdp=1 x tensor=8 does not fit 1 devices"):
        serve.mesh_of("tensor=8")


def test_a_slot_holds_what_the_model_was_made_for(tmp_path):
    c = ModelConfig(vocab_size=259, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=16,
                    max_positions=300)
    model = Transformer(c)
    assert policy.slot_tokens_of(model, 0) == 300 and policy.slot_tokens_of(model, 40) == 40
    with pytest.raises(ValueError, match="made for 300"):
        policy.slot_tokens_of(model, 301)
    weights.save_hf(tmp_path, c, jax.device_get(model.init(jax.random.key(0))))
    loaded = policy.of_checkpoint(str(tmp_path), "bytes")
    assert loaded.model.config == c and loaded.tag == tmp_path.name
    assert not loaded.model.int8_cache and policy.of_checkpoint(str(tmp_path), "bytes", int8_cache=True).model.int8_cache
    with pytest.raises(ValueError, match="Unknown dtype 'float16'"):
        policy.of_checkpoint(str(tmp_path), "bytes", "float16")
