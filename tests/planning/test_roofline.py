"""FLOPs and bytes of compiled programs, read from their text: by hand, and against what XLA itself counts."""
import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import job
import numpy as np
import pytest

from jaxrl_llm.models.config import Experts, ModelConfig
from jaxrl_llm.planning import ahead, roofline
from jaxrl_llm.planning.plan import Work
from jaxrl_llm.planning.presets import Device
from jaxrl_llm.planning.roofline import Cost, operations

PROGRAM = """HloModule jit_f, is_scheduled=true

%looked_up (table: f32[1000,64], ids: s32[8,1]) -> f32[8,64] {
  %table = f32[1000,64]{1,0} parameter(0)
  %ids = s32[8,1]{1,0} parameter(1)
  ROOT %g = f32[8,64]{1,0} gather(%table, %ids), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}
}

%put (cache: f32[16,1024], new: f32[16,1], at: s32[]) -> f32[16,1024] {
  %cache = f32[16,1024]{1,0} parameter(0)
  %new = f32[16,1]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %d = f32[16,1024]{1,0} dynamic-update-slice(%cache, %new, %zero, %at)
}

%nothing (n: f32[16,64]) -> f32[16,64] {
  %n = f32[16,64]{1,0} parameter(0)
  ROOT %same = f32[16,64]{1,0} bitcast(%n)
}

%attend (keys: f32[16,64], new: f32[16,1], at: s32[], q: f32[8,16]) -> f32[8,64] {
  %keys = f32[16,64]{1,0} parameter(0)
  %new2 = f32[16,1]{1,0} parameter(1)
  %at2 = s32[] parameter(2)
  %q = f32[8,16]{1,0} parameter(3)
  %inner = f32[16,64]{1,0} fusion(%keys), kind=kLoop, calls=%nothing
  %zero2 = s32[] constant(0)
  %longer = f32[16,64]{1,0} dynamic-update-slice(%inner, %new2, %zero2, %at2)
  ROOT %scores = f32[8,64]{1,0} dot(%q, %longer), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%turned (k: f32[16,64]) -> f32[64,16] {
  %k = f32[16,64]{1,0} parameter(0)
  %b16 = bf16[16,64]{1,0} convert(%k)
  ROOT %wide = f32[16,64]{1,0} convert(%b16)
}

%product (a: bf16[8,64], b: bf16[64,32]) -> f32[8,32] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  ROOT %dot = f32[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (c: (s32[], bf16[8,64], bf16[64,32])) -> (s32[], bf16[8,64], bf16[64,32]) {
  %c = (s32[], bf16[8,64]{1,0}, bf16[64,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = bf16[8,64]{1,0} get-tuple-element(%c), index=1
  %w = bf16[64,32]{1,0} get-tuple-element(%c), index=2
  %f = f32[8,32]{1,0} fusion(%x, %w), kind=kOutput, calls=%product, metadata={op_name="jit(f)/dot"}
  ROOT %out = (s32[], bf16[8,64]{1,0}, bf16[64,32]{1,0}) tuple(%i, %x, %w)
}

%more (c: (s32[], bf16[8,64], bf16[64,32])) -> pred[] {
  %c2 = (s32[], bf16[8,64]{1,0}, bf16[64,32]{1,0}) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (p0: f32[1000,64]) -> f32[8,64] {
  %p0 = f32[1000,64]{1,0} parameter(0)
  %p1 = s32[8,1]{1,0} parameter(1)
  %rows = f32[8,64]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%looked_up, metadata={op_name="jit(f)/embed"}
  %p2 = f32[16,1024]{1,0} parameter(2)
  %p3 = f32[16,1]{1,0} parameter(3)
  %p4 = s32[] parameter(4)
  %kept = f32[16,1024]{1,0} fusion(%p2, %p3, %p4), kind=kLoop, calls=%put, metadata={op_name="jit(f)/cache"}
  %met = f32[8,64]{1,0} fusion(%p5, %p3, %p4, %p6), kind=kOutput, calls=%attend
  %p5 = f32[16,64]{1,0} parameter(5)
  %p6 = f32[8,16]{1,0} parameter(6)
  %rounded = f32[16,64]{1,0} fusion(%p5), kind=kLoop, calls=%turned
  %near = f32[1000,64]{1,0:T(8,128)S(1)} copy-done(%begun)
  %begun = (f32[1000,64]{1,0:T(8,128)S(1)}, f32[1000,64]{1,0}, u32[]{:S(2)}) copy-start(%p0)
  %inside = f32[1000,64]{1,0:T(8,128)S(1)} negate(%near)
  %part = ((f32[1000,64]{1,0:T(8,128)}), f32[250,64]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%p0), slice={[0:250], [0:64]}
  %init = (s32[], bf16[8,64]{1,0}, bf16[64,32]{1,0}) tuple(%p4, %p7, %p8)
  %loop = (s32[], bf16[8,64], bf16[64,32]) while(%init), condition=%more, body=%body, known_trip_count={"n":"7"}
  ROOT %last = f32[8,64]{1,0} negate(%rows)
}
"""
SLOW = Device("slow", 1e9, 1e6, 1e6)


def test_what_moves_is_counted_and_nothing_else():
    result = {one.name: one for one in operations(PROGRAM)}
    assert set(result) == {"rows", "kept", "met", "rounded", "begun", "part", "f", "last"}
    assert (result["rows"].read, result["rows"].written) == (8 * 64 * 4 + 8 * 4, 8 * 64 * 4)  # not the table
    assert (result["kept"].read, result["kept"].written) == (16 * 4 + 4, 16 * 4)  # in place
    assert (result["met"].read, result["met"].flops) == (16 * 64 * 4 + 16 * 4 + 4 + 8 * 16 * 4, 2 * 8 * 64 * 16)  # all of it
    assert (result["rounded"].read, result["rounded"].written) == (16 * 64 * 4, 16 * 64 * 4)
    assert (result["begun"].read, result["begun"].written) == (1000 * 64 * 4, 0)  # into the core
    assert (result["part"].read, result["part"].written) == (250 * 64 * 4, 0)
    product = result["f"]
    assert (product.times, product.flops, product.source) == (7, 2 * 8 * 32 * 64, "jit(f)/dot")
    assert product.moved == 7 * (8 * 64 * 2 + 64 * 32 * 2 + 8 * 32 * 4)
    assert result["last"].moved == 2 * 8 * 64 * 4
    assert product.seconds(SLOW) == 7 * 32768 / 1e6 and result["last"].seconds(SLOW) == 4096 / 1e6  # of what takes longer
    total = roofline.cost(list(result.values()), SLOW)
    assert total.flops == 7 * 32768 + 16384 and total.moved == sum(one.moved for one in result.values())
    assert total.with_layers(Cost(*(2 * x for x in (total.flops, total.moved, total.seconds))), 5).flops == 5 * total.flops
    with pytest.raises(ValueError, match="ENTRY"):
        operations("nothing")


def test_products_written_as_convolutions_count_what_meets():
    """Plain, and with a batch of 8 as a window of which one place in eight meets an input."""
    plain = """ENTRY %m (a: bf16[8,64]) -> f32[8,32] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  ROOT %c = f32[8,32]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}
"""
    batched = """ENTRY %m (a: bf16[8,16,64]) -> f32[8,16,32] {
  %a = bf16[8,16,64]{2,1,0} parameter(0)
  %b = bf16[8,32,64]{2,1,0} parameter(1)
  ROOT %c = f32[8,16,32]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf
}
"""
    assert operations(plain)[0].flops == 2 * 8 * 64 * 32
    assert operations(batched)[0].flops == 2 * 8 * 16 * 64 * 32


KERNELS = """HloModule jit_f, is_scheduled=true

%fast (q: bf16[512,128]) -> bf16[512,128] {
  %q = bf16[512,128]{1,0} parameter(0)
  ROOT %k = bf16[512,128]{1,0} custom-call(%q), custom_call_target="tpu_custom_call", attributes={kernel={
"sizes":"{512}"
}}, metadata={op_name="jit(f)/splash_mha_fwd"}
}

%slow (q: bf16[512,128]) -> bf16[512,128] {
  %q2 = bf16[512,128]{1,0} parameter(0)
  %wide = f32[512,1024]{1,0} broadcast(%q2)
  ROOT %n = bf16[512,128]{1,0} negate(%q2)
}

ENTRY %main (x: bf16[512,128], fits: pred[]) -> bf16[512,128] {
  %x = bf16[512,128]{1,0} parameter(0)
  %fits = pred[] parameter(1)
  %c = bf16[512,128]{1,0} conditional(%fits, %x, %x), true_computation=%fast, false_computation=%slow
  ROOT %g = bf16[512,128] custom-call(%c), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":77}}
}
"""


def test_kernels_count_as_given_or_as_they_estimate_themselves():
    """A kernel that is compiled beside a plain fallback counts, though the fallback moves more."""
    attention, other = operations(KERNELS, kernels={"splash_mha_fwd": (1000.0, 64.0)})
    once = 512 * 128 * 2
    assert (attention.flops, attention.read, attention.written, attention.kernel) == (1000, once + 64, once, True)
    assert (other.flops, other.read, other.written) == (77, once, once)


def test_the_cost_of_attention_kernels_is_that_of_blocks_that_are_not_skipped():
    """A prompt of 512 tokens and two completions of 1,024: 1 + 2 x (2 + 3) blocks of 5 x 5, in each of 4 heads."""
    c = ModelConfig(vocab_size=8, hidden_size=512, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=128, mlp_size=8)
    seen, block = 11 * 4, 512 * 512 * 128
    cost = ahead.attention_cost(c, Work(1, 2, 512, 1024, dtype="bfloat16"))
    assert cost == {f"splash_mha_{name}": (n * 2 * block * seen, seen * 2 * 512 * 128 * 2)
                    for name, n in (("fwd", 2), ("dq", 3), ("dkv", 4))}
    assert ahead.attention_cost(c, Work(1, 0, 512, 1024, dtype="bfloat16"))["splash_mha_fwd"][0] == 2 * 2 * block * 4


def compiled(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)).compile()


def test_counts_are_those_of_xla_where_these_are_right():
    f32 = jnp.float32
    program = compiled(lambda a, b: jnp.tanh(a @ b), ((48, 160), f32), ((160, 96), f32))
    assert sum(one.flops for one in operations(program.as_text())) == 2 * 48 * 160 * 96
    assert 0 < sum(one.moved for one in operations(program.as_text())) <= program.cost_analysis()["bytes accessed"] * 1.01

    def looped(a, b):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ b), None), a, None, length=5)[0]

    program = compiled(looped, ((48, 96), f32), ((96, 96), f32))
    assert sum(one.times * one.flops for one in operations(program.as_text())) == 5 * 2 * 48 * 96 * 96
    table = compiled(lambda table, ids: table[ids] * 2, ((50_000, 64), f32), ((16,), np.int32))
    moved = sum(one.moved for one in operations(table.as_text()))
    assert 2 * 16 * 64 * 4 <= moved < 10 * 16 * 64 * 4 < table.cost_analysis()["bytes accessed"]


def test_the_least_by_hand():
    c = ModelConfig(vocab_size=100, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48)
    w = Work(prompts=2, group=4, prompt_tokens=16, completion_tokens=24, dtype="bfloat16")
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    weights, token = 3 * layer + 3200, 2 * 2 * 3 * 16
    products = 2 * 8 * weights + 8 * 4 * 3 * 32 * 40
    assert roofline.decode_least(c, w) == (products, 2 * weights + token * 2 * (16 + 4 * 24))
    windows = dataclasses.replace(c, window=10, local_layers=(True, True, False))
    near = weights * 2 + token // 3 * 2 * (2 * 10 + 16 + 4 * (2 * 10 + 24))
    assert roofline.decode_least(windows, w).moved == near
    assert roofline.prefill_least(c, w) == (2 * 32 * 3 * layer + 2 * 4 * 3 * 32 * 136, 2 * 3 * layer + token * 32)
    assert roofline.layer_least(c, w).moved == 12 * layer
    attention = 4 * 32 * (136 + 4 * (24 * 16 + 300))
    assert roofline.layer_least(c, w).flops == 2 * 3 * (2 * layer * 112 + attention)
    assert roofline.update_least(c, w).moved == 40 * (3 * layer + 3200)
    mixture = ModelConfig(vocab_size=100, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48,
                          experts=Experts(count=64, per_token=2, size=8))
    few = roofline.decode_least(mixture, Work(1, 4, 16, 24, dtype="bfloat16"))
    caches = 2 * 2 * 16 * (16 + 4 * 24)
    assert few.moved - caches == 2 * (32 * 32 * 2 + 32 * 16 * 2 + 32 * (3 * 8 * 8 + 64) + 3200)  # 8 of 64 experts at most


def test_what_paged_attention_reads_again():
    """By each row of a prompt but the first, whose pages are in the pool that the compiler counts."""
    c = ModelConfig(vocab_size=100, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48)
    cost = ahead.pages_cost(c, Work(prompts=2, group=4, prompt_tokens=16, completion_tokens=24, dtype="bfloat16"))
    assert cost == {"ragged_paged_attention": (8 * 4 * 32 * 40, 2 * 3 * 16 * 2 * 16 * 2)}


def command(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "experiments/roofline.py", *options], capture_output=True, text=True, cwd=job.ROOT)


@pytest.mark.slow
def test_the_command_compares_what_is_compiled_with_the_least():
    done = command("--model=tiny", "--phases=decode", "--work=prompts=2, group=2, prompt_tokens=8, completion_tokens=8, "
                   "dtype=float32", "--json", "--ops=1")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert 1 <= result["flops"] / result["useful"] < 1.1 and result["moved"] > result["least"] and result["temporaries"] > 0
    assert result["seconds"] > result["least_seconds"] > 0 and result["ops"][0]["ms"] > 0
    assert result["useful"] == 2 * 4 * (4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 512) + 4 * 4 * 4 * 64 * 16


@pytest.mark.slow
def test_all_phases_are_compared():
    done = command("--model=tiny", "--phases=prefill,layer,update,pages,slots", "--work=prompts=2, group=2, prompt_tokens=8, "
                   "completion_tokens=64, dtype=float32", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    for result in map(json.loads, done.stdout.splitlines()):
        assert 0.95 < result["flops"] / result["useful"] < 2 and result["moved"] > result["least"] and result["temporaries"] > 0


@pytest.mark.slow
def test_the_command_refuses_what_it_cannot_compare():
    for options, message in ((("--model=gemma3_1b",), "layers of several kinds"), (("--model=tiny", "--phases=sleep"), "phase"),
                             (("--model=tiny", "--work=groups=2"), "field of --work")):
        done = command(*options)
        assert done.returncode == 1 and not done.stdout and "Traceback" not in done.stderr and message in done.stderr
