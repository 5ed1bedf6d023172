"""Installs jaxrl_llm: `pip install -e .` for training, `pip install -e ".[test]"` for the test-suite."""
import re
from pathlib import Path

from setuptools import find_packages, setup

URL = ""  # of the project, "https://HOST/OWNER/jaxrl_llm": makes links of the README absolute, and see notebooks/links.py

TEST = [
    "pytest>=9",
    "pytest-xdist>=3.6",
    "pytest-rerunfailures>=16",
    "hypothesis>=6.120",
    "regex>=2024.5",
    "ruff>=0.14",
    "mypy>=2.0",
    "setuptools>=70.1",  # builds a wheel
    "datasets>=4.0",
    "pyarrow>=18",
    "tensorflow-datasets>=4.9.7",
    "reasoning-gym>=0.1.23",
    "gymnasium>=1.0",
    "pgx>=2.6",
    "jumanji>=1.1.2",
    "bm25s>=0.2.7",
    "transformers>=5.0",
    "starlette>=1.0",
    "uvicorn>=0.40",
    "httpx>=0.28",
    "openai>=3.0",
    "tinker>=0.38",
    "mcp>=2.3,<3",
    "textarena>=0.7",
]


def packages() -> tuple[list[str], dict[str, str]]:
    """The packages, and the folders of those that lie elsewhere.

    `jaxrl_llm/experiments` and `jaxrl_llm/configs` are links to folders beside it. Where pip unpacks a .zip archive, and in a
    checkout on Windows, files are in their place.
    """
    names, folders = find_packages(include=["jaxrl_llm", "jaxrl_llm.*"]), {}
    for name in ("experiments", "configs"):
        if not Path("jaxrl_llm", name).is_dir():
            names += [f"jaxrl_llm.{name}", *(f"jaxrl_llm.{name}.{one}" for one in find_packages(name))]
            folders[f"jaxrl_llm.{name}"] = name
    return names, folders


NAMES, FOLDERS = packages()


def readme() -> str:
    """README.md; its links and pictures lead to the project where that has an address, as an index of packages needs them."""
    text = open("README.md", encoding="utf-8").read()
    if URL:
        text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\g<1>{URL}/raw/main/", text)
        text = re.sub(r"(?<!!)(\[[^]]*\]\()(?!\w+:|#)", rf"\g<1>{URL}/blob/main/", text)
    return text


setup(
    name="jaxrl_llm",
    version="0.1.0",
    description="JAX-native reinforcement learning of language models",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    **({"url": URL} if URL else {}),
    python_requires=">=3.11",
    packages=NAMES,
    package_dir=FOLDERS,
    package_data={"jaxrl_llm.show": ["page.html", "page.css", "page.js"]},
    entry_points={
        "console_scripts": ["jaxrl_llm = jaxrl_llm.commands.cli:main"],
    },
    install_requires=[
        "jax>=0.8",
        "flax>=0.12",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.30",
        "etils[epath]>=1.12",
        "chex>=0.1.90",
        "filelock>=4.0",  # its earlier releases empty the file of a lock that another process holds
        "ml-collections>=1.0",
        "absl-py>=2.1",
        "numpy>=2.0",
        "scipy>=1.13",
        "grain>=0.2.12",
        "tokenizers>=0.21",
        "sentencepiece>=0.2",
        "safetensors>=0.5",
        "gguf>=0.17",
        "jinja2>=3.1.6",
        "math-verify>=0.8",
        "google-re2>=1.1.20240702",  # regular expressions in linear time
        "tensorboardX>=2.6",
        "rich>=13.7",
        "matplotlib>=3.9",
        "psutil>=6.0",
        "protobuf>=4.25",
    ],
    extras_require={
        "data": ["datasets>=4.0", "pyarrow>=18", "tensorflow-datasets>=4.9.7"],
        "tasks": ["reasoning-gym>=0.1.23"],
        "environments": ["bm25s>=0.2.7", "gymnasium>=1.0", "textarena>=0.7", "pgx>=2.6", "jumanji>=1.1.2"],
        "gymnax": ["gymnax>=1.0"],  # takes no jax 0.12
        "mcp": ["mcp>=2.3,<3"],  # tools of MCP servers
        # These three ask for different versions of common packages: each in its own environment. The adapters use parts of the
        # first two that may change with a minor version.
        "openenv": ["openenv>=0.10,<0.11"],
        "verifiers": ["verifiers>=0.4,<0.5"],
        "tinker-cookbook": ["tinker-cookbook[math-rl]>=0.5.8"],
        "serve": ["starlette>=1.0", "uvicorn>=0.40"],
        "tinker": ["starlette>=1.0", "uvicorn>=0.40", "tinker>=0.38"],  # serve --tinker
        "external": ["httpx>=0.28"],  # to sample from a server
        "gpu": ["jax[cuda12]>=0.8"],
        "gpu13": ["jax[cuda13]>=0.8"],  # needs a driver of 580 or later
        "tpu": ["jax[tpu]>=0.8"],
        "gs": ["gcsfs>=2024.10"],  # run folders in buckets; it brings google-cloud-storage, which orbax asks there
        "s3": ["s3fs>=2024.10"],
        "wandb": ["wandb>=0.22"],
        "notebooks": ["jupyterlab>=4.2", "ipykernel>=6.29"],
        "parity": ["trl==1.16.0", "verl==0.9.1"],  # compared with in tests/parity, which skips what is absent
        "test": [*TEST, "torch==2.13.0", "peft>=0.17"],
        "test-light": TEST,  # without PyTorch: models are not compared with those of transformers
    },
)
