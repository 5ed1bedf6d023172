"""By which names peers know rows and numbers: each name has one place, and each name of a peer has one or a reason."""
import re

import pytest

from jaxrl_llm import methods
from jaxrl_llm.commands import search
from jaxrl_llm.methods import known_as

# What the peers' sources of August 2026 (TRL: July) list.
PEERS = {
    "verl adv_estimator": """gae grpo reinforce_plus_plus reinforce_plus_plus_baseline remax rloo opo grpo_passk gpg
        rloo_vectorized grpo_vectorized optimal_token_baseline tir_optimal_token_baseline gdpo""",
    "verl loss_mode": "vanilla dppo_tv dppo_kl gspo sapo gpg clip_cov kl_cov geo_mean dro cispo bypass_mode",
    "verl loss_agg_mode": "token-mean token-sum seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm",
    "verl kl_loss_type": "kl k1 abs mse k2 low_var_kl k3 full",
    "trl loss_type": "grpo dr_grpo dapo bnpo cispo sapo luspo vespo",
    "trl importance_sampling_level": "token sequence",
    "trl scale_rewards": "group batch none",
    "trl multi_objective_aggregation": "sum_then_normalize normalize_then_sum",
    "trl": """GRPOTrainer RLOOTrainer DPOTrainer KTOTrainer RewardTrainer SFTTrainer A2POTrainer AsyncGRPOTrainer BCOTrainer
        CPOTrainer DistillationTrainer GKDTrainer GMPOTrainer GOLDTrainer GRPOWithReplayBufferTrainer IWOPDTrainer
        MiniLLMTrainer NashMDTrainer OnlineDPOTrainer ORPOTrainer
        PPOTrainer PRMTrainer SDFTTrainer SDPOTrainer ServerDistillationTrainer
        SSDTrainer TPOTrainer XPOTrainer""",
    "skyrl advantage_estimator": "gae grpo rloo reinforce++ maxrl",
    "skyrl policy_loss_type": """regular dual_clip gspo cispo rollout_is clip_cov kl_cov sapo cross_entropy importance_sampling
        dppo""",
    "skyrl loss_reduction": "token_mean token_mean_legacy sequence_mean seq_mean_token_sum_norm prompt_mean",
    "prime-rl type": "grpo echo max_rl rae hierarchical_grpo opd opsd sft default ipo custom",
    "slime advantage_estimator": "grpo gspo cispo reinforce_plus_plus reinforce_plus_plus_baseline ppo",
    "slime kl_loss_type": "k1 k2 k3 low_var_kl",
    "tunix advantage_estimator": "grpo rloo drgrpo gae",
    "tunix policy_loss_fn": "grpo ppo",
    "tunix loss_agg_mode": """token-mean sequence-mean-token-mean sequence-mean-token-scale seq-mean-token-sum
        sequence-mean-token-sum-norm""",
    "tunix": "GRPOLearner DAPOLearner DrGRPOLearner PPOLearner",
    "tinker loss_fn": "cross_entropy importance_sampling ppo cispo dro gspo stable_reinforce",
}
PAIRS, TEACHERS = "a loss of preferred texts that no row has", "a teacher's whole distribution is not recorded"
DEFAULT = "is what objectives do unless a row says otherwise"
MISSING = {
    **{f"trl {name}Trainer": PAIRS for name in "KTO BCO CPO NashMD OnlineDPO ORPO TPO XPO".split()},
    **{f"trl {name}Trainer": TEACHERS for name in "Distillation GKD GOLD MiniLLM ServerDistillation SDPO".split()},
    **{f"trl {name}Trainer": "trains models of rewards" for name in ("Reward", "PRM")},
    "trl SSDTrainer": "imitates texts of the policy, without rewards",
    **dict.fromkeys(("trl SDFTTrainer", "prime-rl type=opsd"), "the teacher is the policy with a demonstration in its prompt"),
    "trl IWOPDTrainer": "no row",
    "trl A2POTrainer": "regresses on values that are estimated before the run",
    "trl AsyncGRPOTrainer": "a schedule, config.schedule",
    "trl GRPOWithReplayBufferTrainer": "replaces groups of equal rewards by stored groups",
    "trl importance_sampling_level=token": DEFAULT,
    "trl multi_objective_aggregation=sum_then_normalize": DEFAULT,
    "verl loss_mode=bypass_mode": "decides which log-probs are the old ones",
    "verl loss_agg_mode=token-sum": "the learning rate has to fit the number of tokens",
    "tunix loss_agg_mode=sequence-mean-token-sum-norm": "the learning rate has to fit the number of tokens",
    "verl kl_loss_type=full": TEACHERS,
    "skyrl loss_reduction=token_mean_legacy": "depends on the size of micro-batches",
    "prime-rl type=hierarchical_grpo": "proposers and solvers of one task",
    "prime-rl type=custom": "names a function of the user",
    "prime-rl type=ipo": "a band of DPPO's divergence without signs, of no paper",
    "tinker loss_fn=stable_reinforce": "the formula is not published",
}
# Names of a peer that are the names of other rows here, on purpose.
OTHERWISE = {
    "prime-rl type=grpo": "dr_grpo",  # it divides by no standard deviation
    "skyrl policy_loss_type=gspo": "gspo_token",
    "slime advantage_estimator=ppo": "ppo",
    "tinker loss_fn=ppo": "ppo_clip",  # it has no critic
    "tinker loss_fn=gspo": "gspo_token",
}


def listed():
    """All names of `PEERS`."""
    return [f"{key}={value}" if " " in key else f"{key} {value}" for key, values in PEERS.items() for value in values.split()]


def owners():
    """(peers' name, its row or number) for all of them."""
    rows = [(name, row.slug) for row in methods.METHODS.values() for name in row.known_as]
    return rows + [(name, number.text) for number in known_as.NUMBERS for name in number.known_as]


def test_a_name_belongs_to_one_row_or_number_and_is_written_as_all_are():
    names = [name for name, _ in owners()]
    assert not {name for name in names if names.count(name) > 1}
    form = re.compile(rf"({'|'.join(known_as.PEERS)}) (\w+=[\w+-]+|\w+(Trainer|Learner))")
    assert not [name for name in names if not form.fullmatch(name)]


def test_a_name_that_is_a_row_here_belongs_to_that_row():
    for name, owner in owners():
        if known_as.value(name) in methods.METHODS:
            assert owner == OTHERWISE.get(name, known_as.value(name)) or "=" in owner, name
    for name, owner in OTHERWISE.items():
        assert (name, owner) in owners()


def test_each_name_of_a_peer_is_found_or_missing_for_a_reason():
    found = {name for name, _ in owners()}
    assert not [name for name in listed() if name not in found and name not in MISSING]
    assert MISSING.keys() <= set(listed()) and all(MISSING.values())


def test_numbers_of_peers_are_numbers_of_parts():
    for number in known_as.NUMBERS:
        methods.build("grpo", max_len=8, **{number.key: number.text})


def test_an_unknown_method_that_a_peer_has_is_answered_with_the_name_here():
    with pytest.raises(ValueError, match="Unknown method 'gae'. verl adv_estimator=gae is method 'ppo'; SkyRL adv"):
        methods.get("gae")
    with pytest.raises(ValueError, match="TRL loss_type=bnpo is config.objective='aggregation=token_mean'."):
        methods.get("bnpo")


@pytest.mark.slow
def test_search_finds_rows_and_numbers_by_the_names_of_peers():
    """The name alone, or the key with its value, or a value spelled with a hyphen."""
    assert [entry.name for entry in search.matching(["bnpo"])] == ["aggregation=token_mean"]
    assert {entry.name for entry in search.matching(["loss_agg_mode"])} >= {
        "aggregation=token_mean", "aggregation=seq_mean_token_sum", "aggregation=fixed_length"}
    assert [entry.name for entry in search.matching(["low_var_kl"])] == [
        "+ kl(0.001, estimator=k3)", "+ kl(0.001, estimator=k3+)"]
    assert [entry.name for entry in search.matching(["adv_estimator=gae"])] == ["ppo"]
    assert [entry.name for entry in search.matching(["RLOOTrainer"])] == ["rloo"]
    assert [entry.name for entry in search.matching(["verl", "clip-cov"])] == ["clip_cov"]
    assert "dpo(kind=ipo)" in {entry.name for entry in search.matching(["ipo"])}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "name"), [("demonstrations", "sft"), ("imitation", "sft"), ("pairs", "dpo"),
                                             ("rejection sampling", "raft"), ("packing", "texts.pack")])
def test_search_finds_what_learns_from_texts_by_the_words_of_the_field(words, name):
    assert name in {entry.name for entry in search.matching(words.split())}
