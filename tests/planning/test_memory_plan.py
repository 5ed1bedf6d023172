"""Plans: published sizes, figures by hand, the compiler's own memory analysis, refusals whose advice works."""
import dataclasses
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import job
import psutil
import pytest

from jaxrl_llm.evaluation import flops
from jaxrl_llm.models.config import Experts, ModelConfig
from jaxrl_llm.parallel import mesh_sizes
from jaxrl_llm.planning import plan, plan_page
from jaxrl_llm.planning.presets import DEVICES, MODELS, Device, parse_devices
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.forecast import device_of, forecast, work_of

ROOT = Path(__file__).parents[2]
ONE = {"data": 1, "fsdp": 1, "tensor": 1}
SMALL = ModelConfig(vocab_size=1000, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=192)
WORK = plan.Work(prompts=8, group=4, prompt_tokens=16, completion_tokens=32)
PUBLISHED = {  # numbers of parameters, text models alone
    "smollm2_135m": 134_515_008, "smollm2_360m": 361_821_120, "smollm2_1.7b": 1_711_376_384, "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304, "qwen2.5_3b": 3_085_938_688, "qwen2.5_7b": 7_615_616_512, "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352, "qwen3_0.6b": 596_049_920, "qwen3_1.7b": 1_720_574_976, "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360, "qwen3_14b": 14_768_307_200, "qwen3_32b": 32_762_123_264, "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824, "llama3_8b": 8_030_261_248, "llama3_70b": 70_553_706_496, "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952, "gemma3_4b": 3_880_263_168, "gemma3_12b": 11_766_034_176, "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560, "qwen1.5_moe_a2.7b": 14_315_784_192, "mixtral_8x7b": 46_702_792_704,
    "olmoe_1b_7b": 6_919_161_856,
}
ACTIVE = {  # of them for each token, in units of 1e9 as their papers and model cards say it
    "qwen3_30b_a3b": 3.3, "qwen3_235b_a22b": 22, "qwen1.5_moe_a2.7b": 2.7, "mixtral_8x7b": 12.9, "olmoe_1b_7b": 1.3,
}


@pytest.mark.slow
def test_presets_have_the_published_numbers_of_parameters():
    assert MODELS.keys() == PUBLISHED.keys()
    for name, c in MODELS.items():
        norms = c.num_layers * c.hidden_size * (4 if c.post_norms else 2) + c.hidden_size
        heads = c.num_heads + c.num_kv_heads if c.qk_norm_whole else 2
        norms += c.num_layers * c.head_dim * heads * c.qk_norm
        bias = c.num_layers * c.head_dim * (c.num_heads + 2 * c.num_kv_heads) * c.qkv_bias
        tables = c.vocab_size * c.hidden_size * (0 if c.tie_embeddings else 1)
        experts = None if c.experts is None else c.experts.count
        assert flops.matmul_parameters(c, experts=experts) + tables + norms + bias == PUBLISHED[name], name
    for name in ("smollm2_135m", "gemma3_270m", *ACTIVE):
        assert plan.parameters(MODELS[name]) == PUBLISHED[name]
    assert plan.active_parameters(MODELS["smollm2_135m"]) == PUBLISHED["smollm2_135m"]
    for name, billions in ACTIVE.items():
        assert plan.active_parameters(MODELS[name]) / 1e9 == pytest.approx(billions, rel=0.02), name


MIXTURE = dataclasses.replace(SMALL, experts=Experts(8, 2, 48, shared_size=32))


def test_a_mixture_by_hand():
    """SMALL with a router, 8 experts of which a token is sent to 2, a shared one and its gate in every layer."""
    attention, one = 64 * 16 * (2 * 4 + 2 * 2), 3 * 64 * 48
    rest = 64 * 8 + 3 * 64 * 32 + 64
    assert plan.parameters(MIXTURE) == 64_000 + 2 * (attention + 8 * one + rest) + 320
    assert plan.active_parameters(MIXTURE) == 64_000 + 2 * (attention + 2 * one + rest) + 320
    assert flops.matmul_parameters(MIXTURE) == 64_000 + 2 * (attention + 2 * one + rest)
    # routers and shared gates are whole everywhere, as norms are
    assert plan.weights_per_device(MIXTURE, {"data": 2, "fsdp": 4, "tensor": 2}) == (
        64_000 + 2 * (attention + 8 * one + 3 * 64 * 32)) / 8 + 2 * (64 * 8 + 64) + 320
    tokens, update = 8 * (16 + 4 * 32), plan.update_memory(MIXTURE, WORK, ONE)
    # in the place of gate and up those of two experts and the shared one, and what two experts give before it is summed
    assert update["stored activations"] == 4 * tokens * 2 * (64 + 64 + 32 + 32 + 64 + 64 + 2 * (2 * 48 + 32) + 2 * 64)
    assert plan.adapter_weights(MIXTURE, 8) == 2 * 8 * (128 + 96 + 96 + 128)
    device = Device("x", 1e9, flops=1e18, bandwidth=1e6)
    few = dataclasses.replace(WORK, prompts=1, group=2)  # two rows are sent to four experts at most
    caches = plan.sampler_memory(MIXTURE, few, ONE)["caches"]
    read = 64_000 + 2 * (attention + 4 * one + rest)
    assert plan.ideal_seconds(MIXTURE, few, ONE, device)["decode"] == pytest.approx((4 * read + caches / 2) * 31 / 1e6)
    assert plan.sampler_memory(MIXTURE, few, ONE)["copy of the weights"] == 4 * 2 * (attention + 8 * one + rest)
    result = plan.estimate(MODELS["qwen3_30b_a3b"], WORK, ONE)
    page = plan_page.page("a3b", MODELS["qwen3_30b_a3b"], WORK, DEVICES["h100"], result)
    assert "a3b: 30,532,122,624 weights (3,353,032,704 of them for each token) on 1 x h100" in page


def test_slices_of_cores_and_of_chips():
    assert parse_devices("v5p-64") == (DEVICES["v5p"], 32)
    assert parse_devices("v4-8")[1] == 4
    assert parse_devices("v6e-8") == (DEVICES["v6e"], 8)
    assert parse_devices("v5litepod-16") == (DEVICES["v5e"], 16)
    assert parse_devices("h100-8") == (DEVICES["h100"], 8)
    assert parse_devices("a100-80") == (DEVICES["a100-80"], 1)
    assert parse_devices("a100-80-16") == parse_devices("a100-16") == (DEVICES["a100-80"], 16)
    for text, message in (("h10-8", "Did you mean 'h100'"), ("v5p-3", "multiple of 2"), ("h100-0", "multiple of 1")):
        with pytest.raises(ValueError, match=message):
            parse_devices(text)


def test_what_is_kept_by_hand():
    """SMALL: 64,000 embeddings, 98,304 matrix weights, 320 norm weights; all but the norms lie in pieces over fsdp x tensor."""
    assert plan.parameters(SMALL) == 162_624
    kept = plan.kept_memory(SMALL, dataclasses.replace(WORK, reference=True, critic=True), ONE)
    assert kept == {"weights": 650_496, "optimiser": 1_300_996, "reference": 650_496, "critic": 1_951_492}  # and counts
    assert plan.weights_per_device(SMALL, {"data": 2, "fsdp": 4, "tensor": 2}) == 162_304 / 8 + 320
    # 7 pieces divide neither table nor matrices: everything is whole
    assert plan.weights_per_device(SMALL, {"data": 1, "fsdp": 7, "tensor": 1}) == 162_624
    # a single axis is written as a string in the partition of a leaf
    odd = dataclasses.replace(SMALL, vocab_size=1001)
    assert plan.weights_per_device(odd, {"data": 1, "fsdp": 4, "tensor": 2}) == 98_304 / 8 + 64 * 1001 / 4 + 320
    adapted = plan.kept_memory(SMALL, dataclasses.replace(WORK, lora_rank=8), ONE)
    adapters = 2 * 8 * (128 + 96 + 96 + 128 + 3 * 256)  # per layer and rank: q, k, v, o and three matrices of the MLP
    assert plan.adapter_weights(SMALL, 8) == adapters
    assert adapted["weights"] == 4 * (162_624 + adapters) and adapted["optimiser"] == 8 * adapters + 4


def test_the_slot_engine_and_its_replicas_by_hand():
    """A token has 2 x 2 heads x 16 numbers of four bytes in each of two layers; rows of 48 places, and the prompts of 16."""
    slots, mesh = dataclasses.replace(WORK, slots=True), {"data": 1, "fsdp": 4, "tensor": 2}
    caches = plan.sampler_memory(SMALL, slots, mesh)["caches"]
    assert caches == 2 * 256 / 2 * (8 * 48 + 2 * 16)  # 2 of 8 prompts, half the heads
    alone = dataclasses.replace(slots, replica=1)
    assert plan.sampler_memory(SMALL, alone, mesh)["caches"] == 2 * 256 * (4 * 48 + 16)
    assert plan.sampler_memory(SMALL, alone, mesh)["gathered weights"] == 4 * 162_624
    own = 4 * (162_304 / 8 + 320)  # a device's pieces
    assert plan.publish_memory(SMALL, alone, mesh) == {"gathered weights": 4 * 162_624, "shards to send": own,
                                                       "largest leaf": 4 * 64_000}
    assert plan.publish_memory(SMALL, slots, mesh) == {"gathered weights": 4 * (162_304 / 2 + 320), "shards to send": own,
                                                       "largest leaf": 4 * 64_000 / 2}
    assert plan.publish_memory(SMALL, slots, {"data": 4, "fsdp": 1, "tensor": 2}) == {}
    tables = dataclasses.replace(SMALL, vocab_size=100_000)  # then sending them needs more than sampling
    result = plan.estimate(tables, dataclasses.replace(alone, prompts=8, group=1, completion_tokens=2), mesh)
    assert result.sampling == sum(result.kept.values()) + sum(result.publish.values()) > sum(
        [*result.kept.values(), *result.sampler.values()])
    assert not dataclasses.replace(slots, replica=3).fits_mesh(mesh) and slots.fits_mesh(mesh)
    few = dataclasses.replace(slots, sampling_parts=4, micro_batches=1)
    assert few.fits_mesh({"data": 8, "fsdp": 1, "tensor": 1})  # two prompts, sixteen rows


def test_activations_and_caches_by_hand():
    result = plan.update_memory(SMALL, WORK, ONE)
    tokens = 8 * (16 + 4 * 32)
    # per token and layer: the stream, q, k, v, the attention before and after its output matrix, gate and up
    assert result["stored activations"] == 4 * tokens * 2 * (64 + 64 + 32 + 32 + 64 + 64 + 192 + 192)
    assert plan.update_memory(SMALL, dataclasses.replace(WORK, remat=True), ONE)["stored activations"] == 4 * tokens * 2 * 64
    halved = plan.update_memory(SMALL, dataclasses.replace(WORK, micro_batches=2, dtype="bfloat16"), ONE)
    assert halved["stored activations"] == result["stored activations"] / 4
    assert halved["gradients"] == 2 * result["gradients"] == 2 * 4 * 162_624
    caches = plan.sampler_memory(SMALL, WORK, ONE)["caches"]
    assert caches == 8 * 2 * 2 * 2 * 16 * 4 * (4 * 31 + 2 * 16)  # P, layers, keys and values, heads, width, bytes, slots
    windows = dataclasses.replace(SMALL, window=10, local_layers=(True, False))
    near = 8 * 2 * 2 * 16 * 4 * (4 * 10 + 16 + 10 + 4 * 31 + 2 * 16)  # a layer keeps 10 of both, the prefill all of prompts
    assert plan.sampler_memory(windows, WORK, ONE)["caches"] == near < caches
    spread = {"data": 2, "fsdp": 2, "tensor": 2}
    assert plan.sampler_memory(SMALL, WORK, spread)["caches"] == caches / 8
    assert plan.sampler_memory(SMALL, WORK, spread)["copy of the weights"] == 4 * 98_304 / 2  # in pieces over tensor alone
    assert plan.sampler_memory(SMALL, WORK, spread)["gathered weights"] == 4 * (162_304 / 2 + 320)
    assert plan.sampler_memory(SMALL, WORK, {"data": 4, "fsdp": 1, "tensor": 2})["gathered weights"] == 0
    four = plan.sampler_memory(SMALL, WORK, {"data": 1, "fsdp": 1, "tensor": 4})  # two key/value heads: all is whole
    assert four["caches"] == caches and four["gathered weights"] == 4 * 162_624 and four["copy of the weights"] == 4 * 98_304


def test_operations_and_ideal_seconds_by_hand():
    device = Device("x", 1e9, flops=1e9, bandwidth=1e6)
    w = dataclasses.replace(WORK, epochs=2, passes=1)
    result = plan.step_flops(SMALL, w)
    assert result["prefill"] == 8 * flops.prefill_flops(SMALL, [16])
    assert result["decode"] == 8 * 4 * flops.decode_flops(SMALL, 16, 32)
    assert result["record"] * 6 == result["update"] == 2 * 8 * 3 * flops.packed_flops(SMALL, 16, [32] * 4)
    seconds = plan.ideal_seconds(SMALL, w, ONE, device)
    assert seconds["update"] == result["update"] / 1e9
    caches = plan.sampler_memory(SMALL, w, ONE)["caches"]
    assert seconds["decode"] == pytest.approx((4 * (98_304 + 64_000) + caches / 2) * 31 / 1e6)  # memory is what limits it here
    assert plan.ideal_seconds(SMALL, w, ONE, dataclasses.replace(device, bandwidth=1e12))["decode"] == result["decode"] / 1e9
    two = {"data": 2, "fsdp": 1, "tensor": 1}
    assert plan.ideal_seconds(SMALL, w, two, device)["update"] == seconds["update"] / 2


def test_a_configuration_as_work():
    c = default_config()
    c.prompts.per_step, c.sampling.group, c.sampling.max_tokens, c.learner.epochs, c.learner.minibatches = 16, 4, 32, 1, 2
    c.model.remat, c.critic.kind = True, "head"
    w = work_of(c, 20, {"ref_logprobs"}, critic=True)
    assert (w.prompts, w.group, w.prompt_tokens, w.completion_tokens, w.learned_at_once) == (16, 4, 20, 32, 8)
    assert w.remat and w.reference and not w.critic and w.passes == 2
    c.lora.rank, c.learner.minibatches, c.learner.offload = 8, 1, "optimizer, reference"
    assert work_of(c, 20, set(), critic=False).offload == ("optimizer", "reference") and w.offload == ()
    assert not work_of(c, 20, {"ref_logprobs"}, critic=False).reference


def test_meshes_divide_devices_batch_and_heads():
    result = list(plan.meshes(SMALL, WORK, 8))
    assert result[0] == {"data": 8, "fsdp": 1, "tensor": 1} and {"data": 2, "fsdp": 2, "tensor": 2} in result
    assert {m["tensor"] for m in result} == {1, 2}  # two key/value heads
    assert all(m["data"] * m["fsdp"] * m["tensor"] == 8 for m in result) and len(result) == 4 + 3
    assert [m["tensor"] for m in plan.meshes(SMALL, WORK, 16)] == [2] * 4  # 8 prompts are no 16 shards
    assert not list(plan.meshes(SMALL, WORK, 24))
    assert mesh_sizes(12, fsdp=3, tensor=2) == {"data": 2, "fsdp": 3, "tensor": 2}


def test_a_plan_that_cannot_fit_is_refused_and_its_advice_works():
    c, device = MODELS["qwen3_0.6b"], DEVICES["h100"]
    w = plan.Work(64, 8, 512, 1024, dtype="bfloat16")
    def refusal(c, w, device):
        result = plan.placed(c, w, device, 1)
        assert result.answer(device) == "no" and result.margin(device) < plan.MARGIN
        return plan.refusal(c, w, device, 1, result)
    message = refusal(c, w, device)
    assert re.search(r"needs .* GB on each of 1 devices .* h100 has 80, 90% .* mostly stored", message)
    assert "It fits (" in message and "learner.micro_batches=" in message
    parts = int(message.split("learner.micro_batches=")[1].split()[0])
    samples = int(message.split("sampling.micro_batches=")[1].split()[0]) if "sampling.micro_batches=" in message else 1
    assert plan.placed(c, dataclasses.replace(w, micro_batches=parts, sampling_parts=samples), device, 1).fits(device)
    small = dataclasses.replace(device, memory=0.2e9)
    assert re.search("No mesh of up to 64 times as many devices helps.*lora.rank=16", refusal(c, w, small))
    assert re.search("It would fit on [0-9]+ devices", refusal(
        MODELS["qwen3_8b"], dataclasses.replace(w, prompts=256), dataclasses.replace(device, memory=48e9)))
    with pytest.raises(ValueError, match=r"prompts.per_step=64 .* do not divide over data x fsdp of 1024 devices"):
        plan.placed(c, w, device, 1024)
    with pytest.raises(ValueError, match=r"do not divide over data x fsdp of mesh.data=48"):
        plan.placed(c, w, device, 48, mesh_sizes(48))


def test_little_room_is_tight_where_devices_have_run_and_no_where_none_has():
    result = plan.estimate(SMALL, WORK, ONE)
    for share, measured, wanted in ((0.84, False, "fits"), (0.86, True, "tight"), (0.86, False, "no"), (1.01, True, "no")):
        device = Device("new", result.peak / share / plan.USABLE, 1e12, 1e12, measured=measured)
        assert result.answer(device) == wanted and result.margin(device) == pytest.approx(1 - share)
        assert result.fits(device) == (wanted != "no")
        room = f"{1 - share:.1%} of the usable memory is left" if share < 1 else "1.0 times the usable memory is needed"
        assert f"{wanted}: {room}" in plan_page.page("small", SMALL, WORK, device, result)
    new = Device("new", result.peak / 0.86 / plan.USABLE, 1e12, 1e12)
    assert "The 14% that are left are less than the 15% that an estimate needs which no new has" in plan.refusal(
        SMALL, WORK, new, 1, result)


def test_remedies_continue_where_updates_and_sampling_need_nearly_the_same():
    """Neither alone makes the peak much smaller, and a last part that makes it fit may save less than the others."""
    w = dataclasses.replace(WORK, prompts=64, group=8, prompt_tokens=512, completion_tokens=1024, dtype="bfloat16",
                            lora_rank=32)
    for name, work, machine, count in (("qwen3_4b", w, "h100", 1), ("qwen2.5_7b", dataclasses.replace(
            w, prompt_tokens=384, completion_tokens=512), "v5e", 8)):
        changes, _, result = plan.remedies(MODELS[name], work, DEVICES[machine], count)
        assert result is not None and result.fits(DEVICES[machine]) and changes["sampling.micro_batches"] > 1, name


def test_remedies_change_nothing_that_fits_and_cut_what_is_too_large():
    w = plan.Work(8, 4, 64, 64)
    changes, same, result = plan.remedies(SMALL, w, DEVICES["v5e"], 4)
    assert changes == {} and same == w and result.mesh == {"data": 4, "fsdp": 1, "tensor": 1}
    less = dataclasses.replace(DEVICES["v5e"], memory=result.updating * 0.8)
    changes, changed, result = plan.remedies(SMALL, w, less, 4)
    assert changes and result.fits(less) and changed != w
    page = plan_page.page("small", SMALL, changed, less, result)
    assert "together" in page and f"{162_624:,} weights on 4 x v5e" in page
    lines = plan_page.table({"small": (SMALL, w)}, {"v5e-4": (less, 4), "none": (dataclasses.replace(less, memory=1.0), 4)})
    assert [line.count("|") for line in lines.splitlines()] == [10] * 4
    assert "learner.micro_batches=" in lines and lines.splitlines()[3].count("| no |") == 1


def test_the_device_at_hand_has_its_memory():
    device = device_of(jax.devices()[0])
    assert 1e8 < device.memory < 1e13 and device.flops != device.flops  # there is no published peak of a CPU


def small():
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 4, 2, 4
    return c


def test_a_run_prints_its_memory_and_warns_on_a_cpu_that_is_too_small(monkeypatch):
    run, _ = setup.build(small())
    rows = dict(forecast(run))
    w = work_of(run.config, run.source.stream.prompt_tokens, run.needs, critic=False)
    architecture = run.learner.policy.model.config
    result = plan.estimate(architecture, w, run.learner.mesh.shape)
    assert rows["memory per device, estimated"].startswith(f"{result.updating / 1e9:.2f} GB updating, ")
    assert rows["operations per step"] == f"{sum(plan.step_flops(architecture, w).values()) / 1e12:.3g} TFLOP"
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=100_000))
    with pytest.warns(RuntimeWarning, match="an update needs 0.0 GB on each of"):
        forecast(run)


@pytest.mark.parametrize("memory, refused", ((0.9, False), (0.7, True)))
def test_an_accelerator_that_is_certainly_too_small_is_refused(monkeypatch, memory, refused):
    """Of a device with this share of what is estimated; the estimate may be 25% off."""
    run, _ = setup.build(small())
    w = work_of(run.config, run.source.stream.prompt_tokens, run.needs, critic=False)
    peak = plan.estimate(run.learner.policy.model.config, w, run.learner.mesh.shape).peak
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB",
                                   memory_stats=lambda: {"bytes_limit": peak * memory})
    mesh = types.SimpleNamespace(local_devices=[device], shape=run.learner.mesh.shape, size=1)
    run = dataclasses.replace(run, learner=dataclasses.replace(run.learner, mesh=mesh))
    message = "an update needs"
    with pytest.raises(ValueError, match=message) if refused else pytest.warns(RuntimeWarning, match=message):
        forecast(run)


def test_what_waits_on_the_host_is_not_on_the_devices():
    c, w = MODELS["smollm2_135m"], dataclasses.replace(WORK, reference=True)
    plain = plan.estimate(c, w, ONE)
    moments, weights = 8 * plan.parameters(c) + 4, 4 * plan.parameters(c)
    for names, sampling, updating in ((("optimizer",), moments, 0), (("reference",), weights, weights),
                                      (("optimizer", "reference"), moments + weights, weights)):
        result = plan.estimate(c, dataclasses.replace(w, offload=names), ONE)
        assert plain.sampling - result.sampling == sampling and plain.updating - result.updating == updating
    with_critic = [plan.estimate(c, dataclasses.replace(w, critic=True, offload=names), ONE) for names in ((), ("optimizer",))]
    assert with_critic[0].updating == with_critic[1].updating
    assert with_critic[0].sampling - with_critic[1].sampling == 2 * moments


@pytest.mark.slow
def test_memory_is_what_the_compiler_says():
    """Updates and samplers compiled, not run: tiny ones, SmolLM2, and meshes of eight devices."""
    printed = job.lines_of("plan_cases.py", 8)
    cases = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(cases) == 8
    for case in cases:
        for what, bytes_measured in case["measured"].items():
            tolerance = 0.02 if what == "given" else 0.25  # given: the batch as well
            assert case["planned"][what] == pytest.approx(bytes_measured, rel=tolerance), (case["case"], what)


@pytest.mark.slow
def test_the_command_refuses_what_does_not_fit():
    options = ("--model=llama3_8b", "--devices=v5e-4", "--mesh=fsdp=2, tensor=2", "--config.method=dr_grpo")
    done = subprocess.run([sys.executable, "experiments/plan.py", *options], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and not done.stderr and "no: 42.3 times the usable memory is needed" in done.stdout
    assert "an update needs" in done.stdout
    assert "each of 4 devices (mesh.data=1 mesh.fsdp=2 mesh.tensor=2), of which v5e has 16" in done.stdout


@pytest.mark.slow
def test_a_mesh_is_given_by_its_flag_or_by_the_configuration():
    def planned(*options):
        command = (sys.executable, "experiments/plan.py", "--model=llama3_8b", "--devices=v5e-4", *options)
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    by_flag, by_config = planned("--mesh=fsdp=2, tensor=2"), planned("--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    assert "(mesh.data=1 mesh.fsdp=2 mesh.tensor=2)" in by_flag.stdout and by_config.stdout == by_flag.stdout
    both = planned("--mesh=fsdp=4", "--config.mesh.tensor=2")
    assert both.returncode == 1 and not both.stdout
    assert '--mesh="fsdp=4" is given, and the configuration sets mesh.tensor=2; leave one out' in both.stderr


def test_packed_rows_of_one_trajectory_are_planned_as_such():
    """Qwen3-8B with groups of 8 completions of 32k tokens: a prompt with its group does not fit, one trajectory does."""
    c, device = MODELS["qwen3_8b"], DEVICES["h100"]
    config = default_config()
    config.prompts.per_step, config.sampling.group, config.sampling.max_tokens = 64, 8, 32_768
    config.model.dtype, config.model.remat, config.learner.minibatches, config.learner.epochs = "bfloat16", True, 1, 1
    config.learner.micro_batches, mesh = 8, mesh_sizes(8, fsdp=8, data=1)
    plain = plan.estimate(c, work_of(config, 512, set(), critic=False), mesh)
    assert plain.updating > device.memory
    config.learner.micro_batches, config.learner.packed_rows = 1, 8
    w = work_of(config, 512, set(), critic=False)
    result = plan.estimate(c, w, mesh)
    assert (w.rows, w.row_tokens) == (8, 512 + 32_768) and result.updating < plan.USABLE * device.memory
    assert result.update["stored activations"] == 33_280 * c.num_layers * 2 * c.hidden_size  # one row on each device
    assert 7.8 < plain.update["stored activations"] / result.update["stored activations"] < 8
    assert not w.fits_mesh(mesh_sizes(16, data=16)) and w.fits_mesh(mesh)
    assert "8 packed rows of 33280 tokens at a time" in plan_page.page("qwen3_8b", c, w, device, result)
    many = dataclasses.replace(WORK, rows=64, row_tokens=48)
    tight = dataclasses.replace(device, memory=plan.estimate(SMALL, many, ONE).updating * 0.8)
    changes, changed, result = plan.remedies(SMALL, many, tight, 1)
    assert changed.rows < 64 and changes == {"learner.packed_rows": changed.rows} and result.fits(tight)


def test_rows_that_are_cut_are_planned_in_pieces():
    """Qwen3-8B with groups of 8 completions of 32k tokens: four rows on eight devices are eight halves."""
    c = MODELS["qwen3_8b"]
    w = plan.Work(64, 8, 512, 32_768, dtype="bfloat16", remat=True, rows=8, row_tokens=33_280)
    whole, half = mesh_sizes(8, data=1, fsdp=8), mesh_sizes(8, data=1, fsdp=4, seq=2)
    assert w.fits_mesh(half) and not dataclasses.replace(w, row_tokens=33_281).fits_mesh(half)
    assert not dataclasses.replace(w, rows=0).fits_mesh(half)
    fewer = dataclasses.replace(w, rows=4)
    assert not fewer.fits_mesh(whole) and fewer.fits_mesh(half)
    one, other = plan.estimate(c, w, whole), plan.estimate(c, fewer, half)
    assert other.kept == one.kept and other.sampler == one.sampler  # as over fsdp
    assert other.update["stored activations"] == one.update["stored activations"] / 2
    assert other.update["gathered rows"] == 33_280 * 4 * c.hidden_size and other.updating < one.updating
    assert plan.named(half) == "mesh.data=1 mesh.fsdp=4 mesh.tensor=1 mesh.seq=2" and "seq" not in plan.named(whole)
    assert half in list(plan.meshes(c, fewer, 8)) and not any("seq" in mesh for mesh in plan.meshes(c, WORK, 8))


LONG = plan.Work(64, 8, 512, 32_768, dtype="bfloat16", remat=True, rows=4, row_tokens=33_280, sampling_parts=16)


@pytest.mark.parametrize("machine", ("h100-8", "v5p-16"))
def test_contexts_of_32k_tokens_fit_with_the_margin(machine):
    """Qwen3-8B with groups of 8 completions of 32k tokens, in half a row for each of eight devices."""
    c, w, (device, count) = MODELS["qwen3_8b"], LONG, parse_devices(machine)
    result = plan.placed(c, w, device, count, mesh_sizes(count, data=1, fsdp=4, tensor=2))
    assert result.answer(device) == "fits" and result.margin(device) > 0.3
    assert plan.best(c, w, device, count).answer(device) == "fits"


def test_the_plan_of_32k_tokens_agrees_with_the_compiler_of_tpus():
    """The same update: the compiler's bytes per device, of two and of four layers, as `plan.py --compiled` printed them."""
    c, (device, count) = MODELS["qwen3_8b"], parse_devices("v5p-16")
    sizes = mesh_sizes(count, data=1, fsdp=4, tensor=2)
    result, state = plan.placed(c, LONG, device, count, sizes), plan.state_memory(c, LONG.optimizer, sizes)
    two, four = 1.66e9 + 4.51e9, 2.05e9 + 5.42e9  # arguments and temporaries
    compiled = two + (c.num_layers - 2) * (four - two) / 2 + state
    assert compiled == pytest.approx(36.5e9, rel=0.01) and result.updating == pytest.approx(compiled, rel=0.15)
    text = " ".join((ROOT / "docs/scaling.md").read_text().split())
    assert f"update needs {result.updating / 1e9:.1f} GB per device" in text and "36.5 GB per device for this update" in text
