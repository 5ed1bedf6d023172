"""Optimisers of a user, given to runs as "module:function"."""
import optax


def steady(learning_rate):
    """SGD at one rate, whatever the schedule is: its state has no count of updates."""
    return optax.sgd(0.3, momentum=0.5)


def none_at_all(learning_rate):
    return learning_rate
