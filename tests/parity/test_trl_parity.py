"""The same losses and gradients as TRL's own loss function, where TRL is installed; in float64."""
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.models.logprobs import token_logprobs

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
utils = pytest.importorskip("trl.trainer.utils", exc_type=ImportError)

P, G, T = 3, 4, 6
LOSSES = {  # TRL's loss type and importance level -> ours
    ("grpo", "token"): ("ppo_clip", {"aggregation": "seq_mean_token_mean"}),
    ("bnpo", "token"): ("ppo_clip", {"aggregation": "token_mean"}),
    ("dapo", "token"): ("ppo_clip", {"aggregation": "token_mean"}),
    ("dr_grpo", "token"): ("ppo_clip", {"aggregation": "fixed_length", "max_len": T + 2}),
    ("grpo", "sequence"): ("gspo", {}),
    ("luspo", "sequence"): ("gspo_token", {"aggregation": "seq_mean_token_sum"}),
    ("sapo", "token"): ("sapo", {"tau_neg": 1.5}),
    ("cispo", "token"): ("cispo", {"max_ratio": 3.0, "aggregation": "token_mean"}),
}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def arrays():
    random = np.random.default_rng(0)
    mask = np.arange(T) < random.integers(1, T + 1, (P, G, 1))
    old = -random.gamma(1.0, size=(P, G, T))
    return {"mask": mask, "old": old, "new": old + 0.4 * random.normal(size=old.shape),
            "ref": old + 0.2 * random.normal(size=old.shape), "advantages": random.normal(size=(P, G))}


def theirs(data, loss_type, level, *, low=0.2, high=0.2, beta=0.0):
    """Loss and its gradient in the log-probs, from `GRPOTrainer._compute_loss` around given log-probs."""
    def flat(name):
        return torch.tensor(data[name].reshape(P * G, *data[name].shape[2:]).astype(float))
    logprobs = flat("new").requires_grad_()
    trainer = mock.MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (logprobs, torch.zeros_like(logprobs), None)
    trainer.accelerator.gather.side_effect = lambda x: x
    trainer.accelerator.num_processes = 1
    trainer.args = types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1, entropy_coef=0.0,
                                         sapo_temperature_pos=1.0, sapo_temperature_neg=1.5)  # exact in float32
    trainer.model.training = True
    settings = dict(top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level, beta=beta,
                    loss_type=loss_type, epsilon_low=low, epsilon_high=high, use_vllm=False, aux_loss_enabled=False,
                    current_gradient_accumulation_steps=1, max_completion_length=T + 2, _entropy_bonus_enabled=False)
    for name, value in settings.items():
        setattr(trainer, name, value)
    ids = torch.zeros(P * G, T, dtype=torch.long)
    mask = flat("mask")
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
              "advantages": flat("advantages"), "old_per_token_logps": flat("old"), "ref_per_token_logps": flat("ref"),
              "num_items_in_batch": mask.sum()}
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad.numpy().reshape(P, G, T)


def ours(data, name, **options):
    objective = objectives.of(name, **options)
    rollouts = Rollouts(mask=jnp.asarray(data["mask"]), valid=jnp.ones((P, G), bool), rewards=jnp.zeros((P, G)),
                        old_logprobs=jnp.asarray(data["old"]), ref_logprobs=jnp.asarray(data["ref"]))
    advantages = jnp.asarray(np.broadcast_to(data["advantages"][..., None], (P, G, T)))
    def loss(logprobs):
        return objective.update(logprobs, rollouts, advantages, objective.init())[0]
    return jax.value_and_grad(loss)(jnp.asarray(data["new"]))


@pytest.mark.parametrize("loss_type, level", LOSSES)
@pytest.mark.parametrize("beta", (0.0, 0.1))
def test_losses_and_gradients(loss_type, level, beta):
    data = arrays()
    name, options = LOSSES[loss_type, level]
    if beta and name != "ppo_clip":
        pytest.skip("their KL term is compared with ppo_clip")
    bounds = {"low": 0.2, "high": 0.28}
    if name == "cispo":
        bounds = {"low": 1.0, "high": 3.0}  # TRL's epsilon_high of CISPO bounds the ratio itself
    elif name != "sapo":  # which has no clip
        options = options | {"clip_low": 0.2, "clip_high": 0.28}
    wanted, wanted_slope = theirs(data, loss_type, level, beta=beta, **bounds)
    result, slope = ours(data, f"{name} + kl({beta})", **options)
    np.testing.assert_allclose(result, wanted, rtol=1e-10)
    np.testing.assert_allclose(slope, wanted_slope, rtol=1e-9, atol=1e-12)
    assert np.abs(wanted_slope).max() > 0


def test_log_probs_and_entropies():
    random = np.random.default_rng(1)
    normed, unembedding = random.normal(size=(7, 5)), random.normal(size=(11, 5))
    tokens = random.integers(0, 11, 7)
    result, entropies = token_logprobs(jnp.asarray(normed), jnp.asarray(unembedding), jnp.asarray(tokens), chunk=3)
    logits = torch.tensor(normed @ unembedding.T)
    np.testing.assert_allclose(result, utils.selective_log_softmax(logits, torch.tensor(tokens)), rtol=1e-5)
    np.testing.assert_allclose(entropies, utils.entropy_from_logits(logits), rtol=1e-5)
