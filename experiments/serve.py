"""Serves a model over HTTP in OpenAI's format: completions and chats, streamed or whole, with token ids and log-probs.

  python experiments/serve.py --model=models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
  python experiments/serve.py --workdir=runs/first [--step=100] --port=8001

Clients share the slots of one engine. It listens on this machine only; another --host requires a token in the environment
variable JAXRL_LLM_TOKEN, which clients send as bearer token. With --weights_from=FOLDER weights are published by
POST /update_weights_from_disk. docs/guides/serving.md has the fields and limits.

  python experiments/serve.py --tinker --model=models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

offers Tinker's API instead of OpenAI's: clients train LoRA adapters on the model and sample from them.
"""
import importlib
import math
import os
import re
import socket
from pathlib import Path

from absl import flags

from jaxrl_llm.commands import command_line

_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory or .gguf file.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "", "With --model: another tokenizer than the one beside the weights.")
_DTYPE = flags.DEFINE_string("dtype", None, "With --model: what it computes in, float32 (default) or bfloat16.")
_INT8_CACHE = flags.DEFINE_bool("int8_cache", False, "With --model: keep keys and values in eight bits.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of experiments/train.py, whose newest checkpoint is served.")
_STEP = flags.DEFINE_integer("step", None, "With --workdir: the checkpoint of this step.")
_NAME = flags.DEFINE_string("name", None, "What clients call the model; default: the name of the file or folder.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any that is free.", lower_bound=0, upper_bound=65535)
_SLOTS = flags.DEFINE_integer("slots", 16, "Completions that are sampled at the same time; others wait.", lower_bound=1)
_SLOT_TOKENS = flags.DEFINE_integer("slot_tokens", 0, "Tokens of a prompt and its completion at most; 0: the model's own "
                                    "limit, or 4096.", lower_bound=0)
_PAGED = flags.DEFINE_bool("paged_cache", False, "Keep keys and values in pages of one pool, which equal beginnings share.")
_MESH = flags.DEFINE_string("mesh", "", "Devices that work together, such as 'data=2,tensor=4': rows are spread over data, "
                            "matrices cut over tensor; one size may be -1, the rest. Default: one device.")
_REQUESTS = flags.DEFINE_integer("requests", 256, "Requests at the same time; further ones are refused (429).", lower_bound=1)
_COMPLETIONS = flags.DEFINE_integer("completions", 64, "Completions of a request at most.", lower_bound=1)
_TINKER = flags.DEFINE_bool("tinker", False, "Speak Tinker's API: clients train LoRA adapters and sample from them.")
_CHECKPOINTS = flags.DEFINE_string("checkpoints", "runs/tinker", "With --tinker: folder of the adapters that clients save.")
_RANK = flags.DEFINE_integer("rank", 32, "With --tinker: rank of an adapter at most.", lower_bound=1)
_MODELS = flags.DEFINE_integer("models", 16, "With --tinker: adapters in training at most.", lower_bound=1)
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 8192, "With --tinker: tokens of a forward and backward pass, which bound "
                                     "its memory; one example may have more.", lower_bound=1)
_WEIGHTS_FROM = flags.DEFINE_string("weights_from", None, "Folder under which weights may be published; default: nowhere.")


def check_token(host: str, token: str) -> None:
    """Raises ValueError if other machines could connect without a token."""
    from jaxrl_llm.serving.http import is_loopback
    if not is_loopback(host) and not token:
        raise ValueError(f"--host={host} lets other machines ask, so the server wants a token; set the environment variable "
                         "JAXRL_LLM_TOKEN, or leave --host at 127.0.0.1")


def loaded(mesh=None):
    """The model that the flags name, the weights of a file in pieces on a mesh."""
    from jaxrl_llm.serving import policy
    from jaxrl_llm.store import bucket
    if (_MODEL.value is None) == (_WORKDIR.value is None):
        raise ValueError("give one of --model (a Hugging Face directory or .gguf file) and --workdir (the folder of a run)")
    if _WORKDIR.value is not None:
        if _TOKENIZER.value or _DTYPE.value or _INT8_CACHE.value:
            raise ValueError("--tokenizer, --dtype and --int8_cache go with --model; a run is served with its own, so leave "
                             "them out")
        return policy.of_run(bucket.place(_WORKDIR.value), _STEP.value)
    if _STEP.value is not None:
        raise ValueError(f"--step={_STEP.value} goes with --workdir, the folder of a run; --model has one set of weights, so "
                         "leave --step out")
    return policy.of_checkpoint(_MODEL.value, _TOKENIZER.value, _DTYPE.value or "float32", int8_cache=_INT8_CACHE.value,
                                mesh=mesh)


def mesh_of(text: str):
    """The mesh that --mesh names, of the first devices; None: one device. ValueError for another text, or too few devices."""
    import jax

    from jaxrl_llm import parallel
    if not text:
        return None
    axes = [part.partition("=") for part in text.replace(" ", "").split(",")]
    sizes = {name: int(size) for name, _, size in axes if name in ("data", "tensor") and re.fullmatch(r"-1|\d+", size)}
    if len(sizes) < len(axes):
        raise ValueError(f"--mesh={text!r}; give sizes of data and tensor, such as 'data=2,tensor=4'")
    sizes = {"data": 1} | sizes
    count = jax.device_count() if -1 in sizes.values() else math.prod(sizes.values())
    return parallel.make_mesh(**sizes, devices=jax.devices()[:count])


def application(loaded, name: str, token: str, size: int):
    """The application that answers in OpenAI's format."""
    import jax

    from jaxrl_llm.engines.engine import SlotEngine
    from jaxrl_llm.serving.app import ServedModel, make_app
    from jaxrl_llm.serving.requests import ClientLimits
    from jaxrl_llm.serving.worker import Worker
    model, params, tokenizer, tag = loaded
    engine = SlotEngine(model, params, jax.random.key(0), slots=_SLOTS.value, slot_tokens=size, tokenizer=tokenizer,
                    paged=_PAGED.value, mesh=mesh_of(_MESH.value))
    limits = ClientLimits(_COMPLETIONS.value, _REQUESTS.value)
    published = None if _WEIGHTS_FROM.value is None else Path(_WEIGHTS_FROM.value).expanduser()
    return make_app(ServedModel(name, model.config, tokenizer, Worker(engine, tag), token, limits, published))


def tinker_application(loaded, name: str, token: str, size: int):
    """The application that speaks Tinker's API."""
    import jax

    from jaxrl_llm.contrib.tinker.app import ServedTinker, make_app
    from jaxrl_llm.contrib.tinker.learner import AdapterLearner
    from jaxrl_llm.contrib.tinker.service import Service
    from jaxrl_llm.contrib.tinker.store import Store
    from jaxrl_llm.engines.engine import SlotEngine
    from jaxrl_llm.serving.requests import ClientLimits
    from jaxrl_llm.serving.worker import Worker
    if _WEIGHTS_FROM.value is not None:
        raise ValueError("--weights_from goes with OpenAI's format; with --tinker clients save and load adapters themselves")
    if token and not token.startswith("tml-"):
        raise ValueError("JAXRL_LLM_TOKEN is to begin with 'tml-': Tinker's client refuses other keys")
    model, params, tokenizer, tag = loaded
    mesh = mesh_of(_MESH.value)
    learner = AdapterLearner(model, params, longest=size, budget=_BATCH_TOKENS.value, mesh=mesh)
    engine = SlotEngine(model, learner.params, jax.random.key(0), slots=_SLOTS.value, slot_tokens=size, tokenizer=tokenizer,
                    lora=learner.padded(None, _RANK.value), paged=_PAGED.value, mesh=mesh)
    store = Store(Path(_CHECKPOINTS.value).expanduser())
    service = Service(name, learner, Worker(engine, tag), store, rank=_RANK.value, models=_MODELS.value)
    limits = ClientLimits(_COMPLETIONS.value, _REQUESTS.value, body=64 << 20)
    return make_app(ServedTinker(service, tokenizer_folder(tokenizer), tuple(tokenizer.stop_ids), token, limits))


def tokenizer_folder(tokenizer) -> str:
    """The folder from which clients load the tokenizer; it is written beside their checkpoints if no flag names one."""
    given = Path(_TOKENIZER.value or _MODEL.value or "").expanduser()
    if (given / "tokenizer_config.json").is_file():
        return str(given.resolve())
    written = Path(_CHECKPOINTS.value).expanduser() / "tokenizer"
    written.mkdir(parents=True, exist_ok=True)
    tokenizer.save(written)
    return str(written.resolve())


def main():
    extra, make = ("tinker", tinker_application) if _TINKER.value else ("serve", application)
    try:
        import uvicorn

        importlib.import_module(f"jaxrl_llm.{'contrib.tinker' if _TINKER.value else 'serving'}.app")
    except ModuleNotFoundError as error:
        raise ValueError(f"serving needs packages: pip install 'jaxrl_llm[{extra}]' ({error})") from error
    from jaxrl_llm.serving.connections import Connection
    from jaxrl_llm.serving.policy import slot_tokens_of
    token = os.environ.pop("JAXRL_LLM_TOKEN", "")  # child processes must not get it
    check_token(_HOST.value, token)
    family = socket.AF_INET6 if ":" in _HOST.value else socket.AF_INET
    with socket.create_server((_HOST.value, _PORT.value), family=family) as listening:
        served = loaded(mesh_of(_MESH.value))
        name = _NAME.value or Path(_MODEL.value or _WORKDIR.value).name
        size = slot_tokens_of(served.model, _SLOT_TOKENS.value)
        app = make(served, name, token, size)
        host, port = listening.getsockname()[:2]
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}{'' if _TINKER.value else '/v1'}"
        print(f"{name} ({served.tag}) at {at}, {_SLOTS.value} slots of {size} tokens, {'with' if token else 'without'} a token",
              flush=True)
        config = uvicorn.Config(app, http=Connection, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    command_line.run(main)
