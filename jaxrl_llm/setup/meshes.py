"""The meshes of a run, which must divide its batches."""
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import parallel


def make_mesh(config: ConfigDict) -> Mesh:
    """The mesh of `config.mesh`; ValueError if it cannot divide the batches of the configuration."""
    mesh, P, learner = sampling_mesh(config), config.prompts.per_step, config.learner
    parallel.check_batch(mesh, P // learner.minibatches // learner.micro_batches,
                         "prompts.per_step / learner.minibatches / learner.micro_batches")
    parallel.check_batch(mesh, learner.packed_rows, "learner.packed_rows", "rows")
    if config.warmup.steps:
        parallel.check_batch(mesh, config.warmup.batch, "warmup.batch")
    return mesh


def sampling_mesh(config: ConfigDict) -> Mesh:
    """The mesh of `config.mesh`, for sampling alone; ValueError if it cannot divide the prompts of a step."""
    mesh, P = parallel.make_mesh(**config.mesh.to_dict()), config.prompts.per_step
    mesh = parallel.by_process(mesh) if config.sampling.tensor else mesh
    for one in {mesh, parallel.sampler_mesh(mesh, config.sampling.tensor)}:
        parallel.check_batch(one, P, "prompts.per_step")
        parallel.check_batch(one, P // config.sampling.micro_batches, "prompts.per_step / sampling.micro_batches")
    return mesh
