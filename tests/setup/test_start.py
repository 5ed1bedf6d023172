"""A run that starts with the weights of another one: which weights, whose tokenizer, and what is refused."""
import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import chatter
import jax
import numpy as np
import peft
import pytest
import run_files
import torch
import transformers
from safetensors.torch import load_file

from jaxrl_llm import tokenizers
from jaxrl_llm.models import weights
from jaxrl_llm.models.lora import merge
from jaxrl_llm.runs import loop, trained
from jaxrl_llm.setup import setup, start
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.stored import stored_config
from jaxrl_llm.store.checkpoints import Checkpoints

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


def tiny(**changes):
    c = default_config()
    c.update_from_flattened_dict({
        "task": "arithmetic(level=digit, chat=True)", "rewards": "format(pattern='(?s).*[a-z].*')", "steps": 2,
        "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2, "model.mlp_size": 16,
        "model.chat_template": TEMPLATE, "prompts.per_step": 2, "sampling.group": 4, "sampling.max_tokens": 6,
        "optimizer.learning_rate": 3e-2, "optimizer.warmup_updates": 0, "eval.every": 1, "eval.problems": 2,
        "checkpoint.every": 1, "checkpoint.keep": 3, "checkpoint.best": "eval/score", **changes})
    return c


def started(path, **changes):
    """Configuration, tokenizer and parameters of a run that starts with `path`; its own sizes say nothing."""
    config = tiny(**{"model.path": str(path), "model.hidden_size": 8, "model.chat_template": "", **changes})
    run, params = setup.build(config)
    return run, jax.device_get(params)


def same(result, wanted):
    jax.tree.map(np.testing.assert_array_equal, result, jax.device_get(wanted))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of two steps with a checkpoint after each."""
    workdir = tmp_path_factory.mktemp("plain")
    loop.train(tiny(), workdir)
    return workdir


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of adapters."""
    workdir = tmp_path_factory.mktemp("adapted")
    loop.train(tiny(**{"lora.rank": 2, "checkpoint.best": "", "prompts.per_step": 4}), workdir)
    return workdir


def test_the_newest_weights_those_of_a_step_and_the_best(plain):
    run, params = started(plain)
    same(params, trained.trained(plain).params)
    assert run.source.stream.tokenizer.chat_templates and run.learner.policy.model.config.hidden_size == 16
    first, newest, best = (started(plain / name)[1] for name in ("checkpoints/1", "checkpoints/2", "best"))
    same(first, trained.trained(plain, 1).params)
    same(newest, params)
    same(best, trained.trained(plain, best=True).params)
    assert np.abs(first["embed"] - newest["embed"]).max() > 1e-4


@pytest.mark.parametrize("workdir", ["plain", "adapted"])
def test_the_weights_of_the_start_are_gone_before_those_of_a_checkpoint_come(workdir, request, monkeypatch):
    made, restore = [], Checkpoints.restore

    def build(*arguments):
        parts = build_policy(*arguments)
        made.extend(map(weakref.ref, jax.tree.leaves(parts[-1])))
        return parts

    def restored(self, target, *arguments, **options):
        assert made and not any(weight() is not None for weight in made)
        return restore(self, target, *arguments, **options)

    build_policy = setup.build_policy
    monkeypatch.setattr(setup, "build_policy", build)
    monkeypatch.setattr(Checkpoints, "restore", restored)
    assert trained.trained(request.getfixturevalue(workdir)).params["embed"].size


def test_another_task_is_scored_by_its_own_rewards(plain):
    assert trained.trained(plain).source.stream.partner.reward.names == ("format",)
    other = trained.trained(plain, task="arithmetic(level=digit, chat=True, reward=numeric)")
    assert other.source.stream.partner.reward.names == ("numeric",) and other.config.task.endswith("reward=numeric)")
    with pytest.raises(ValueError, match="environment 'chatter:letters' brings its own task and reward, .*leave --task out"):
        trained.with_task(chatter.get_config(), "arithmetic")


@pytest.mark.slow
def test_adapters_are_merged_in(adapted):
    result = trained.trained(adapted)
    run, params = started(adapted, **{"lora.rank": 3})
    for name, kernel in merge(result.params, result.lora)["layers"].items():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), params["layers"][name], kernel)
    assert np.abs(params["layers"]["q"]["kernel"] - np.asarray(result.params["layers"]["q"]["kernel"])).max() > 1e-5
    state = setup.initial_state(run, params)
    assert state.lora["q"]["a"].shape[-1] == 3 and not np.asarray(state.lora["q"]["b"]).any()  # new ones beside the sum


def test_adapters_of_a_run_whose_a_holds_the_scale_are_read_as_they_were(adapted, tmp_path):
    """Runs of version 1 multiplied the first A by alpha / rank; their weights are W + A B."""
    old = moved(adapted, tmp_path / "old")
    file = old / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 1}))
    new, result = trained.trained(adapted), trained.trained(old)
    assert (new.lora.scale, result.lora.scale) == (8.0, 1.0)  # 16 / 2
    same(result.lora["q"], new.lora["q"])
    kernel, a, b = (np.asarray(x[0], np.float64) for x in (result.params["layers"]["q"]["kernel"], *new.lora["q"].values()))
    wanted, update = kernel + a @ b, np.abs(a @ b).max()
    for params in (merge(result.params, result.lora), started(old)[1]):
        np.testing.assert_allclose(params["layers"]["q"]["kernel"][0], wanted, rtol=0, atol=1e-3 * update)


def test_a_run_of_a_run_is_trained_exported_and_started_again(plain, tmp_path):
    changes = {"model.path": str(plain), "model.chat_template": "", "steps": 1}
    loop.train(tiny(**changes), tmp_path / "second")
    first, second = run_files.saved(tmp_path / "second", tiny(**changes), 0), trained.trained(plain).params
    np.testing.assert_array_equal(first[".params['embed']"], second["embed"])
    assert first[".step"] == 0 and not first[".opt_state[0].count"]  # nothing but weights
    third, params = started(tmp_path / "second")
    same(params, trained.trained(tmp_path / "second").params)
    assert third.source.stream.tokenizer.chat_templates
    trained.export(tmp_path / "second", tmp_path / "exported")
    same(started(tmp_path / "exported")[1], params)
    assert stored_config(tmp_path / "second").model.path == str(plain)


def test_its_own_tokenizer_files_go_with_an_export(plain, tmp_path):
    trained.export(plain, tmp_path / "published")
    loop.train(tiny(**{"model.path": str(tmp_path / "published"), "steps": 1}), tmp_path / "run")
    m = tiny(**{"model.path": str(tmp_path / "run")}).model
    assert start.tokenizer_source(m) == tmp_path / "published"
    m.tokenizer = "bytes"
    assert start.tokenizer_source(m) is None


def test_what_is_no_start(plain, adapted, tmp_path):
    assert start.run_at("") is start.run_at(str(tmp_path)) is start.run_at(str(tmp_path / "best")) is None
    assert start.run_at(str(plain / "checkpoints" / "7")) == start.Start(plain, "checkpoints", 7)
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint of step 7 in .*available steps: \[0, 1, 2\]"):
        started(plain / "checkpoints" / "7")
    (tmp_path / "empty").mkdir()
    shutil.copy(plain / "config.json", tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no checkpoint directory"):
        started(tmp_path / "empty")
    with pytest.raises(ValueError, match="is the run of this workdir; continue it with --resume, or start a new run"):
        loop.train(tiny(**{"model.path": str(plain)}), plain, resume=True)
    (tmp_path / "published").mkdir()
    for text in ("{", '{"model_type": "llama"}'):
        (tmp_path / "published" / "config.json").write_text(text)
        assert start.run_at(str(tmp_path / "published")) is None
    loop.train(tiny(**{"model.path": str(plain), "lora.rank": 1, "steps": 1}), tmp_path / "second")
    with pytest.raises(ValueError, match="belongs to the weights of the run .*; export without --adapter"):
        trained.export(tmp_path / "second", tmp_path / "adapter", adapter=True)


def moved(workdir, to, **changes):
    """A copy of a run folder, with a configuration that fits other devices than those here."""
    shutil.copytree(workdir, to)
    stored = json.loads((to / "config.json").read_text())
    for key, value in changes.items():
        section, name = key.split(".")
        stored["config"][section][name] = value
    (to / "config.json").write_text(json.dumps(stored))
    return to


@pytest.mark.parametrize("axis", ["fsdp", "tensor", "seq"])
def test_a_run_of_eight_devices_is_read_on_one(plain, tmp_path, axis, capsys):
    workdir = moved(plain, tmp_path / "run", **{f"mesh.{axis}": 8, "learner.packed_rows": 8})
    same(trained.trained(workdir).params, trained.trained(plain).params)
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and f"{axis}=8" in shown.err and "does not fit the number of devices here" in shown.err


def test_an_export_has_the_chat_templates_and_the_ends_of_the_run(plain, tmp_path, capsys):
    trained.export(plain, tmp_path / "published")
    assert json.loads((tmp_path / "published" / "config.json").read_text())["eos_token_id"] == 258
    (tmp_path / "published" / "generation_config.json").write_text('{"eos_token_id": 258, "temperature": 0.6}')
    named = tmp_path / "published" / "additional_chat_templates" / "tool_use.jinja"
    named.parent.mkdir()
    named.write_text("[tools]" + TEMPLATE)
    other = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    for template, wanted in ((other, {"default": other}), ("", {"default": TEMPLATE, "tool_use": "[tools]" + TEMPLATE})):
        workdir, out = tmp_path / f"run{len(wanted)}", tmp_path / "exported"  # the second export replaces the first
        loop.train(tiny(**{"model.path": str(tmp_path / "published"), "model.chat_template": template, "steps": 1,
                           "sampling.stop_strings": ("z", "ab")}), workdir)
        assert trained.trained(workdir).source.stream.tokenizer.chat_templates == wanted
        trained.export(workdir, out)
        assert tokenizers.load(out).chat_templates == wanted
        ends = {name: json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json")}
        assert ends["config.json"]["eos_token_id"] == [258, 122]  # "z" is one token
        assert ends["generation_config.json"] == {"eos_token_id": [258, 122], "temperature": 0.6}
        assert "also end at the texts ['ab']" in capsys.readouterr().err


def test_an_adapter_alone_belongs_to_published_weights(plain, adapted, tmp_path):
    trained.export(plain, tmp_path / "published")
    changes = {"model.path": str(tmp_path / "published"), "lora.rank": 2}
    loop.train(tiny(steps=1, **changes), tmp_path / "run")
    trained.export(tmp_path / "run", tmp_path / "merged")
    trained.export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    merged, both, base = (jax.device_get(weights.load(tmp_path / name)[1]) for name in ("merged", "adapter", "published"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), merged, both)
    assert np.abs(merged["layers"]["q"]["kernel"] - base["layers"]["q"]["kernel"]).max() > 1e-4
    with pytest.raises(ValueError, match="belongs to new weights .model.path is empty.*; export without --adapter"):
        trained.export(adapted, tmp_path / "other", adapter=True)
    with pytest.raises(ValueError, match="the weights after its warm-up .warmup.steps=5.*; export without --adapter"):
        trained.check_adapter(tmp_path, tiny(**changes, **{"warmup.steps": 5}))
    with pytest.raises(ValueError, match="trained all weights .lora.rank=0.*; export without --adapter"):
        trained.export(plain, tmp_path / "other", adapter=True)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").touch()
    for path in (tmp_path / "gguf", tmp_path / "gguf" / "model.gguf"):
        with pytest.raises(ValueError, match="belongs to a GGUF file .*; export without --adapter"):
            trained.check_adapter(tmp_path, tiny(**changes | {"model.path": str(path)}))
    assert not (tmp_path / "other").exists()


def test_an_adapter_of_an_adapter_holds_both(plain, tmp_path):
    """PEFT and our merged export give one model; the first adapter needs no tokenizer, since its base has one."""
    trained.export(plain, tmp_path / "published")
    loop.train(tiny(**{"model.path": str(tmp_path / "published"), "lora.rank": 2, "steps": 1}), tmp_path / "run1")
    trained.export(tmp_path / "run1", tmp_path / "first", adapter=True)
    assert json.loads((tmp_path / "first" / "adapter_config.json").read_text())["lora_alpha"] == 16
    second = {"model.path": str(tmp_path / "first"), "lora.rank": 3, "lora.alpha": 6.0, "steps": 1}
    loop.train(tiny(**second), tmp_path / "run2")
    trained.export(tmp_path / "run2", tmp_path / "both", adapter=True)
    trained.export(tmp_path / "run2", tmp_path / "merged")
    assert json.loads((tmp_path / "both" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "published")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        both = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "both")(tokens).logits
        merged, base = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)(tokens).logits
                        for name in ("merged", "published"))
    np.testing.assert_allclose(both, merged, rtol=0, atol=1e-5)
    assert float((merged - base).abs().max()) > 1e-3
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (tmp_path / "published" / "tokenizer.json").read_bytes()


def test_an_export_has_the_precision_of_the_run_or_another(plain, tmp_path):
    half = moved(plain, tmp_path / "half", **{"model.dtype": "bfloat16"})
    wanted = jax.device_get(trained.trained(plain).params["embed"])
    for workdir, dtype, name in ((plain, "", "float32"), (half, "", "bfloat16"), (half, "float32", "float32"),
                                 (plain, "float16", "float16")):
        trained.export(workdir, tmp_path / "out", dtype=dtype)
        stored = load_file(tmp_path / "out" / "model.safetensors")
        assert {str(x.dtype) for x in stored.values()} == {f"torch.{name}"}
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == name
        np.testing.assert_array_equal(stored["model.embed_tokens.weight"].float(),
                                      torch.tensor(wanted).to(getattr(torch, name)).float())
    with pytest.raises(ValueError, match="Unknown dtype 'float8'.*Allowed: bfloat16, float16, float32"):
        trained.export(plain, tmp_path / "out", dtype="float8")
    with pytest.raises(ValueError, match="layers/q holds a weight beyond 65504, the largest number of float16"):
        trained.cast({"layers": {"q": jax.numpy.float32([1.0, 7e4])}}, np.float16)


@pytest.mark.slow
def test_on_a_mesh(plain, adapted, tmp_path):
    """With weights in pieces over four devices, in a process of its own; two runs have settings that do not fit four."""
    eight = moved(adapted, tmp_path / "eight", **{"mesh.fsdp": 8, "learner.micro_batches": 2})
    parts = moved(adapted, tmp_path / "parts", **{"learner.micro_batches": 4, "warmup.steps": 1, "warmup.batch": 3})
    others = {str(plain): 2, str(eight): 4, str(parts): 4}  # two prompts a step are sampled on two of the devices
    code = f"""
import sys
from pathlib import Path
import jax, numpy as np
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_start import started, tiny
from jaxrl_llm.runs import trained
from jaxrl_llm.sampling.heldout import sample_held_out
for path in {[str(plain), str(adapted)]}:
    run, params = started(path, **{{"mesh.fsdp": 2, "mesh.data": 2, "prompts.per_step": 4}})
    assert len(jax.devices()) == 4 == run.learner.mesh.size
    np.save(f"{tmp_path}/{{path.rpartition('/')[2]}}.npy", params["layers"]["q"]["kernel"])
trained.export(Path({str(adapted)!r}), Path({str(tmp_path / "exported")!r}))
for workdir, count in {others}.items():
    result = trained.trained(Path(workdir))
    assert result.source.stream.mesh.size == count, (workdir, result.source.stream.mesh)
    assert len(sample_held_out(result.source, result.params, result.lora, 2, jax.random.key(0)).ends) == 8
    trained.export(Path(workdir), Path({str(tmp_path)!r}) / f"model{{count}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in (plain, adapted):
        np.testing.assert_allclose(np.load(tmp_path / f"{folder.name}.npy"), started(folder)[1]["layers"]["q"]["kernel"],
                                   rtol=1e-6, atol=1e-7)
