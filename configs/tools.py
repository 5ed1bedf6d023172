"""A calculator as a tool: products that the policy cannot compute itself, but can request.

  bash scripts/setup.sh && source .venv/bin/activate

  :tiny           (default) bytes, a 2-layer policy from scratch, supervised warm-up on the oracle's turns until some calls and
                  answers are right, then RL on trajectories of two turns. Minutes on two CPU cores.
                  python experiments/train.py --config=configs/tools.py --workdir=runs/tools
  :smollm2        SmolLM2-135M-Instruct, which reads one example of a call (get it with scripts/get_smollm2.sh).
                  python experiments/train.py --config=configs/tools.py:smollm2 --workdir=runs/tools_smollm2
  :MODEL-MACHINE  a published model, with calls as Qwen writes them. Three turns of 256 tokens, on a cpu of 128
                  python experiments/train.py --config=configs/tools.py:qwen2.5_1.5b-h100 --workdir=runs/tools
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.recipes import sized

TEMPLATE = "{% for m in messages %}{{ m.content + ('<|eos|>' if m.role == 'assistant' else '') + '\\n' }}{% endfor %}"
# The chat template of SmolLM2 does not describe tools, so a rule and an example come before the problem.
PREFACE = [
    {"role": "system", "content": "You can use a calculator. To use it, write only the call. You then read the result, and "
                                  "answer with just the number."},
    {"role": "user", "content": "What is 27 * 45? Answer with just the number."},
    {"role": "assistant", "content": '[calculator(expression="27 * 45")]'},
    {"role": "tool", "content": "1215"},
    {"role": "assistant", "content": "1215"},
]


def get_config(variant: str = "tiny"):
    c = default_config()
    own = {"tiny": _tiny, "smollm2": _smollm2}
    return own[variant](c) if variant in own else _published(c, variant)


def _tiny(c):
    c.environment = "tool_use(options={'level': 'mul2'}, parser=llama3, turns=2)"
    c.model.chat_template = TEMPLATE
    c.model.hidden_size = 64
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.mlp_size = 256
    c.prompts.per_step = 16
    c.sampling.group = 8
    c.prompts.max_tokens = 8
    c.sampling.max_turns = 2
    c.sampling.turn_tokens = 72
    c.sampling.max_tokens = 96
    c.warmup.steps = 2000
    c.warmup.batch = 16
    c.warmup.loss = 0.02
    c.warmup.learning_rate = 3e-3
    c.optimizer.learning_rate = 1e-3
    c.steps = 300
    c.eval.problems = 64
    c.eval.every = 100
    return c


def _smollm2(c):
    c.model.path = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.environment = f"tool_use(options={{'level': 'mul2', 'chat': True}}, parser=pythonic, turns=3, preface={PREFACE!r})"
    c.prompts.per_step = 8
    c.sampling.group = 8
    c.prompts.max_tokens = 128
    c.sampling.max_turns = 3
    c.sampling.turn_tokens = 24
    c.sampling.max_tokens = 96
    c.learner.micro_batches = 4
    c.optimizer.learning_rate = 2e-5
    c.steps = 10
    c.eval.problems = 24
    c.eval.every = 5
    c.checkpoint.every = 5
    return c


def _published(c, variant):
    c.environment = "tool_use(options={'level': 'mul2', 'chat': True}, parser=hermes, turns=3)"
    c.prompts.max_tokens = 512
    c.sampling.max_turns = 3
    c.sampling.max_tokens = 1024
    c.optimizer.learning_rate = 1e-6
    c.steps = 200
    c.eval.problems = 64
    c.eval.every = 50
    c = sized(c, variant)
    c.sampling.turn_tokens = min(256, c.sampling.max_tokens // 2)  # a CPU has 256 tokens
    return c
