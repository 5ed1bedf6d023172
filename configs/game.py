"""A text adventure without download: find the key, take it, open the chest.

  bash scripts/setup.sh && source .venv/bin/activate

  :tiny           (default) a policy of 2 layers, from scratch: a supervised warm-up on turns of the oracle, some of them
                  random, then RL on trajectories of up to 8 turns
                  python experiments/train.py --config=configs/game.py --workdir=runs/game
  :MODEL-MACHINE  a published model. Mazes of 3 x 3 rooms, 12 turns of 64 tokens; on a cpu of 2 x 2 rooms, 4 turns
                  python experiments/train.py --config=configs/game.py:qwen2.5_1.5b-h100 --workdir=runs/game
"""
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.recipes import sized
from jaxrl_llm.setup.variants import parse

TEMPLATE = "{% for m in messages %}{{ m.content + ('<|eos|>' if m.role == 'assistant' else '') + '\\n' }}{% endfor %}"


def get_config(variant: str = "tiny"):
    c = default_config()
    return _tiny(c) if variant == "tiny" else _published(c, variant)


def _tiny(c):
    c.environment = "treasure(size=2, brief=True)"
    c.model.chat_template = TEMPLATE
    c.model.hidden_size = 64
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.mlp_size = 256
    c.prompts.per_step = 8
    c.sampling.group = 8
    c.prompts.max_tokens = 64
    c.sampling.max_turns = 8
    c.sampling.turn_tokens = 12
    c.sampling.max_tokens = 320
    c.warmup.steps = 300
    c.warmup.batch = 16
    c.warmup.strays = 0.2
    c.warmup.learning_rate = 3e-3
    c.optimizer.learning_rate = 5e-4
    c.optimizer.schedule = "linear"  # with a constant rate the held-out score falls after the policy solves all training mazes
    c.steps = 80
    c.eval.problems = 64
    c.eval.every = 40
    return c


def _published(c, variant):
    _, machine = parse(variant)
    c.environment = f"treasure(size={2 if machine == 'cpu' else 3})"
    c.prompts.max_tokens = 256
    c.sampling.max_turns = 12
    c.sampling.turn_tokens = 64
    c.sampling.max_tokens = 1536
    c.optimizer.learning_rate = 1e-6
    c.steps = 200
    c.eval.problems = 64
    c.eval.every = 50
    c = sized(c, variant)
    c.sampling.max_turns = min(c.sampling.max_turns, c.sampling.max_tokens // 64)  # a CPU has 256 tokens
    return c
