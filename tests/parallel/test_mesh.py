"""The partition table, refusals, and a training step on eight virtual devices that equals one device's."""
import dataclasses
import types

import jax
import job
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.engines.compaction import holds
from jaxrl_llm.models import Experts, ModelConfig, Transformer
from jaxrl_llm.parallel import by_process, check_batch, make_mesh, mesh_sizes, sampler_mesh
from jaxrl_llm.parallel.mesh import lay_out
from jaxrl_llm.parallel.rules import path_name, spec_of


def mesh(data, fsdp, tensor):
    return {"data": data, "fsdp": fsdp, "tensor": tensor}


def test_every_matrix_of_the_model_has_a_rule():
    dense = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
                        mlp_size=64, tie_embeddings=False, qkv_bias=True, qk_norm=True)
    columns, rows = PartitionSpec(None, "fsdp", "tensor"), PartitionSpec(None, "tensor", "fsdp")
    table = PartitionSpec("tensor", "fsdp")
    wanted = {"embed": table, "unembed": table} | {f"layers/{n}/kernel": columns for n in (
        "q", "k", "v", "gate", "up", "shared_gate", "shared_up")} | {
        f"layers/{n}/kernel": rows for n in ("o", "down", "shared_down")} | {
        f"layers/experts_{n}/kernel": PartitionSpec(None, None, "fsdp", "tensor") for n in ("gate", "up")} | {
        "layers/experts_down/kernel": PartitionSpec(None, None, "tensor", "fsdp")} | {
        f"layers/{n}/bias": PartitionSpec(None, "tensor") for n in "qkv"}
    mixture = dataclasses.replace(dense, experts=Experts(4, 2, 16, shared_size=8))
    for path, leaf in jax.tree.leaves_with_path([Transformer(c).abstract_params() for c in (dense, mixture)]):
        name = path_name(path[1:])
        assert spec_of(name, leaf.shape, mesh(2, 2, 2)) == wanted.get(name, PartitionSpec()), name
        small = "norm" in name or name in ("layers/router/kernel", "layers/shared_weight/kernel")
        assert small or name in wanted, f"{name} is replicated for want of a rule"


def test_moments_lie_as_their_parameters_and_what_does_not_divide_stays_whole():
    assert spec_of("opt_state/0/mu/layers/q/kernel", (2, 32, 32), mesh(1, 2, 2)) == PartitionSpec(None, "fsdp", "tensor")
    assert spec_of("layers/q/kernel", (2, 33, 6), mesh(1, 2, 2)) == PartitionSpec(None, None, "tensor")
    assert spec_of("layers/q/kernel", (2, 33, 6), mesh(1, 3, 4)) == PartitionSpec(None, "fsdp")
    assert spec_of("layers/q/kernel", (2, 33, 7), mesh(1, 2, 2)) == PartitionSpec()
    assert spec_of("embed", (259, 32), mesh(1, 2, 2)) == PartitionSpec(None, "fsdp")
    assert spec_of("opt_state/0/count", (), mesh(1, 2, 2)) == PartitionSpec()
    assert spec_of("embed", (), mesh(1, 2, 2)) == PartitionSpec()


def test_batches_that_do_not_divide_are_refused_with_what_would():
    def laid(*sizes):
        return types.SimpleNamespace(shape=mesh(*sizes))
    check_batch(laid(2, 3, 4), 12, "prompts.per_step")
    with pytest.raises(ValueError, match=r"prompts.per_step=10 prompts .* 2 x 3 = 6 shards; use 12 or 6, or a smaller mesh"):
        check_batch(laid(2, 3, 4), 10, "prompts.per_step")
    with pytest.raises(ValueError, match=r"per_step=1 .* use 2, or a smaller mesh"):
        check_batch(laid(2, 1, 1), 1, "prompts.per_step")


@pytest.mark.parametrize("sizes", ((-1, -1, 1), (-1, -1, -1), (0, 1, 1), (2, 1, 1), (-1, 2, 1), (-2, 1, 1), (-1, 0, 1)))
def test_meshes_that_do_not_fit_one_device_are_refused(sizes):
    with pytest.raises(ValueError, match=rf"mesh data={sizes[0]} x fsdp={sizes[1]} x tensor={sizes[2]} does not fit 1 devices"):
        make_mesh(*sizes, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def eight():
    """What `mesh_cases.py` prints under eight virtual devices."""
    return job.result_of("mesh_cases.py", 8)


@pytest.fixture(scope="module")
def experts():
    return job.result_of("expert_cases.py", 8)


@pytest.fixture(scope="module")
def placed():
    return job.result_of("placed_cases.py", 8)


@pytest.fixture(scope="module")
def rollouts():
    return job.result_of("rollout_cases.py", 8)


@pytest.mark.slow
def test_three_steps_on_eight_devices_equal_those_on_one(eight):
    assert eight["devices"] == [8, 1]
    assert eight["same_tokens"] == [True, True, True]
    assert eight["difference"] < 2e-4  # of parameters and moments after three Adam steps of 1e-3
    for name in ("loss", "grad_norm", "kl"):
        assert eight[name][0] == pytest.approx(eight[name][1], rel=1e-3, abs=1e-5), name
    assert eight["mismatch"] < 1e-4
    assert eight["solved"][0] == eight["solved"][1]  # of held-out problems


@pytest.mark.slow
@pytest.mark.parametrize("axis", ("data", "fsdp", "tensor"))
def test_three_steps_along_one_axis_equal_those_on_one_device(eight, axis):
    result = eight["alone"][axis]
    assert result["same_tokens"] and result["difference"] < 2e-4
    for name, (ours, wanted) in result["metrics"].items():
        assert ours == pytest.approx(wanted, rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "shard"), (("tensor", [2, 4, 32, 6]), ("all", [2, 4, 16, 12])))
def test_three_steps_of_a_mixture_of_experts_equal_those_on_one_device(experts, axis, shard):
    """Each expert lies in pieces, and its load is balanced over the batch of all devices."""
    result = experts["experts"][axis]
    assert result["same_tokens"] and result["difference"] < 2e-4 and result["shard_of_gate"] == shard
    for name, (ours, wanted) in result["metrics"].items():
        assert ours == pytest.approx(wanted, rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_in_float32(experts):
    """Also because CPUs crash on sums in bfloat16 within a shard_map."""
    assert experts["bfloat16"][0] == pytest.approx(experts["bfloat16"][1], rel=0.02)


@pytest.mark.slow
def test_weights_keep_the_layout_of_the_table_through_updates(eight):
    assert eight["as_ruled"]
    assert eight["shard_of_q"] == [2, 16, 16]


@pytest.mark.slow
def test_one_axis_takes_what_is_left(eight):
    assert [shape["data"] for shape in eight["mesh_minus_one"]] == [8, 4, 2, 1]
    assert [shape["fsdp"] for shape in eight["mesh_minus_one"]] == [1, 2, 1, 8]
    assert [shape["tensor"] for shape in eight["mesh_minus_one"]] == [1, 1, 4, 1]


@pytest.mark.slow
def test_no_device_ever_holds_more_of_published_weights_than_its_share(placed):
    result = placed["published"]
    assert result["equal"] and result["as_ruled"]
    assert result["peak"] == result["own"] < 0.27 * result["whole"]  # norms and what does not divide are whole everywhere
    assert result["asked"] == [[0.25], [0.25], [0.25]]  # nor is more read than the pieces


def slices_of(count: int, chips: int) -> list:
    """TPU slices as jax reports them: a line of chips each."""
    return [types.SimpleNamespace(id=i, platform="tpu", device_kind="TPU v5p", slice_index=i // chips, process_index=i // 4,
                                  coords=(i % chips, 0, 0), core_on_chip=0) for i in range(count * chips)]


def test_tpu_slices_share_the_data_axis_alone():
    laid = lay_out((4, 2, 1, 1, 2), slices_of(2, 8))
    assert laid.shape == (4, 2, 1, 1, 2)
    assert [{device.slice_index for device in part.flat} for part in laid] == [{0}, {0}, {1}, {1}]
    with pytest.raises(ValueError, match="data=3 does not divide by 2 TPU slices: between slices there is only data; use 2"):
        lay_out((3, 1, 1, 1, 4), slices_of(2, 6))


class Chip:
    """A device of a process."""

    def __init__(self, number: int, process: int):
        self.id, self.process_index = number, process


def test_replicas_take_the_devices_of_a_process_where_neighbours_are_those_of_others():
    """The order of a v5p slice of 2 x 2 x 2 chips, whose hosts have 2 x 2 x 1: wires go from host to host."""
    def processes(devices):
        return [device.process_index for device in devices.flat]

    def laid(shape, owners):
        chips = np.array([Chip(n, owner) for n, owner in enumerate(owners)], object)
        return Mesh(chips.reshape(shape), ("data", "fsdp", "seq", "expert", "tensor"))

    ring = by_process(laid((1, 8, 1, 1, 1), [0, 1, 0, 1, 0, 1, 0, 1]))
    assert [device.id for device in ring.devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert processes(sampler_mesh(ring, 4).devices[0]) == [0] * 4
    pairs = by_process(laid((1, 4, 1, 1, 2), [0, 0, 1, 1, 0, 0, 1, 1]))
    assert [device.id for device in pairs.devices.flat] == [0, 1, 4, 5, 2, 3, 6, 7]
    straddling = laid((4, 1, 1, 1, 2), [0, 1] * 4)
    assert by_process(straddling) is straddling


def test_rules_may_name_axes_that_nothing_is_laid_out_over_yet():
    made = make_mesh(devices=jax.devices()[:1])
    assert dict(made.shape) == {"data": 1, "fsdp": 1, "seq": 1, "expert": 1, "tensor": 1}
    placed = jax.device_put(jax.numpy.ones((4, 3)), NamedSharding(made, PartitionSpec(("tensor", "expert"), "seq")))
    assert placed.addressable_shards[0].data.shape == (4, 3)
    with pytest.raises(TypeError, match="expert"):
        make_mesh(expert=1)


def test_a_sequence_axis_cuts_rows_and_spreads_the_rest_as_fsdp_does():
    assert mesh_sizes(8, data=1, fsdp=2, seq=4) == {"data": 1, "fsdp": 2, "tensor": 1, "seq": 4}
    assert "seq" not in mesh_sizes(8)
    sizes = dict(data=1, fsdp=2, seq=4, tensor=1)
    assert spec_of("layers/q/kernel", (2, 16, 8), sizes) == PartitionSpec(None, ("fsdp", "seq"), "tensor")
    assert spec_of("layers/q/kernel", (2, 6, 8), sizes) == PartitionSpec(None, "fsdp", "tensor")  # 6 divides by 2, not by 8
    assert spec_of("layers/q/kernel", (2, 16, 8), sizes | {"seq": 1}) == PartitionSpec(None, "fsdp", "tensor")
    cut = types.SimpleNamespace(shape=sizes)
    check_batch(cut, 2, "learner.packed_rows", "rows")
    with pytest.raises(ValueError, match=r"per_step=4 prompts .* data x fsdp x seq = 1 x 2 x 4 = 8 shards; use 8, or a"):
        check_batch(cut, 4, "prompts.per_step")
    with pytest.raises(ValueError, match=r"mesh data=1 x fsdp=1 x tensor=1 x seq=3 does not fit 8 devices"):
        mesh_sizes(8, data=1, seq=3)


PER_TENSOR = {  # the weights of `rollout_cases` on a device of a mesh with tensor=2: half of the third axis, or of the second
    "embed": [32, 32], "unembed": [32, 32], "final_norm/scale": [32], "layers/attention_norm/scale": [1, 32],
    "layers/mlp_norm/scale": [1, 32], "layers/q/kernel": [1, 32, 16], "layers/q/bias": [1, 16], "layers/k/kernel": [1, 32, 8],
    "layers/k/bias": [1, 8], "layers/v/kernel": [1, 32, 8], "layers/v/bias": [1, 8], "layers/o/kernel": [1, 16, 32],
    "layers/gate/kernel": [1, 32, 24], "layers/up/kernel": [1, 32, 24], "layers/down/kernel": [1, 24, 32]}
MATRICES, BIASES = 2 * 64 * 32 + 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48, 32 + 16 + 16  # weights of nine and three leaves


@pytest.mark.slow
def test_weights_move_to_the_layout_of_rollouts_by_gathers_over_fsdp_alone(rollouts):
    for mesh, fsdp, tensor in (("mixed", 2, 2), ("fsdp", 8, 1)):
        result = rollouts["moved"][mesh]
        assert result["equal"] and result["as_ruled"] and result["kept"] and not result["untouched"]
        assert {name.split("/")[-1] for name, dtype in result["dtypes"].items() if dtype == "float32"} == {"scale", "bias"}
        assert {*result["laid"]} == {"bf16"} and len(result["laid"]) % 2 == 0  # before and after they are gathered: cast first
        assert result["sent"]["kinds"] == ["all-gather"] and result["sent"]["groups"] == [fsdp]
        assert result["sent"]["bytes"] == 4 * MATRICES / tensor  # results of float32: what a device holds at the end, no more
    assert rollouts["moved"]["mixed"]["shards"] == PER_TENSOR
    wrong = rollouts["wrong_order"]["kinds"]
    assert wrong == ["all-gather", "collective-permute"]  # which other layouts would cost


@pytest.mark.slow
def test_weights_move_to_replicas_of_the_sampler_layer_by_layer(rollouts):
    for result in rollouts["replicas"]:
        assert result["equal"] and result["again"] and result["apart"] and result["kinds"] == ["all-gather"]
        assert result["taken"] <= 1.6  # of one matrix of a layer


@pytest.mark.slow
def test_weights_that_are_whole_over_fsdp_already_stay_as_they_are(rollouts):
    result = rollouts["moved"]["without"]
    assert result["untouched"] and result["as_ruled"] and result["sent"]["kinds"] == [] and result["laid"] == []
    assert result["shards"] == PER_TENSOR and set(result["dtypes"].values()) == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ("mixed", "fsdp", "without"))
def test_copies_of_weights_lie_as_rollouts_read_them(rollouts, mesh):
    assert rollouts["moved"][mesh]["apart"]
    assert rollouts["moved"][mesh]["halved"] == sorted(name for name in PER_TENSOR if not name.endswith("scale"))


@pytest.mark.slow
def test_policies_and_prompts_are_judged_apart(placed):
    """V0's success of M policies on Q prompts needs nothing of other policies and prompts."""
    result = placed["judged"]
    assert not any(result["sent"].values()) and result["distance"] < 1e-6
    assert result["shape"] == [4, 8] and result["on_each"] == [2, 2]


@pytest.mark.slow
def test_every_shard_of_a_batch_decodes_until_its_own_rows_have_stopped(rollouts):
    longest = [max(lengths) for lengths in rollouts["lengths"]]
    assert min(longest) < 6 and max(longest) == 24 and len(set(longest)) == 4  # of four prompts on one device
    for mesh in ("pieces", "whole"):
        result = rollouts["sampled"][mesh]
        assert result["same"] and result["difference"] < 1e-5
        assert result["steps"] == [length - 1 for length in longest]  # the first token needs none
    assert rollouts["sampled"]["whole"]["sent"]["kinds"] == []
    # Permutations would wait, on CPUs, for shards that have stopped; these stay within a pair of `tensor`.
    assert rollouts["sampled"]["pieces"]["sent"]["kinds"] == ["all-gather", "all-reduce", "all-to-all"]
    assert rollouts["sampled"]["pieces"]["sent"]["groups"] == [2]


@pytest.mark.slow
def test_shards_leave_their_finished_rows_out_by_themselves_and_send_no_cache(rollouts):
    result = rollouts["halved"]
    lengths = np.array(result["lengths"]).reshape(4, 2, 8)  # two prompts on each of data x fsdp
    assert result["same"] and result["steps"] == (lengths.max((1, 2)) - 1).tolist()
    assert all(holds(shard > 33) and (shard > 33).any() for shard in lengths)  # each is halved, in the middle at the latest
    assert result["sent"]["kinds"] == ["all-gather", "all-reduce", "all-to-all"] and result["sent"]["groups"] == [2]
    assert max(result["sent"]["sizes"]) < 2 * 4 * 8 * 96 * 4  # keys of half of the rows, one layer and head


@pytest.mark.slow
def test_heads_that_do_not_divide_over_tensor_are_sampled_whole(rollouts):
    result = rollouts["sampled"]["undivided"]
    assert result["same"] and result["steps"] == [23]  # two key/value heads over four devices
    assert result["sent"]["kinds"] == ["all-gather"] and result["sent"]["bytes"] == 4 * (MATRICES + BIASES)  # once


@pytest.mark.slow
def test_other_optimisers_on_a_mesh_resume_bit_for_bit_with_their_state_on_the_host():
    """Two devices of fsdp x two of tensor: matrices of moments in four pieces, what has lost an axis is whole."""
    cases = job.result_of("optimizer_cases.py", 4)
    for name, result in cases.items():
        assert result["same"] and result["as_ruled"] and result["kinds"] == ["pinned_host"], (name, result)
    kernel = "layers/q/kernel"
    factored = cases["adafactor"]["shapes"]
    assert factored[f"0/v_row/{kernel}"] == factored[f"0/v_col/{kernel}"] == [[2, 128], [2, 128]]
    assert factored["0/v/layers/attention_norm/scale"] == [[2, 128], [2, 128]]
    assert {tuple(map(tuple, shapes)) for path, shapes in cases["muon"]["shapes"].items() if path.endswith(kernel)} == {
        ((2, 128, 128), (2, 64, 64))}
