"""Whether a teacher pulls a student towards success: gradients of distillation against that of success (arXiv 2605.10889).

A node is a question with a prefix of an answer. `student`, `teacher` f64[V] are probabilities of the next token there,
`success` f64[V] the rate at which the student solves the problem after each token. All gradients point uphill and are taken
with respect to the student's logits: `pi (f - sum pi f)`.
"""
import numpy as np

LOSSES = ("forward_kl", "reverse_kl", "jsd")


def towards(student: np.ndarray, force: np.ndarray) -> np.ndarray:
    """`pi_j (f_j - sum_i pi_i f_i)` over the last axis; 0 where `student` is 0."""
    force = np.where(student > 0, force, 0.0)
    return student * (force - (student * force).sum(axis=-1, keepdims=True))


def ideal(student: np.ndarray, success: np.ndarray) -> np.ndarray:
    """The gradient of the success probability `V = sum pi q`: `pi_j (q_j - V)`, the mean one of Dr. GRPO."""
    return towards(student, success)


def distillation(student: np.ndarray, teacher: np.ndarray, loss: str, mix: float = 0.5) -> np.ndarray:
    """The direction in which a loss falls.

    `forward_kl` KL(teacher || student), f = pt / pi: the gradient is pt - pi. `reverse_kl` KL(student || teacher),
    f = log pt - log pi, which sampled-token distillation has in expectation. `jsd`: f = -(1 - b) log(pi / M) with
    M = (1 - b) pi + b pt and b = `mix`. Tokens that the student cannot sample get 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        force = {"forward_kl": lambda: teacher / student, "reverse_kl": lambda: np.log(teacher) - np.log(student),
                 "jsd": lambda: -(1 - mix) * np.log(student / ((1 - mix) * student + mix * teacher))}[loss]()
    return towards(student, force)


def restrict(probabilities: np.ndarray, visited: np.ndarray) -> np.ndarray:
    """Probabilities renormalised over the `visited` tokens, 0 elsewhere; all 0 where none is visited."""
    kept = np.where(visited, probabilities, 0.0)
    total = kept.sum(axis=-1, keepdims=True)
    return kept / np.where(total > 0, total, 1.0)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of the angle between vectors, -1 to 1; 0 where either one is zero."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.clip(np.where(norms > 0, (a * b).sum(axis=-1) / np.where(norms > 0, norms, 1.0), 0.0), -1, 1)


def teacher_advantage(student: np.ndarray, teacher: np.ndarray, success: np.ndarray) -> np.ndarray:
    """What the student's success would gain if the teacher chose this one token: `sum (pt - pi) q`."""
    return ((teacher - student) * success).sum(axis=-1)
