"""Bytes that each device sends in one update, from the program compiled for any number of devices, and their minimum.

  python experiments/benchmark.py communication --model=qwen3_0.6b --devices=1,8,64,512
      [--mesh="fsdp=8, tensor=2"] [--work="prompts=2"]
  python experiments/benchmark.py communication --model=qwen3_0.6b --devices=8,4096 --platform=tpu --work="dtype=bfloat16"

Nothing is run: no devices are needed. --platform=cpu compiles for up to 2048 virtual devices, --platform=tpu with the TPU's own
compiler for v5p slices (pip install "jax[tpu]"). Each number of devices is compiled in a separate process.
"""
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import time

from absl import flags

from jaxrl_llm.commands import command_line
from jaxrl_llm.tools import lifetime

_MODEL = flags.DEFINE_string("model", None, "Name of a published model.")
_DEVICES = flags.DEFINE_list("devices", None, "Numbers of devices.")
_MESH = flags.DEFINE_string("mesh", "", "Sizes of data, fsdp, tensor, e.g. \"fsdp=8, tensor=2\"; default: fsdp up to 8.")
_WORK = flags.DEFINE_string("work", "", "Changes to one prompt of 128 tokens per shard, 8 completions of 256 tokens, float32: "
                            "fields of jaxrl_llm.planning.plan.Work, prompts being those of each shard and micro-batch.")
_PLATFORM = flags.DEFINE_enum("platform", "cpu", ["cpu", "tpu"], "Whose compiler.")
_OPS = flags.DEFINE_integer("ops", 0, "Number of collectives of each program to print, those that send most.", lower_bound=0)
_JSON = flags.DEFINE_bool("json", False, "One JSON object per number of devices instead of a table.")
_HERE = flags.DEFINE_bool("here", False, "Compile in this process; how the script calls itself.")

_MOST_VIRTUAL = 2048  # the most that a process of XLA's CPU client has
_ENVIRONMENT = {"cpu": {"XLA_FLAGS": "--xla_force_host_platform_device_count={} --xla_backend_optimization_level=0"},
                "tpu": {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost"}}
_FIELDS = ("prompts", "group", "prompt_tokens", "completion_tokens", "micro_batches", "dtype", "remat")


def mesh_of(count: int) -> dict[str, int]:
    """Sizes of the mesh of `count` devices."""
    from jaxrl_llm.parallel import mesh_sizes
    from jaxrl_llm.tools.written import keywords
    return mesh_sizes(count, **(keywords(_MESH.value) or {"fsdp": math.gcd(count, 8)}))


def work_of(mesh: dict[str, int]):
    """The work of one update on that mesh: the prompts grow with the shards."""
    from jaxrl_llm.planning.plan import Work
    from jaxrl_llm.tools.registry import one_of
    from jaxrl_llm.tools.written import keywords
    given = keywords(_WORK.value)
    for name in given:
        one_of("field of --work", name, _FIELDS)
    work = Work(**{"prompts": 1, "group": 8, "prompt_tokens": 128, "completion_tokens": 256} | given)
    one_of("dtype", work.dtype, ("float32", "bfloat16"))
    return dataclasses.replace(work, prompts=work.prompts * work.micro_batches * mesh["data"] * mesh["fsdp"])


def devices_of(count: int) -> list:
    """Virtual devices of this process, or the devices of a v5p slice, which need not exist."""
    import jax
    if _PLATFORM.value == "cpu":
        return jax.devices()
    from jax.experimental import topologies
    power = count.bit_length() - 1
    sides = [2 ** ((power + i) // 3) for i in (2, 1, 0)]
    hosts = {"chips_per_host_bounds": [1, 1, 1]} if count < 4 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name="v5p:" + "x".join(map(str, sides)), **hosts).devices


def measured(count: int) -> dict:
    """Compiles the update, and the program that reshards the weights for sampling, for `count` devices."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jaxrl_llm import parallel
    from jaxrl_llm.models.transformer import Transformer
    from jaxrl_llm.parallel.mesh import MESH_AXES, mesh_shape
    from jaxrl_llm.planning import communication
    from jaxrl_llm.planning.ahead import lower_update
    from jaxrl_llm.planning.presets import MODELS
    sizes = mesh_of(count)
    c, w = MODELS[_MODEL.value], work_of(sizes)
    # In their given order: the placement of devices in the mesh changes how long a byte takes, not how many are sent.
    mesh = Mesh(np.reshape(devices_of(count), mesh_shape(sizes)), MESH_AXES)
    start = time.perf_counter()
    collectives = communication.collectives(lower_update(c, w, mesh).compile().as_text())
    seconds = time.perf_counter() - start
    params = Transformer(c).abstract_params()
    params = parallel.with_shardings(params, parallel.tree_shardings(params, mesh))
    gather = jax.jit(lambda params: parallel.reshard(params, mesh, jax.numpy.dtype(w.dtype))).lower(params).compile()
    ops = [{**dataclasses.asdict(one), "sent": one.sent} for one in sorted(collectives, key=lambda one: -one.sent)]
    work = {name: value for name, value in vars(w).items() if name != "optimizer"}  # not a number
    return {"devices": count, "mesh": sizes, "work": work, "sent": communication.by_kind(collectives),
            "reshard": sum(communication.by_kind(communication.collectives(gather.as_text())).values()),
            "least": communication.minimum(c, w, sizes), "compile_seconds": seconds, "ops": ops[:_OPS.value]}


def in_own_process(count: int) -> dict:
    """`measured` in a process with `count` devices; RuntimeError with its last output if it fails."""
    flags_given = [f"--model={_MODEL.value}", f"--devices={count}", f"--mesh={_MESH.value}", f"--work={_WORK.value}",
                   f"--platform={_PLATFORM.value}", f"--ops={_OPS.value}", "--here", "--compilation_cache="]
    environment = {key: value.format(count) for key, value in _ENVIRONMENT[_PLATFORM.value].items()}
    with lifetime.start([sys.executable, __file__, *flags_given], os.environ | environment | {"JAX_PLATFORMS": "cpu"},
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        printed, complaint = process.communicate()
    if process.returncode:
        words = [line for line in complaint.strip().splitlines() if "JAXRL_LLM_TRACEBACK" not in line]
        reason = "\n".join(words[-3:] or [f"exit code {process.returncode}"])
        raise RuntimeError(f"{count} devices were not compiled for: {reason}")
    return json.loads(printed.splitlines()[-1])


def row(result: dict) -> list[str]:
    """A line of the table: gigabytes per device, the ratio, seconds."""
    def size(x):
        return f"{x / 1e9:,.3f}"
    sent, least = sum(result["sent"].values()), sum(result["least"]["update"].values())
    return [str(result["devices"]), " x ".join(map(str, result["mesh"].values())), *map(size, result["sent"].values()),
            size(sent), size(least), f"{sent / least:,.2f}" if least else "", size(result["reshard"]),
            size(result["least"]["rollout"]["weights gathered"]), f"{result['compile_seconds']:.0f}"]


def check() -> list[int]:
    """The numbers of devices; ValueError for numbers that cannot be compiled for."""
    from jaxrl_llm.planning.presets import MODELS
    from jaxrl_llm.tools.registry import one_of
    one_of("model", _MODEL.value, MODELS)
    counts = [int(text) if text.strip().isdigit() else 0 for text in _DEVICES.value]
    if not counts or min(counts) < 1:
        raise ValueError(f"--devices={','.join(_DEVICES.value)}: give whole numbers from 1 on, for example 1,8,64")
    if _PLATFORM.value == "cpu" and max(counts) > _MOST_VIRTUAL:
        raise ValueError(f"--devices={max(counts)}: a CPU plays at most {_MOST_VIRTUAL} devices; give fewer, or --platform=tpu")
    if _PLATFORM.value == "tpu" and any(count & (count - 1) for count in counts):
        raise ValueError(f"--devices={','.join(_DEVICES.value)}: for --platform=tpu give powers of two")
    if _PLATFORM.value == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise ValueError("--platform=tpu needs the TPU's compiler, though no TPU: pip install \"jax[tpu]\"")
    for count in counts:
        work_of(mesh_of(count))
    return counts


def main():
    from jaxrl_llm.planning.communication import KINDS
    counts = check()
    if _HERE.value:
        print(json.dumps(measured(counts[0])))
        return
    if not _JSON.value:
        print("GB that each device sends in one update, and to lay the weights out for sampling; seconds of compiling.\n")
        names = ["devices", "data x fsdp x tensor", *KINDS, "together", "least", "ratio", "for sampling", "least", "seconds"]
        print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}", flush=True)
    listed = []
    for count in counts:
        result = in_own_process(count)
        print(json.dumps(result) if _JSON.value else f"| {' | '.join(row(result))} |", flush=True)
        listed += [(count, one) for one in result["ops"] if not _JSON.value]
    for count, one in listed:
        print(f"{count:5} devices: {one['sent'] / 1e6:9.1f} MB by {one['kind']} over {one['group']}, {one['times']} times "
              f"{one['size'] / 1e6:.2f} MB: {one['source']}")


if __name__ == "__main__":
    command_line.run(main, "model", "devices")
