"""GRPO steps of google-tunix on the work of `work.py`; one JSON line with `step_s` and `rollout_s` per step.

A step is the time from one rollout call to the next. The repairs are those of the README of this folder.
"""
import dataclasses
import itertools
import json
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
if int(os.environ["MICRO"]) > 1:  # or recomputed layers are computed, and kept, all at once
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_enable_concurrency_optimized_scheduler=false")
import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from work import MICRO, MODEL_DIR, PROMPT_WORDS, STEPS, B, G, T, questions, score

PROMPT_LENGTH = 320 if PROMPT_WORDS else 64
rotate = llama.apply_rope
llama.apply_rope = lambda x, p, head_dim, rope_theta=100_000: rotate(x, p, head_dim=head_dim, rope_theta=rope_theta)


def recomputed(layer, *inputs):
    """A decoder layer that keeps its input alone for the backward pass: RematConfig.DECODER, which fails with flax 0.12.8."""
    graph, weights = nnx.split(layer)
    return jax.checkpoint(lambda weights, *inputs: nnx.merge(graph, weights).block(*inputs))(weights, *inputs)


if MICRO > 1:
    llama.DecoderLayer.__call__ = recomputed
mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
shape = llama.ModelConfig(num_layers=30, vocab_size=49152, embed_dim=576, hidden_dim=1536, num_heads=9, head_dim=64,
                          num_kv_heads=3, rope_theta=100_000, norm_eps=1e-5, weight_tying=True)
actor = llama_params.create_model_from_safe_tensors(MODEL_DIR + "/", shape, mesh, dtype=jnp.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
tokenizer.pad_token_id = 0


def batches():
    def chat(q):
        return tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
    for step in questions():
        yield {"prompts": np.array([chat(q) for q, _ in step]), "answer": np.array([a for _, a in step])}


def reward(prompts, completions, answer, **_):
    return [score(completion, wanted) for completion, wanted in zip(completions, answer)]


rollout_config = base_rollout.RolloutConfig(
    max_tokens_to_generate=T, max_prompt_length=PROMPT_LENGTH, kv_cache_size=PROMPT_LENGTH + T + 8, temperature=1.0, top_p=1.0,
    top_k=None, eos_tokens=[49151])
training = rl_cluster.RLTrainingConfig(actor_optimizer=optax.adamw(1e-6), eval_every_n_steps=10**6, max_steps=STEPS,
                                       mini_batch_size=B, train_micro_batch_size=B // MICRO,
                                       rollout_micro_batch_size=B)
roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
cluster = rl_cluster.RLCluster(
    actor=actor, reference=None, tokenizer=tokenizer, cluster_config=rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh), rollout_engine="vanilla", training_config=training,
        rollout_config=rollout_config))
generate, calls, began, sampling = cluster.rollout.generate, itertools.count(), None, 0.0


def report():
    print(json.dumps({"step_s": round(time.perf_counter() - began, 3), "rollout_s": round(sampling, 3)}), flush=True)


def timed(prompts, config, **options):
    global began, sampling
    if began is not None:
        report()
    began = time.perf_counter()
    out = generate(prompts, dataclasses.replace(config, seed=jax.random.PRNGKey(next(calls))), **options)
    sampling = time.perf_counter() - began
    return out


cluster.rollout.generate = timed
algorithm = grpo_learner.GRPOConfig(num_generations=G, num_iterations=1, beta=0.0, epsilon=0.2)
grpo_learner.GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=algorithm).train(batches())
report()
