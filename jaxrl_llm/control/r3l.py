"""R3L: reading a policy's reflection on its rollout, and selecting training data from the retry (arXiv 2601.03715)."""
import json

from jax import Array

OUTCOMES = ("success", "success_but_inefficient", "failure")


def parse_reflection(text: str, steps: int) -> tuple[str, int] | None:
    """(suggestion, step to retry from) of a reflection, or None if there is nothing to retry.

    `text` is one JSON object with `outcome`, `suggestion` and `retry_from_step` in 0 .. steps - 1, `steps` the number
    of the model's turns in the rollout. Anything else, and the outcome `success`, means no retry.
    """
    try:
        fields = json.loads(text)
        outcome, suggestion, step = fields["outcome"], fields["suggestion"], fields["retry_from_step"]
    except (ValueError, KeyError, TypeError, RecursionError):  # RecursionError: deeply nested JSON
        return None
    well_formed = outcome in OUTCOMES[1:] and isinstance(suggestion, str) and type(step) is int
    return (suggestion, step) if well_formed and 0 <= step < steps else None


def recorded(base_PK: Array, retry_PK: Array, retried_PK: Array, perfect_PK: Array) -> tuple[Array, Array]:
    """(reflections, guided retries) bool[P, K] that become separate prompts with one rollout of reward 1.

    Both are recorded if a retry beats its base rollout with reward >= 1; only the reflection is recorded if the base has
    reward >= 1 and the reflection called it perfect.
    """
    improved = retried_PK & (retry_PK > base_PK) & (retry_PK >= 1)
    return improved | ((base_PK >= 1) & perfect_PK), improved
