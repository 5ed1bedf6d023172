"""A reward whose module starts a thread when it is imported: a copy of the process would miss it."""

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
