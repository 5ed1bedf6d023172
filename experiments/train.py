"""Trains a language model by reinforcement learning with verifiable rewards.

  python experiments/train.py --config=configs/arithmetic.py --workdir=runs/first [--config.method=dr_grpo ...] [--resume]
"""
import os
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", "configs/arithmetic.py", "Configuration file, see configs/.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: config, metrics, curves, samples, checkpoints.")
_RESUME = flags.DEFINE_bool("resume", False, "Continue the run in --workdir from its last good checkpoint.")
_EXPORT = flags.DEFINE_string("export", None, "Also write the trained model as a Hugging Face directory here.")
_CACHE = flags.DEFINE_string("compilation_cache", "~/.cache/jaxrl_llm/xla", "Compiled programs are kept here; '' turns it off.")


def main(_):
    logging.set_verbosity(logging.WARNING)  # orbax reports every rename
    import jax  # after the flags are parsed, so that --help is quick
    if _CACHE.value:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(_CACHE.value))
    from jaxrl_llm.training.loop import train
    from jaxrl_llm.training.report import print_report
    config = _CONFIG.value
    evaluations = train(config, _WORKDIR.value, resume=_RESUME.value)
    print_report(evaluations, Path(_WORKDIR.value))
    if _EXPORT.value:
        from jaxrl_llm.training.report import export
        export(config, Path(_WORKDIR.value), _EXPORT.value)


def parse(arguments):
    """Flags as absl reads them; a key that the configuration lacks is a plain error, not a stack trace."""
    try:
        return app.parse_flags_with_usage(arguments)
    except AttributeError as error:  # ml_collections nests a KeyError, whose text says which key and what is near
        reason = error.args[0].args[0] if isinstance(error.args[0], KeyError) else error
        raise ValueError("the configuration has no key " + " ".join(str(reason).split())) from error


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    try:
        app.run(main, flags_parser=parse)
    except (ValueError, NotImplementedError, OSError, RuntimeError) as error:
        if os.environ.get("JAXRL_LLM_TRACEBACK"):
            raise
        sys.exit(f"{type(error).__name__}: {error}\n(JAXRL_LLM_TRACEBACK=1 shows where)")
