"""The tiny byte model of `server` behind Tinker's API on a loopback port."""
import contextlib

from server import KEY, MODEL, SLOT_TOKENS, SLOTS, TOKENIZER, listening, params

from jaxrl_llm.contrib.tinker.learner import AdapterLearner
from jaxrl_llm.contrib.tinker.service import Service
from jaxrl_llm.contrib.tinker.store import Store
from jaxrl_llm.engines.engine import SlotEngine
from jaxrl_llm.serving.worker import Worker

RANK = 4


def make_service(folder, models=4):
    learner = AdapterLearner(MODEL, params(), longest=64, budget=256)
    engine = SlotEngine(MODEL, params(), KEY, slots=SLOTS, slot_tokens=SLOT_TOKENS, tokenizer=TOKENIZER, chunks=(4,),
                    lora=learner.padded(None, RANK))
    return Service("tiny", learner, Worker(engine), Store(folder), rank=RANK, models=models)


@contextlib.contextmanager
def serving(folder, service=None, **options):
    """`(http://..., service)` of a server in a thread of its own."""
    from jaxrl_llm.contrib.tinker.app import ServedTinker, make_app
    service = service or make_service(folder)
    with listening(make_app(ServedTinker(service, None, tuple(TOKENIZER.stop_ids), **options))) as url:
        yield url, service
