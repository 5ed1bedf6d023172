"""Runs in a process of its own with eight virtual devices: mixtures of experts on meshes, and gradients in bfloat16."""
import json
import sys

import numpy as np
from mesh_cases import leaves, steps, tiny


def with_experts():
    """Three steps of a mixture of experts, its load balanced, along `tensor` and on a mesh of all axes, and on one device."""
    def run(devices, **mesh):
        c = tiny(**mesh)
        c.model.experts, c.model.expert_size = 4, 24
        c.objective = f"{c.objective} + balance(0.05)"
        return steps(c, 3, devices, unpads=devices == 8)

    _, one, tokens, measured = run(1, data=1)
    result = {}
    for name, devices, sizes in (("tensor", 4, {"data": 1, "tensor": 4}), ("all", 8, {"data": 2, "fsdp": 2, "tensor": 2})):
        _, state, sampled, metrics = run(devices, **sizes)
        gate = state.params["layers"]["experts_gate"]["kernel"]
        result[name] = {"same_tokens": all(bool((a == b).all()) for a, b in zip(sampled, tokens, strict=True)),
                        "difference": max(float(np.abs(a - b).max()) for a, b in zip(leaves(state), leaves(one), strict=True)),
                        "metrics": {key: [metrics[key], measured[key]]
                                    for key in ("loss", "grad_norm", "kl", "moe/balance_loss", "moe/max_load")},
                        "shard_of_gate": gate.addressable_shards[0].data.shape}
    return result


def in_bfloat16(**mesh) -> float:
    """Norm of the first gradient, computed in bfloat16."""
    c = tiny(**mesh)
    c.model.dtype = "bfloat16"
    return float(steps(c, 1, int(np.prod(list(mesh.values()))))[3]["grad_norm"])


def main():
    print(json.dumps({"experts": with_experts(), "bfloat16": [in_bfloat16(data=2, fsdp=2), in_bfloat16(data=1)]}))


if __name__ == "__main__":
    sys.exit(main())
