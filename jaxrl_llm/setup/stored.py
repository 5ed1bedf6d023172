"""The configuration of a run folder, and of each of its phases."""
from pathlib import Path

import ml_collections

from jaxrl_llm.setup import config as config_lib
from jaxrl_llm.setup import phases
from jaxrl_llm.store.begun import read_begun, up_to
from jaxrl_llm.store.workdir import current
from jaxrl_llm.tools import files


def stored_config(folder: Path, step: int | None = None) -> ml_collections.ConfigDict:
    """The configuration that a run folder was trained with; keys newer than the run have their defaults.

    Of a run in phases it is that of the phase that made `step`; None: of the newest one. Raises FileNotFoundError if there is
    none.
    """
    begun = read_begun(folder)
    return phases.at(whole_config(folder), begun if step is None else up_to(begun, step))


def whole_config(folder: Path) -> ml_collections.ConfigDict:
    """The configuration of the whole run, with its phases, if it has any, as their text."""
    content = files.read_object(folder, "config.json")
    if content is None:
        raise FileNotFoundError(f"{folder} is no run folder: config.json is missing; give the --workdir of a training run")
    if not isinstance(stored := content.get("config"), dict):
        raise ValueError(f"{folder}/config.json is no run configuration: config={str(stored)[:80]!r}, not an object")
    stored = current(content.get("schema_version"), stored)
    config = config_lib.default_config().to_dict()
    for key, value in stored.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    return ml_collections.ConfigDict(config)
