"""A tiny byte model behind a real server on a loopback port, and its expected answers."""
import contextlib
import functools
import socket
import threading
import time

import jax
import uvicorn

from jaxrl_llm.engines import Sampling
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.serving.app import ServedModel, make_app
from jaxrl_llm.serving.connections import Connection
from jaxrl_llm.serving.worker import Worker
from jaxrl_llm.tokenizers import ByteTokenizer

TEMPLATE = ("{% if tools %}[{% for t in tools %}{{ t.function.name }};{% endfor %}]{% endif %}"
            "{% for m in messages %}{{ m.role }}: {{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
            "{{ '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}")
TOKENIZER = ByteTokenizer(TEMPLATE)
MODEL = Transformer(ModelConfig(vocab_size=259, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48, tie_embeddings=False))
KEY, SLOTS, SLOT_TOKENS = jax.random.key(0), 4, 128


@functools.cache
def params(seed=0):
    fresh = MODEL.init(jax.random.key(seed))
    louder = jax.tree.map(lambda x: x * 8 if x.ndim >= 3 else x, fresh["layers"])  # so that the context matters
    return fresh | {"layers": louder, "embed": fresh["embed"] * 30, "unembed": fresh["unembed"] * 8}


def make_worker(seed=0):
    one = SlotEngine(MODEL, params(seed), KEY, slots=SLOTS, slot_tokens=SLOT_TOKENS, tokenizer=TOKENIZER, chunks=(4,))
    return Worker(one, "first")


def sampled(prompt, seeds, limit, weights=0, sampling=Sampling(), **fields):
    """`seed -> node` by an engine of this process."""
    one = SlotEngine(MODEL, params(weights), KEY, slots=SLOTS, slot_tokens=SLOT_TOKENS, tokenizer=TOKENIZER, chunks=(4,))
    one.submit(*(Request(seed, limit, prompt, sampling=sampling, stop_tokens=TOKENIZER.stop_ids, **fields) for seed in seeds))
    result = {}
    while nodes := one.collect():
        result |= {node.uid: node for node in nodes}
    return result


@contextlib.contextmanager
def serving(worker, port=0, config=MODEL.config, around=lambda app: app, **options):
    """`http://...` of a server in a thread of its own; `around` may put another application before it."""
    with listening(around(make_app(ServedModel("tiny", config, TOKENIZER, worker, **options))), port) as url:
        yield url


@contextlib.contextmanager
def listening(app, port=0):
    """`http://...` of an application in a thread of its own, which ends with the block."""
    sock = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()


def until(holds, seconds=20):
    """Waits for an effect of another thread."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)
