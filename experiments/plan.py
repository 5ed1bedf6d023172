"""Memory and ideal time of a training step on hardware that need not be there: does it fit, on which mesh, and what would.

  python experiments/plan.py --model=qwen3_8b --devices=v5p-64 [--mesh="fsdp=32"] [--config=configs/... --config.KEY=VALUE ...]
  python experiments/plan.py --model=qwen3_0.6b,qwen3_8b --devices=h100-8,v5p-64      # a table, changed until it fits

The answer is "fits", "tight" (less than 15% of the usable memory left) or "no"; on devices that have never run what was
estimated for them, tight is no. "no" ends with advice and exit code 1.
"""
import json
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxrl_llm import command_line

_MODEL = flags.DEFINE_list("model", None, "Names of published models, or directories with a config.json.")
_DEVICES = flags.DEFINE_list("devices", None, "Devices and their number, e.g. h100-8; v4 and v5p count cores, two a chip.")
_MESH = flags.DEFINE_string("mesh", "", "Sizes of data, fsdp, tensor, e.g. \"data=4, fsdp=8\"; default: the first that fits.")
_CONFIG = config_flags.DEFINE_config_file("config", str(Path(__file__).parents[1] / "configs" / "plan.py"),
                                          "The step that is planned; its model section says dtype and remat alone.")


def model_of(name: str):
    """Sizes of a published model, or of a directory."""
    from jaxrl_llm.models.weights import hf
    from jaxrl_llm.parallel.presets import MODELS
    from jaxrl_llm.registry import one_of
    file = Path(name).expanduser() / "config.json"
    return hf.config_from(json.loads(file.read_text()), file) if file.is_file() else MODELS[one_of("model", name, MODELS)]


def main():
    from jaxrl_llm.parallel import mesh_sizes, plan, plan_page
    from jaxrl_llm.parallel.presets import parse_devices
    from jaxrl_llm.training.config import keywords
    from jaxrl_llm.training.recipes import work_of
    models = {name: model_of(name) for name in _MODEL.value}
    machines = {name: parse_devices(name) for name in _DEVICES.value}
    if len(models) * len(machines) > 1:
        if _MESH.value:
            raise ValueError("--mesh goes with one model and one kind of device; a table chooses its own")
        print(plan_page.table({name: (c, work_of(_CONFIG.value, c)) for name, c in models.items()}, machines))
        return
    (name, c), (device, count) = models.popitem(), machines.popitem()[1]
    mesh, work = mesh_sizes(count, **keywords(_MESH.value)) if _MESH.value else None, work_of(_CONFIG.value, c)
    found = plan.placed(c, work, device, count, mesh)
    print(plan_page.page(name, c, work, device, found))
    if not found.fits(device):
        print("\n" + plan.refusal(c, work, device, count, found))
        sys.exit(1)


if __name__ == "__main__":
    command_line.run(main, "model", "devices")
