# An image that trains: on CPUs, or on NVIDIA GPUs with another base and extra.
#   docker build -t jaxrl_llm .
#   docker build -t jaxrl_llm:gpu --build-arg BASE=nvidia/cuda:12.9.1-base-ubuntu24.04 --build-arg EXTRAS=gpu,data,tasks,serve .
#   docker run --rm -v "$PWD/runs:/runs" jaxrl_llm jaxrl_llm train --config=arithmetic --workdir=/runs/first
#   docker run --rm --gpus=all --shm-size=8g -v "$PWD/models:/jaxrl_llm/models" -v "$PWD/runs:/runs" jaxrl_llm:gpu \
#     bash scripts/keep_training.sh --mounted --config=configs/gsm8k.py:qwen2.5_1.5b-h100-8 --workdir=/runs/gsm8k
# BASE is a Debian or Ubuntu with Python 3.11 or newer. EXTRAS are those of setup.py; PACKAGES others, e.g. "ray[default]".
# A compiler, since a part of reasoning_gym has no wheel for every Python; wget for the probes of KubeRay.
ARG BASE=debian:13-slim
FROM ${BASE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    python3 python3-venv python3-dev gcc libc6-dev bubblewrap ca-certificates libjemalloc2 wget \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /jaxrl_llm
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv
COPY setup.py pyproject.toml README.md LICENSE ./
COPY jaxrl_llm jaxrl_llm
COPY experiments experiments
COPY configs configs
COPY scripts scripts
ARG EXTRAS=data,tasks,serve
ARG PACKAGES=""
RUN pip install --no-cache-dir -e ".[${EXTRAS}]" ${PACKAGES}
CMD ["jaxrl_llm", "--help"]
