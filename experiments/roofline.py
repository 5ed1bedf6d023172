"""FLOPs and bytes of compiled programs against the least possible, their memory, and the seconds that follow from data sheets.

  python experiments/roofline.py --model=qwen3_8b --platform=tpu --work="prompts=8, completion_tokens=1024, dtype=bfloat16"
  python experiments/roofline.py --model=qwen3_0.6b --phases=decode [--device=v5p] [--ops=10]
  python experiments/roofline.py --model=qwen3_8b --phases=slots --platform=tpu --device=v6e --mesh=2x4 --work="prompts=16"

Nothing is run. --platform=cpu compiles with the compiler for CPUs, --platform=tpu with the TPU's own for chips that need not
exist here (pip install "jax[tpu]"). Phases: `decode` a step of the sampler at full caches, `prefill` all prompts, `layer` one
layer forward and backward, `update` an update of all weights, `pages` a step of the engine with paged caches, `slots` a step of
the engine on the replicas of --mesh, of which one device is counted. Except for `layer`, models of one and of two layers are
compiled; their difference is taken for each further layer. Seconds are the sum over the operations, each at its own peak.
"""
import dataclasses
import importlib.util
import json
import os
import re
import time
from typing import Any

from absl import flags

from jaxrl_llm.commands import command_line

PHASES = ("decode", "prefill", "layer", "update", "pages", "slots")
_MODEL = flags.DEFINE_string("model", None, "Name of a published model, or \"tiny\".")
_PHASES = flags.DEFINE_list("phases", list(PHASES[:3]), f"Some of {', '.join(PHASES)}.")
_WORK = flags.DEFINE_string("work", "", "Changes to 1 prompt of 512 tokens, 8 completions of 1,024 tokens, bfloat16: fields of "
                            "jaxrl_llm.planning.plan.Work.")
_PLATFORM = flags.DEFINE_enum("platform", "cpu", ["cpu", "tpu"], "Whose compiler.")
_DEVICE = flags.DEFINE_string("device", "v5p", "Whose peaks.")
_MESH = flags.DEFINE_string("mesh", "1x1", "Devices of the phase slots, data x tensor.")
_OPS = flags.DEFINE_integer("ops", 0, "How many operations of each program to print, those that take longest.", lower_bound=0)
_JSON = flags.DEFINE_bool("json", False, "One JSON object per phase instead of a table.")

_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # no chip exists that two programs could compete for
_FIELDS = ("prompts", "group", "prompt_tokens", "completion_tokens", "micro_batches", "dtype", "remat", "int8_cache")


def model_of(name: str):
    """The architecture; ValueError for an unknown one, and for one whose layers differ, which two layers cannot represent."""
    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.planning.presets import MODELS
    from jaxrl_llm.tools.registry import one_of
    tiny = ModelConfig(vocab_size=512, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=128)
    one_of("model", name, ("tiny", *MODELS))
    c = tiny if name == "tiny" else MODELS[name]
    if len({*zip(c.local_layers, c.rotary_layers)}) > 1:
        raise ValueError(f"--model={name} has layers of several kinds, and all are estimated from two; give one of one kind")
    return c


def work_of(text: str):
    """The work of the phases."""
    from jaxrl_llm.planning.plan import Work
    from jaxrl_llm.tools.registry import one_of
    from jaxrl_llm.tools.written import keywords
    given = keywords(text)
    for name in given:
        one_of("field of --work", name, _FIELDS)
    usual: dict[str, Any] = {"prompts": 1, "group": 8, "prompt_tokens": 512, "completion_tokens": 1024, "dtype": "bfloat16"}
    work = Work(**usual | given)
    one_of("dtype", work.dtype, ("float32", "bfloat16"))
    return work


def mesh_of():
    """The devices of --mesh, of this process or TPU chips, which need not exist."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jaxrl_llm.parallel.mesh import MESH_AXES, mesh_shape
    sizes = re.fullmatch(r"(\d+)x(\d+)", _MESH.value)
    if sizes is None:
        raise ValueError(f"--mesh={_MESH.value!r}; give sizes of data and tensor, such as 2x4")
    data, tensor = map(int, sizes.groups())
    devices = jax.devices()
    if _PLATFORM.value == "tpu":
        from jax.experimental import topologies
        name, bounds = ("v6e:2x4", [2, 4, 1]) if _DEVICE.value == "v6e" else ("v5p:2x2x2", [2, 2, 1])
        if data * tensor == 1:
            name, bounds = name.split(":")[0] + (":1x1" if _DEVICE.value == "v6e" else ":1x1x1"), [1, 1, 1]
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=bounds).devices
    if data * tensor > len(devices):
        raise ValueError(f"--mesh={_MESH.value} has more than the {len(devices)} devices that are there")
    return Mesh(np.reshape(devices[:data * tensor], mesh_shape({"data": data, "tensor": tensor})), MESH_AXES)


def measured(phase: str, c, w, mesh, device) -> dict:
    """The cost of the programs of a phase, and their minimum."""
    from jaxrl_llm.planning import ahead, roofline
    shape = (mesh.shape["data"], mesh.shape["tensor"]) if phase == "slots" else ()
    lower, least = getattr(ahead, f"lower_{phase}"), getattr(roofline, f"{phase}_least")(c, w, *shape)
    began, costs, memory, operations = time.perf_counter(), [], [], []
    kernels = {}
    if _PLATFORM.value == "tpu" and phase == "pages":
        kernels = ahead.pages_cost(c, w)
    elif _PLATFORM.value == "tpu" and phase != "decode":
        kernels = ahead.attention_cost(c, dataclasses.replace(w, group=0) if phase == "prefill" else w)
    for layers in (1,) if phase == "layer" else (1, 2):
        compiled = lower(ahead.with_layers(c, layers), w, mesh).compile()
        operations = roofline.operations(compiled.as_text(), kernels=kernels)
        costs.append(roofline.cost(operations, device))
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
    total = costs[0] if phase == "layer" else costs[0].with_layers(costs[1], c.num_layers)
    slowest = sorted(operations, key=lambda one: -one.seconds(device))[:_OPS.value]
    return {"phase": phase, **dataclasses.asdict(total), "useful": least.flops, "least": least.moved,
            "least_seconds": least.seconds(device), "temporaries": memory[0] + (c.num_layers - 1) * (memory[-1] - memory[0]),
            "compile_seconds": time.perf_counter() - began,
            "ops": [{"ms": 1e3 * one.seconds(device), **dataclasses.asdict(one)} for one in slowest]}


def row(result: dict) -> str:
    """A line of the table."""
    cells = [result["phase"], f"{result['flops'] / 1e12:,.3g}", f"{result['flops'] / result['useful']:.2f}",
             f"{result['moved'] / 1e9:,.3g}", f"{result['moved'] / result['least']:.2f}",
             f"{result['temporaries'] / 1e9:,.2f}", f"{1e3 * result['seconds']:,.2f}",
             f"{result['least_seconds'] / result['seconds']:.0%}", f"{result['compile_seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


def main():
    import jax

    from jaxrl_llm.planning.presets import DEVICES
    from jaxrl_llm.tools.registry import one_of
    c, w = model_of(_MODEL.value), work_of(_WORK.value)
    one_of("device", _DEVICE.value, DEVICES)
    for phase in _PHASES.value:
        one_of("phase", phase, PHASES)
    if _PLATFORM.value == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise ValueError("--platform=tpu needs the TPU's compiler, though no TPU: pip install \"jax[tpu]\"")
        os.environ |= _TPU
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # it cannot store programs of absent devices
    device, mesh = DEVICES[_DEVICE.value], mesh_of()
    if not _JSON.value:
        names = ("phase", "TFLOP", "times useful", "GB", "times least", "temporaries, GB", "ms", "share of peak", "compiling")
        print(f"{_MODEL.value}, {w.prompts} x {w.group} rows, {w.prompt_tokens} + {w.completion_tokens} tokens, {w.dtype}; "
              f"peaks of {device.name}.\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    for phase in _PHASES.value:
        result = measured(phase, c, w, mesh, device)
        print(json.dumps(result) if _JSON.value else row(result), flush=True)
        for one in [] if _JSON.value else result["ops"]:
            print(f"  {one['ms']:8.3f} ms  {one['times']:3} x {one['flops'] / 1e9:8.2f} GFLOP, {one['read'] / 1e6:8.2f} MB "
                  f"read, {one['written'] / 1e6:.2f} written: {one['name']} {one['source']}")


if __name__ == "__main__":
    command_line.run(main, "model")
