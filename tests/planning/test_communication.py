"""Bytes that compiled programs send, read from their text; the least that a mesh asks for, by hand and against the compiler."""
import dataclasses
import json
import subprocess
import sys

import job
import pytest

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import communication, plan
from jaxrl_llm.planning.communication import by_kind, collectives

# Weights of a layer: q and o 64 x 64, k and v 64 x 32, three of 64 x 192, two norms of 64.
SMALL = ModelConfig(vocab_size=1000, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=192)
MATRICES, NORMS, TABLE, D, L = 2 * 49_152, 2 * 128 + 64, 64_000, 64, 2
WORK = plan.Work(prompts=8, group=4, prompt_tokens=16, completion_tokens=32)

FLAT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=8

FileNames
1 "/somewhere/model.py"

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %g = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
  %s = f32[1,8]{1,0} reduce-scatter(%p), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %r = (f32[4,8]{1,0}, /*index=1*/f32[]{:T(128)}) all-reduce(%p, %c), replica_groups=[4,2]<=[2,2,2]T(0,2,1), to_apply=%add
  %e = f32[2]{0} all-reduce(%q), replica_groups={}, to_apply=%add
  %m = f32[10]{0} all-reduce(%q), replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}, to_apply=%add
  %n = f32[10]{0} all-reduce(%q), replica_groups=mesh['a'=4,'b'=2] {'a':(2)2,'b'}, to_apply=%add
  %t = (pred[1,8]{1,0}, pred[1,8]{1,0}) all-to-all(%x, %y), replica_groups={{0,1},{2,3}}
  %cp = s4[6]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
  %stay = f32[6]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}
  %gs = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="later"}
  %gd = f32[16]{0:T(256)} all-gather-done((f32[4]{0:T(256)}, f32[16]{0}) %gs), metadata={op_name="later"}
  %ps = (f32[4]{0}, f32[4]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), source_target_pairs={{0,1},{1,2}}
  ROOT %pd = f32[4]{0} collective-permute-done(%ps)
}
"""

LOOPS = """HloModule jit_f, num_partitions=2

%below.1 (c: (s32[], f32[5])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %c = (s32[], f32[5]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %three), direction=LT
}

%ever (c: (s32[], f32[5])) -> pred[] {
  %c2 = (s32[], f32[5]) parameter(0)
  %all = f32[1] all-reduce(%x), replica_groups=[1,2]<=[2], to_apply=%add
  ROOT %alive = pred[] get-tuple-element(%c2), index=1
}

%wrapped (q: f32[5]) -> f32[10] {
  ROOT %one = f32[10] all-gather(%q), replica_groups=[1,2]<=[2], dimensions={0}, metadata={op_name="jit(f)/inner" stack=3}
}

%inner.body (c: (s32[], f32[5])) -> (s32[], f32[5]) {
  %f = f32[10] fusion(%q), kind=kCustom, calls=%wrapped
  ROOT %out = (s32[], f32[5]) tuple(%i, %q)
}

%outer.body (c: (s32[], f32[5])) -> (s32[], f32[5]) {
  %w = (s32[], f32[5]) while(%init), condition=%below.1, body=%inner.body
  %r = f32[5] all-reduce(%q), replica_groups=[1,2]<=[2], to_apply=%add
  ROOT %out = (s32[], f32[5]) tuple(%i, %r)
}

%little (p: f32[5]) -> f32[5] {
  ROOT %r = f32[5] all-reduce(%p), replica_groups=[1,2]<=[2], to_apply=%add
}

%much (p: f32[50]) -> f32[50] {
  ROOT %r = f32[50] all-reduce(%p), replica_groups=[1,2]<=[2], to_apply=%add
}

%async (p: f32[7]) -> f32[7] {
  ROOT %r = f32[7] all-to-all(%p), replica_groups={{0,1}}
}

ENTRY %main (p: f32[5]) -> f32[5] {
  %w = (s32[], f32[5]) while(%t), condition=%ever, body=%outer.body, backend_config={"known_trip_count":{"n":"7"},"x":"9"}
  %k = f32[50] conditional(%c, %a, %b), branch_computations={%little, %much}
  %s = ((f32[7]), f32[7]) async-start(%p), calls=%async
  ROOT %d = f32[7] async-done(%s), calls=%async
}
"""


def test_every_collective_and_every_way_to_write_who_takes_part():
    result = collectives(FLAT)
    assert [(c.kind, c.size, c.group) for c in result] == [
        ("all-gather", 256, 4), ("reduce-scatter", 32, 4), ("all-reduce", 132, 2), ("all-reduce", 8, 8), ("all-reduce", 40, 4),
        ("all-reduce", 40, 4), ("all-to-all", 16, 2), ("collective-permute", 3, 2), ("collective-permute", 24, 1),
        ("all-gather", 64, 4), ("collective-permute", 16, 2)]
    assert [c.sent for c in result] == [192, 96, 132, 14, 60, 60, 8, 3, 0, 48, 16]
    assert by_kind(result) == {"all-gather": 240, "reduce-scatter": 96, "all-reduce": 266, "all-to-all": 8,
                               "collective-permute": 19}
    assert result[9].source == "later" and result[0].source == ""


def test_loops_multiply_and_one_branch_is_taken():
    result = collectives(LOOPS)
    assert [(c.kind, c.times, c.sent) for c in result] == [
        ("all-gather", 21, 21 * 20), ("all-reduce", 7, 7 * 20), ("all-reduce", 7, 7 * 4), ("all-reduce", 1, 200),
        ("all-to-all", 1, 14)]
    assert result[0].source == "jit(f)/inner"


def test_loops_that_data_ends_must_be_given_a_number():
    program = LOOPS.replace('"known_trip_count":{"n":"7"},', "")
    with pytest.raises(ValueError, match="the trip count of the loop w depends on data; give it as unknown_trips"):
        collectives(program)
    assert by_kind(collectives(program, unknown_trips=2))["all-gather"] == 2 * 3 * 20
    for other in ("direction=NE", "direction=GT"):
        with pytest.raises(ValueError, match="depends on data"):
            collectives(LOOPS.replace("direction=LT", other))
    quiet = program.replace("all-reduce(%x), replica_groups=[1,2]<=[2], to_apply=%add", "negate(%x)")
    assert len(collectives(quiet.replace("body=%outer.body", "body=%below.1"))) == 2  # a loop that sends nothing may be endless
    with pytest.raises(ValueError, match="no ENTRY computation; give compiled.as_text"):
        collectives("module @jit_f attributes {mhlo.num_partitions = 8 : i32} {")


def sizes(data, fsdp, tensor):
    return {"data": data, "fsdp": fsdp, "tensor": tensor}


def test_one_device_sends_nothing():
    least = communication.minimum(SMALL, WORK, sizes(1, 1, 1))
    assert set(least) == {"update", "rollout"} and not any(size for phase in least.values() for size in phase.values())


def test_data_alone_sums_gradients_once_however_many_parts():
    """2 x 7/8 of all gradients: float32 for tables and norms, the compute dtype for matrices."""
    for work in (WORK, dataclasses.replace(WORK, micro_batches=4)):
        least = communication.update_minimum(SMALL, work, sizes(8, 1, 1))
        assert least.pop("gradients over data") == 1.75 * 4 * (MATRICES + NORMS + TABLE)
        assert not any(least.values())
    half = dataclasses.replace(WORK, dtype="bfloat16")
    assert communication.update_minimum(SMALL, half, sizes(8, 1, 1))["gradients over data"] == 1.75 * (
        2 * MATRICES + 4 * (NORMS + TABLE))
    assert not any(communication.rollout_minimum(SMALL, WORK, sizes(8, 1, 1)).values())


def test_fsdp_gathers_twice_and_scatters_once_for_each_micro_batch():
    work = dataclasses.replace(WORK, micro_batches=2, dtype="bfloat16")
    least = communication.update_minimum(SMALL, work, sizes(2, 4, 1))
    assert least["weights gathered"] == 2 * 2 * 0.75 * 2 * MATRICES
    assert least["gradients scattered"] == 2 * 0.75 * 2 * MATRICES
    # pieces over data; norms, which are whole everywhere, over all eight
    assert least["gradients over data"] == 2 * 0.5 * (2 * MATRICES + 4 * TABLE) / 4 + 1.75 * 4 * NORMS
    assert least["activations over tensor"] == least["statistics of logits"] == 0
    assert communication.rollout_minimum(SMALL, work, sizes(2, 4, 1)) == {
        "weights gathered": 0.75 * 2 * (MATRICES + TABLE), "prefill": 0, "decode": 0, "statistics of logits": 0}


def test_tables_travel_or_their_tokens_do():
    """Half a prompt on a device: 8 + 64 tokens; gathered tables are cheap only for many more."""
    work, mesh = dataclasses.replace(WORK, prompts=4), sizes(1, 8, 1)
    least = communication.update_minimum(SMALL, work, mesh)
    assert least["tables over fsdp"] == 2 * 7 * (72 + 64) * D * 4
    many = dataclasses.replace(work, prompts=256)
    gathered, scattered = 7 / 8 * 4 * TABLE, 7 / 8 * 4 * TABLE
    assert communication.update_minimum(SMALL, many, mesh)["tables over fsdp"] == 2 * gathered + scattered
    untied = dataclasses.replace(SMALL, tie_embeddings=False)
    assert communication.update_minimum(untied, many, mesh)["tables over fsdp"] == 2 * (gathered + scattered)
    # logits of 8 tokens are cheaper to send than the table, which the 8,200 of the prompts need whole
    few = plan.Work(prompts=8, group=1, prompt_tokens=8192, completion_tokens=8)
    assert communication.update_minimum(SMALL, few, mesh)["tables over fsdp"] == gathered + scattered + 2 * 7 * 8 * D * 4


def test_tensor_sums_activations():
    """2 x 3/4 over four devices, of 4 prompts of 16 tokens and their 128 completion tokens on each of two data shards."""
    mesh = sizes(2, 1, 4)
    tokens, completion = 4 * (16 + 128), 4 * 128
    least = communication.update_minimum(SMALL, WORK, mesh)
    assert least["activations over tensor"] == 1.5 * 4 * D * ((4 * L + 1) * tokens + completion)
    assert least["statistics of logits"] == 1.5 * 4 * 4 * completion
    again = communication.update_minimum(SMALL, dataclasses.replace(WORK, remat=True, micro_batches=2), mesh)
    assert again["activations over tensor"] == 1.5 * 4 * D * ((5 * L + 1) * tokens + completion)
    assert least["gradients over data"] == 4 * ((MATRICES + TABLE) / 4 + NORMS)
    assert communication.rollout_minimum(SMALL, WORK, mesh) == {
        "weights gathered": 0, "prefill": 1.5 * 4 * D * (2 * L + 1) * 4 * 16, "decode": 1.5 * 4 * D * (2 * L + 1) * 4 * 4 * 31,
        "statistics of logits": 1.5 * 4 * 4 * completion}


def test_what_does_not_divide_is_summed_whole():
    """Seven pieces divide neither matrices nor table: fsdp then acts as data does. Adapters are another sum."""
    least = communication.update_minimum(SMALL, dataclasses.replace(WORK, prompts=7), sizes(1, 7, 1))
    assert least.pop("gradients over data") == pytest.approx(12 / 7 * 4 * (MATRICES + NORMS + TABLE))
    assert not any(least.values())
    with pytest.raises(ValueError, match="lora_rank=8: the least communication is known only for updates of all weights"):
        communication.update_minimum(SMALL, dataclasses.replace(WORK, lora_rank=8), sizes(8, 1, 1))


@pytest.fixture(scope="module")
def eight():
    """The results of `placed_cases.py` for programs compiled for eight virtual devices."""
    return job.result_of("placed_cases.py", 8)["communicated"]


@pytest.mark.slow
def test_a_compiled_program_sends_what_was_written_down(eight):
    """A piece is 512 bytes: 15 sums over 4 devices; 5 times gathered by 8, scattered by 4 in pairs, swapped by 2, passed on."""
    assert eight["by_hand"] == {"all-reduce": 15 * 2 * 3 / 4 * 512, "all-gather": 5 * 7 * 512,
                                "reduce-scatter": 5 * 3 * 1024, "all-to-all": 5 * 256, "collective-permute": 5 * 512}


@pytest.mark.slow
def test_an_update_with_data_alone_sums_its_gradients_and_a_few_scalars(eight):
    least = eight["least"]["gradients over data"]
    assert least == sum(eight["least"].values()) and least <= eight["update"]["all-reduce"] < least + 500


@pytest.mark.slow
def test_an_update_of_weights_in_pieces_sends_weights_and_gradients_alone(eight):
    sent, least = eight["in_pieces"], eight["least_in_pieces"]
    assert sent["all-to-all"] == sent["collective-permute"] == 0
    assert sent["all-gather"] > least["weights gathered"] and sent["reduce-scatter"] > least["gradients scattered"]
    assert sum(sent.values()) < 1.1 * sum(least.values())


@pytest.mark.slow
def test_weights_are_laid_out_for_sampling_with_the_least_communication(eight):
    assert eight["reshard"]["all-gather"] == sum(eight["reshard"].values()) == eight["least_reshard"] > 0


def command(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "experiments/benchmark.py", "communication", "--model=smollm2_135m", *options],
                          capture_output=True, text=True, cwd=job.ROOT)


@pytest.mark.slow
def test_the_command_compares_what_is_compiled_with_the_least():
    done = command("--devices=2", "--work=group=2, prompt_tokens=8, completion_tokens=8", "--json", "--ops=2")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["mesh"] == sizes(1, 2, 1) and result["work"]["prompts"] == 2 and result["compile_seconds"] > 0
    weights = 134_515_008 - 576 * 61  # but for the norms
    assert result["reshard"] == result["least"]["rollout"]["weights gathered"] == weights / 2 * 4
    most, next_most = result["ops"]
    assert most["sent"] >= next_most["sent"] > 0 and result["sent"][most["kind"]] >= most["sent"]


@pytest.mark.slow
def test_the_command_refuses_what_it_cannot_compile_for():
    done = command("--devices=8,4096")
    assert done.returncode == 1 and not done.stdout and "Traceback" not in done.stderr
    assert "--devices=4096: a CPU plays at most 2048 devices; give fewer, or --platform=tpu" in done.stderr


@pytest.mark.slow
def test_statistics_of_methods_are_summed_where_the_batch_lies():
    """Advantages of prompts on eight shards: no estimator gathers tokens, but for three that look at those of the whole batch.

    POISE fits its probe to the features of all rollouts, which its window has on every device.
    """
    result = job.result_of("estimator_cases.py", 8)
    whole = {"d3s", "dart", "demystify_cot", "poise"}
    assert {slug for slug, sent in result.items() if sent > 3} == whole
    assert sum(sent == 0 for sent in result.values()) >= 40 and len(result) > 60
