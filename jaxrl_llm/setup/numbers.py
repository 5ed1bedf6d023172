"""Estimator and objective of a configuration; numbers of the objective are constants or schedules."""
from ml_collections import ConfigDict

from jaxrl_llm import methods, objectives
from jaxrl_llm.advantages import Estimator
from jaxrl_llm.methods import composition
from jaxrl_llm.objectives import Objective


def method_parts(config: ConfigDict, method: methods.Method, feature_size: int) -> tuple[Estimator, Objective]:
    """Estimator and objective of a method, `feature_size` being the width of `rollouts.features`.

    Numbers of the objective and its terms may be schedules: `kl(linear(start=0.1, end=0))`. Their steps are those that train
    the policy, without the first ones, which only train a critic.
    """
    of_the_run = {"max_len": config.sampling.max_tokens, "feature_size": feature_size}
    estimator = composition.estimator_of(method, **of_the_run)
    alone = max(config.critic.pretrain_steps, 0) if estimator.has_critic else 0
    per_step, steps = max(config.learner.epochs * config.learner.minibatches, 1), max(config.steps - alone, 1)
    return estimator, objectives.made(method.parts("objective"), steps=steps, per_step=per_step, **of_the_run)
