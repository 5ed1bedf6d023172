"""DPO on one batch of pairs: losses of TRL's `DPOTrainer` for the same weights, as literals, and anew where TRL is installed.

With TRL in a Python of its own: PYTHONPATH=. PYTHON -m pytest tests/parity/test_trl_texts.py
"""
import functools

import given_texts
import jax
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.learning import layouts
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import ModelConfig, Transformer, weights

MODEL = Transformer(ModelConfig(vocab_size=40, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48, tie_embeddings=False))
PAIRS = (([5, 6], [7, 8], [7, 9, 4]), ([2], [3], [4, 5, 6]), ([11, 12, 13], [14, 15, 16, 17], [18]))  # prompt, chosen, rejected
# Our objective, TRL's loss type and beta; the loss and the norm of its gradient by TRL 1.16.0 with torch 2.13.0.
CASES = (("dpo", "sigmoid", 0.1, 0.705735, 0.4587645), ("dpo(beta=0.5)", "sigmoid", 0.5, 0.7640186, 2.481573),
         ("dpo(kind=ipo)", "ipo", 0.1, 26.16962, 42.72156))


@functools.cache
def params(seed):
    """Weights by numpy, whose draws are the same in every version of every library."""
    draws, shapes = np.random.default_rng(seed), jax.eval_shape(MODEL.init, jax.random.key(0))
    return jax.tree.map(lambda x: (draws.normal(size=x.shape) * 0.3).astype(np.float32), shapes)


def groups():
    def text(prompt, rest):
        return given_texts.text(prompt + rest, [0] * len(prompt) + [1] * len(rest), len(prompt))
    return [(text(prompt, chosen), text(prompt, rejected)) for prompt, chosen, rejected in PAIRS]


@pytest.mark.parametrize(("ours", "wanted", "norm"), [(ours, *numbers) for ours, _, _, *numbers in CASES])
def test_the_loss_is_that_of_trl(ours, wanted, norm):
    objective, optimizer = objectives.of(ours), optax.sgd(0.1)
    layout = layouts.packed(Policy(MODEL, chunk=24), objective, optimizer, (16,), 1, clip_norm=None)
    rollouts = given_texts.rollouts(groups())
    rollouts = rollouts.replace(ref_logprobs=layout.logprobs(params(1), None, rollouts)[0])
    state = state_lib.create(params(0), None, optimizer, advantages.make("reinforce"), objective, jax.random.key(1))
    _, metrics = layout.update(state, rollouts, np.zeros(rollouts.mask.shape, np.float32))
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-4)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """`(policy, reference, tokenizer)` of transformers, whose words of a text are its ids."""
    pytest.importorskip("trl.trainer.dpo_trainer", exc_type=ImportError)
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    models = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("model")
        weights.save_hf(folder, MODEL.config, params(seed))
        models.append(transformers.AutoModelForCausalLM.from_pretrained(folder).float())
    words = Tokenizer(WordLevel({str(i): i for i in range(40)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return *models, transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="39", pad_token="38")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "beta", "wanted", "norm"), [case[1:] for case in CASES])
def test_trl_has_this_loss(kind, beta, wanted, norm, theirs, tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer
    policy, reference, tokenizer = theirs
    config = DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, loss_type=[kind], beta=beta, report_to="none")
    rows = [{"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected} for prompt, chosen, rejected in PAIRS]
    some = Dataset.from_list([{"prompt": "5 6", "chosen": " 7", "rejected": " 8"}])
    trainer = DPOTrainer(policy, reference, args=config, train_dataset=some, processing_class=tokenizer)
    policy.zero_grad()
    loss = trainer.compute_loss(policy, trainer.data_collator(rows))
    loss.backward()
    found = loss.item(), sum(x.grad.square().sum() for x in policy.parameters()).sqrt().item()
    assert found == pytest.approx((wanted, norm), rel=1e-5)
