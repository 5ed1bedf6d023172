"""What the engine refuses, forgets and loses: a clear error, and the other rows go on as if nothing had been."""
import re

import numpy as np
import pytest
from engines import STOPS, G, P, T, V, agrees, busy, drain, drain_through_losses, engine, params, request, scanned

from jaxrl_llm.engines import Sampling

REFUSED = {
    "longer than a slot": (lambda e: e.submit(request(70, limit=T + 9)), ValueError, r"uid 70 may get 5 \+ 29 tokens, a slot "
                           "holds 25; lower its limit to 20, shorten its prompt, or make the engine with a larger slot_tokens"),
    "a prompt that fills a slot": (lambda e: e.submit(request(70, tokens=[1] * 25)), ValueError,
                                   r"uid 70 may get 25 \+ 20 tokens, a slot holds 25; shorten its prompt, or make"),
    "a limit that is no whole number": (lambda e: e.submit(request(70, limit=2.5)), ValueError,
                                        "uid 70 has a limit of 2.5 tokens; give a whole number"),
    "an extension to such a limit": (lambda e: e.extend(11, [1], limit=2.5), ValueError, "uid 11 has a limit of 2.5"),
    "a token that is no whole number": (lambda e: e.submit(request(70, tokens=[1, 1.5])), ValueError,
                                        "uid 70 was given the token 1.5; give whole numbers, 0 to 63"),
    "a token beyond 64 bits": (lambda e: e.submit(request(70, tokens=[1, 2**70])), ValueError, f"the token {2**70}; give"),
    "a limit beyond 64 bits": (lambda e: e.submit(request(70, limit=2**70)), ValueError, "a slot holds 25"),
    "a seed beyond 64 bits": (lambda e: e.submit(request(70, seed=2**63)), ValueError, "for its draws; give one from 0 to"),
    "a key of larger words": (lambda e: e.submit(request(70, key=(0, 2**32))), ValueError, r"key \(0, 4294967296\); give two"),
    "a stop token of more bits": (lambda e: e.submit(request(70, stop_tokens=(7, 2**31))), ValueError,
                                  r"uid 70 has the stop token 2147483648; give whole numbers from -2\^31 to 2\^31 - 1"),
    "a stop token far below 0": (lambda e: e.submit(request(70, stop_tokens=(-2**31 - 1,))), ValueError, "token -2147483649;"),
    "a stop token that is no whole number": (lambda e: e.submit(request(70, stop_tokens=(7.5,))), ValueError, "token 7.5;"),
    "more than the largest top_k": (lambda e: e.submit(request(70, sampling=Sampling(top_k=2**31))), ValueError,
                                    "top_k=2147483648"),
    "a limit of the distribution": (lambda e: e.submit(request(70, sampling=Sampling(max_tokens=3))), ValueError,
                                    r"max_tokens=3 below its limit of 20; give the limit as Request\(limit=...\)"),
    "spread-out draws": (lambda e: e.submit(request(70, sampling=Sampling(spread=0.5))), ValueError, "spread=0.5, but an"),
    "twice": (lambda e: e.submit(request(71), request(11)), ValueError, "uid 11 was submitted before"),
    "twice at once": (lambda e: e.submit(request(71), request(71)), ValueError, "uid 71 was submitted before"),
    "fork of an unknown row": (lambda e: e.fork(99, [100]), KeyError, "uid 99 is not held"),
    "a child of an unknown row": (lambda e: e.submit(request(100, parent=99)), KeyError, "uid 99 is not held"),
    "extension of an unknown row": (lambda e: e.extend(99, [1]), KeyError, "uid 99 is not held"),
    "release of an unknown row": (lambda e: e.release(99), KeyError, "uid 99 is not held"),
    "resume of a row that waits": (lambda e: e.resume(11), ValueError, "uid 11 is not paused"),
    "an extension that does not fit": (lambda e: e.extend(11, [1] * 30), ValueError, "a slot holds 25"),
    "an extension of nothing": (lambda e: e.extend(11, []), ValueError, "no tokens"),
    "an extension beyond the vocabulary": (lambda e: e.extend(11, [V]), ValueError, "outside the vocabulary, 0 to 63"),
    "an extension without tokens left": (lambda e: e.extend(11, [1], limit=0), ValueError, "limit of 0 tokens"),
    "no prompt": (lambda e: e.submit(request(71, tokens=())), ValueError, "no tokens"),
    "stop texts without a tokenizer": (lambda e: e.submit(request(71, stop_texts=("a",))), ValueError, "no tokenizer"),
    "an empty stop string": (lambda e: e.submit(request(71, stop_sequences=((),))), ValueError, "empty stop string"),
    "a distribution that is none": (lambda e: e.submit(request(71, sampling=Sampling(-1.0))), ValueError, "temperature"),
    "weights of another structure": (lambda e: e.publish(1, {"embed": params()["embed"]}), ValueError,
                                     "another policy: .*absent"),
    "weights of another shape": (lambda e: e.publish(1, params() | {"embed": np.zeros((V, 16), np.float32)}), ValueError,
                                 r"'embed'.* was float32\[64, 32\] and is float32\[64, 16\]; 1 arrays differ"),
}


@pytest.mark.parametrize("given, message", (
    ({"slots": 0}, "slots=0; give 1"), ({"slot_tokens": 1}, "slot_tokens=1; give 2"), ({"chunks": ()}, "chunks=(); give"),
    ({"chunks": (16, 4)}, "chunks=(16, 4); give"), ({"chunks": (4, 4)}, "ascending order"), ({"chunks": (0, 4)}, "each 1 at")))
def test_engines_of_impossible_sizes_are_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        engine(**given)


def test_what_limits_nothing_is_accepted():
    """Callers may pass on a distribution whose own limit is the longest that any of their rows has."""
    one = engine()
    one.submit(request(4, sampling=Sampling(0.8, top_k=2**31 - 1, max_tokens=np.int32(T), spread=np.float32(0)),
                       limit=np.int64(T), stop_tokens=(-2**31, *STOPS, 2**31 - 1)))
    agrees(drain(one)[4][0], scanned()[4])


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case):
    one, (call, error, message) = busy(), REFUSED[case]
    with pytest.raises(error, match=message):
        call(one)
    found = drain(one)
    assert sorted(found) == list(range(P * G))
    for uid, expected in scanned().items():
        agrees(*found[uid], expected)
        assert not found[uid][0].policy_version.any()


def test_released_rows_are_gone_and_others_go_on():
    one = busy()
    one.release(11)
    running = next(row.request.uid for row in one._slots if row)
    one.release(running)
    for call in (lambda: one.fork(11, [80]), lambda: one.extend(11, [1]), lambda: one.pause(running), lambda: one.resume(11)):
        with pytest.raises(KeyError, match="was released"):
            call()
    found = drain(one)
    assert sorted(found) == sorted(set(range(P * G)) - {11, running})
    for uid, [node] in found.items():
        agrees(node, scanned()[uid])
    with pytest.raises(KeyError, match="did not say keep=True"):
        one.extend(0, [1])  # it ended
    one.submit(request(11))  # a uid that is free again gives its row again
    agrees(drain(one)[11][0], scanned()[11])


def test_paused_and_ended_rows_say_what_they_are():
    one = engine()
    one.submit(request(8, keep=True), request(9))
    one.pause(9)
    with pytest.raises(ValueError, match="uid 9 is paused already"):
        one.pause(9)
    drain(one)
    for call in (one.pause, one.resume):
        with pytest.raises(ValueError, match="uid 8 has ended; extend it"):
            call(8)
    one.release(8)
    one.resume(9)
    agrees(drain(one)[9][0], scanned()[9])


@pytest.mark.parametrize("lost, slots", [("cache", 4), ("flight", 16)])
def test_an_engine_recovers_from_what_the_device_loses(lost, slots):
    """Arrays are deleted behind its back; tokens are those of an engine that lost nothing."""
    one = engine(slots=slots)
    one.submit(*(request(uid) for uid in range(P * G)))
    found = drain_through_losses(one, lambda one: one._caches.slots if lost == "cache" else
                                 one._flights and one._flights[0].drawn)
    for uid, expected in scanned().items():
        agrees(found[uid], expected)
