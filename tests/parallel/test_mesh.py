"""The partition table, refusals, and a training step on eight virtual devices that equals one device's."""
import json

import jax
import job
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.parallel import check_batch, make_mesh
from jaxrl_llm.parallel.rules import path_name, spec_of


def mesh(data, fsdp, tensor):
    return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"))


def test_every_matrix_of_the_model_has_a_rule():
    model = Transformer(ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
                                    mlp_size=64, tie_embeddings=False, qkv_bias=True, qk_norm=True))
    shared = ("tensor", "fsdp")
    columns, rows, table = PartitionSpec(None, None, shared), PartitionSpec(None, shared), PartitionSpec(shared)
    wanted = {"embed": table, "unembed": table} | {f"layers/{n}/kernel": columns for n in ("q", "k", "v", "gate", "up")} | {
        f"layers/{n}/kernel": rows for n in ("o", "down")} | {f"layers/{n}/bias": PartitionSpec(None, shared) for n in "qkv"}
    for path, leaf in jax.tree.leaves_with_path(model.abstract_params()):
        name = path_name(path)
        assert spec_of(name, leaf.shape, mesh(2, 2, 2)) == wanted.get(name, PartitionSpec()), name
        assert "norm" in name or name in wanted, f"{name} is replicated for want of a rule"


def test_moments_lie_as_their_parameters_and_what_does_not_divide_stays_whole():
    columns = PartitionSpec(None, None, ("tensor", "fsdp"))
    assert spec_of("opt_state/0/mu/layers/q/kernel", (2, 32, 32), mesh(1, 2, 2)) == columns
    assert spec_of("layers/q/kernel", (2, 32, 6), mesh(1, 2, 2)) == PartitionSpec(None, None, ("tensor",))
    assert spec_of("layers/q/kernel", (2, 32, 6), mesh(1, 3, 4)) == PartitionSpec(None, None, ("fsdp",))
    assert spec_of("layers/q/kernel", (2, 32, 7), mesh(1, 2, 2)) == PartitionSpec()
    assert spec_of("embed", (259, 32), mesh(1, 2, 2)) == PartitionSpec()
    assert spec_of("opt_state/0/count", (), mesh(1, 2, 2)) == PartitionSpec()
    assert spec_of("embed", (), mesh(1, 2, 2)) == PartitionSpec()


def test_batches_that_do_not_divide_are_refused_with_what_would():
    check_batch(mesh(2, 3, 4), 12, "prompts.per_step")
    with pytest.raises(ValueError, match=r"prompts.per_step=10 prompts .* 2 x 3 = 6 shards; use 12 or 6, or a smaller mesh"):
        check_batch(mesh(2, 3, 4), 10, "prompts.per_step")
    with pytest.raises(ValueError, match=r"per_step=1 .* use 2, or a smaller mesh"):
        check_batch(mesh(2, 1, 1), 1, "prompts.per_step")


@pytest.mark.parametrize("sizes", ((-1, -1, 1), (-1, -1, -1), (0, 1, 1), (2, 1, 1), (-1, 2, 1), (-2, 1, 1), (-1, 0, 1)))
def test_meshes_that_do_not_fit_one_device_are_refused(sizes):
    with pytest.raises(ValueError, match=rf"mesh data={sizes[0]} x fsdp={sizes[1]} x tensor={sizes[2]} does not fit 1 devices"):
        make_mesh(*sizes, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def eight():
    """What `mesh_cases.py` prints under eight virtual devices."""
    return json.loads(job.lines_of("mesh_cases.py", 8)[-1])


@pytest.mark.slow
def test_three_steps_on_eight_devices_equal_those_on_one(eight):
    assert eight["devices"] == [8, 1]
    assert eight["same_tokens"] == [True, True, True]
    assert eight["difference"] < 2e-4  # of parameters and moments after three Adam steps of 1e-3
    for name in ("loss", "grad_norm", "kl"):
        assert eight[name][0] == pytest.approx(eight[name][1], rel=1e-3, abs=1e-5), name
    assert eight["mismatch"] < 1e-4


@pytest.mark.slow
def test_weights_keep_the_layout_of_the_table_through_updates(eight):
    assert eight["as_ruled"]
    assert eight["shard_of_q"] == [2, 32, 8]


@pytest.mark.slow
def test_one_axis_takes_what_is_left(eight):
    assert [list(shape.values()) for shape in eight["mesh_minus_one"]] == [[8, 1, 1], [4, 2, 1], [2, 1, 4], [1, 8, 1]]
