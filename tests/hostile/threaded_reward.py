"""A reward whose module starts a thread at its import; a fork of the process would not have the thread."""

import queue
import threading

_questions: queue.Queue = queue.Queue()
_answers: queue.Queue = queue.Queue()


def _work():
    while True:
        _answers.put(float(len(_questions.get())))


threading.Thread(target=_work, daemon=True).start()


def length(completion, answer, problem):
    _questions.put(completion)
    return _answers.get()
