# docker build -t deepspeed-recipes .
# CUDA has to be the version that the pinned torch is built with; otherwise DeepSpeed's ops do not compile.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends \
        g++ git libaio-dev openssh-client pdsh python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY constraints.txt .
RUN python3 -m venv .venv && .venv/bin/python -m pip install --no-cache-dir -r constraints.txt
ENV PATH=/workspace/.venv/bin:$PATH PYTHONPATH=/workspace TORCH_EXTENSIONS_DIR=/workspace/.venv/torch_extensions

COPY . .
# What CPU ranks need; a run compiles what it needs on GPUs, where they are.
RUN DS_ACCELERATOR=cpu python -m recipes.machine.ops
