"""Memory and ideal time of a training step on hardware that need not exist here: whether it fits, on which mesh, what would.

  python experiments/plan.py --model=qwen3_8b --devices=v5p-64 [--mesh="fsdp=32"] [--config=configs/... --config.KEY=VALUE ...]
  python experiments/plan.py --model=qwen3_0.6b,qwen3_8b --devices=h100-8,v5p-64      # a table, changed until it fits
  python experiments/plan.py --model=qwen3_8b --devices=v5p-16 --compiled ...         # beside the TPU compiler's figures

The answer is "fits", "tight" (less than 15% of the usable memory left) or "no"; on kinds of devices that have never
run estimated work, tight becomes no. "no" ends with advice and exit code 1.
"""
import dataclasses
import json
import os
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxrl_llm.commands import command_line

_MODEL = flags.DEFINE_list("model", None, "Names of published models, or directories with a config.json.")
_DEVICES = flags.DEFINE_list("devices", None, "Devices and their number, e.g. h100-8; v4 and v5p count cores, two a chip.")
_MESH = flags.DEFINE_string("mesh", "", "Sizes of data, fsdp, tensor, seq, e.g. \"data=4, fsdp=8\"; default: the mesh of the "
                            "configuration, or the first that fits if it sets none.")
_COMPILED = flags.DEFINE_bool("compiled", False, "Compile the update for the slice, of two layers and of four, and "
                              "extrapolate; needs the TPU's compiler (pip install \"jax[tpu]\"), and no TPU.")
_CONFIG = config_flags.DEFINE_config_file("config", str(Path(__file__).parents[1] / "configs" / "plan.py"),
                                          "The step that is planned; its model section says dtype and remat alone.")


def model_of(name: str):
    """Sizes of a published model, or of a directory."""
    from jaxrl_llm.models.weights import hf
    from jaxrl_llm.planning.presets import MODELS
    from jaxrl_llm.tools.registry import one_of
    file = Path(name).expanduser() / "config.json"
    return hf.config_from(json.loads(file.read_text()), file) if file.is_file() else MODELS[one_of("model", name, MODELS)]


def given_mesh() -> dict[str, int] | None:
    """The axes that --mesh or the configuration sets; None: the first mesh that fits. ValueError if both set one."""
    from jaxrl_llm.setup.config import default_config
    from jaxrl_llm.tools.written import keywords
    own, usual = _CONFIG.value.mesh.to_dict(), default_config().mesh.to_dict()
    if own == usual:
        return keywords(_MESH.value) if _MESH.value else None
    if _MESH.value:
        sets = ", ".join(f"mesh.{axis}={size}" for axis, size in own.items() if size != usual[axis])
        raise ValueError(f"--mesh=\"{_MESH.value}\" is given, and the configuration sets {sets}; leave one out")
    return own


def compiled(c, w, device, sizes) -> dict[str, float]:
    """Bytes per device of an update by the TPU's compiler: its arguments, and its further memory.

    The bytes of all layers are extrapolated from programs of two and four layers: a single one is compiled without a loop.
    """
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost"}
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from jaxrl_llm.parallel.mesh import MESH_AXES, mesh_shape
    from jaxrl_llm.planning.ahead import lower_accumulate, lower_update
    power = int(np.prod([*sizes.values()])).bit_length() - 1
    sides = "x".join(str(2 ** ((power + i) // 3)) for i in (2, 1, 0))
    hosts = {"chips_per_host_bounds": [1, 1, 1]} if power < 2 else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{device.name}:{sides}", **hosts).devices
    mesh = Mesh(np.reshape(devices, mesh_shape(sizes)), MESH_AXES)
    lower = lower_accumulate if w.rows else lower_update
    def of_layers(count):
        kinds = {name: getattr(c, name)[:count] for name in ("local_layers", "rotary_layers")}
        memory = lower(dataclasses.replace(c, num_layers=count, **kinds), w, mesh).compile().memory_analysis()
        return np.array([memory.argument_size_in_bytes, memory.temp_size_in_bytes])
    two, four = of_layers(2), of_layers(4)
    return dict(zip(("given", "beside"), two + (c.num_layers - 2) * (four - two) / 2))


def comparison(c, w, device, estimate) -> str:
    """The compiler's figures beside the plan's."""
    from jaxrl_llm.planning import plan
    memory = compiled(c, w, device, estimate.mesh)
    # With packed rows, a separate program adds up gradients, which does not get the optimiser's state.
    state = plan.state_memory(c, w.optimizer, estimate.mesh, w.lora_rank) if w.rows else 0.0
    whole = memory["given"] + memory["beside"] + state
    return (f"by the compiler, from two and four layers: {memory['beside'] / 1e9:.2f} GB beside "
            f"{memory['given'] / 1e9:.2f} given"
            + (f" and {state / 1e9:.2f} of the optimiser" if state else "")
            + f", {whole / 1e9:.2f} together; the plan's {estimate.updating / 1e9:.2f} are "
            f"{estimate.updating / whole - 1:+.0%}")


def heaviest(c, device, count, mesh):
    """The step that the configuration describes; of one in phases that of the phase that needs most, which a line names."""
    from jaxrl_llm.planning import plan
    from jaxrl_llm.setup.phases import phases_of
    from jaxrl_llm.setup.recipes import work_of
    phases = [(one.name, work_of(one.config, c)) for one in phases_of(_CONFIG.value)]
    name, work = max(phases, key=lambda pair: plan.placed(c, pair[1], device, count, mesh).peak)
    if name:
        print(f"of the phases {', '.join(one for one, _ in phases)} the one that needs most is {name}\n")
    return work


def main():
    from jaxrl_llm.parallel import mesh_sizes
    from jaxrl_llm.planning import plan, plan_page
    from jaxrl_llm.planning.presets import parse_devices
    from jaxrl_llm.setup.recipes import work_of
    axes = given_mesh()
    models = {name: model_of(name) for name in _MODEL.value}
    machines = {name: parse_devices(name) for name in _DEVICES.value}
    if _COMPILED.value and (len(models) * len(machines) > 1 or not _DEVICES.value[0].startswith("v")):
        raise ValueError("--compiled goes with one model and one TPU slice, for example --devices=v5p-16")
    if len(models) * len(machines) > 1:
        if axes:
            raise ValueError("a mesh, here of --mesh or the configuration, goes with one model and one kind of device; a table "
                             "chooses its own")
        print(plan_page.table({name: (c, work_of(_CONFIG.value, c)) for name, c in models.items()}, machines))
        return
    (name, c), (device, count) = models.popitem(), machines.popitem()[1]
    mesh = mesh_sizes(count, **axes) if axes else None
    work = heaviest(c, device, count, mesh)
    estimate = plan.placed(c, work, device, count, mesh)
    print(plan_page.page(name, c, work, device, estimate))
    if _COMPILED.value:
        print(comparison(c, work, device, estimate))
    if not estimate.fits(device):
        print("\n" + plan.refusal(c, work, device, count, estimate))
        sys.exit(1)


if __name__ == "__main__":
    command_line.run(main, "model", "devices")
