"""AReaL's bound on the age of a rollout when it is trained on (arXiv 2505.24298)."""


def admit(request: int, *, batch_size: int, version: int, max_staleness: int) -> bool:
    """Whether the generation request of number `request` (from 1) may start while the policy has had `version` updates.

    `floor((request - 1) / batch_size) <= version + max_staleness`: the floor is the number of the update that will train on
    it, at most `max_staleness` updates from now. 0 is synchronous training, 1 overlaps by one step.
    """
    if request < 1 or batch_size < 1:
        raise ValueError(f"request={request} and batch_size={batch_size} count from 1")
    return (request - 1) // batch_size <= version + max_staleness
