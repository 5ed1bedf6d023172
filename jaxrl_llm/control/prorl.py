"""ProRL: when to make the current policy the new reference and clear the optimiser (arXiv 2505.24864; reconstructed).

The paper says in words that it resets when validation stagnates or drops; the rule and its numbers are ours.
"""

History = tuple[float, ...]


def init() -> History:
    """No evaluation since the last reset (also the state after one)."""
    return ()


def observe(history: History, score: float) -> History:
    """Appends the validation score of one evaluation."""
    return (*history, float(score))


def propose(history: History, *, patience: int = 3, drop: float = 0.05) -> bool:
    """True: reset now. The best score is `patience` evaluations old, or the last one lies more than `drop` below it.

    At least two evaluations are needed; of equal scores the first counts as the best.
    """
    if len(history) < 2:
        return False
    best = max(history)
    return len(history) - 1 - history.index(best) >= patience or history[-1] < best - drop
