# docker build -t deepspeed-recipes .
# CUDA has to be the version that the pinned torch is built with; otherwise DeepSpeed's ops do not compile.
# By digest, since a tag can be moved; `docker buildx imagetools inspect nvidia/cuda:TAG` prints another tag's.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92

RUN apt-get update && apt-get install -y --no-install-recommends \
        g++ git libaio-dev openssh-client pdsh python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
# Ubuntu's own user, `ubuntu`. A run compiles DeepSpeed's ops into the environment, so it belongs to that user too.
RUN chown 1000:1000 .
USER 1000:1000
COPY --chown=1000:1000 requirements.lock .
# constraints.txt with hashes, and with torch's CUDA libraries; `make lock` writes it.
RUN python3 -m venv .venv && .venv/bin/python -m pip install --no-cache-dir --require-hashes -r requirements.lock
ENV PATH=/workspace/.venv/bin:$PATH PYTHONPATH=/workspace/src TORCH_EXTENSIONS_DIR=/workspace/.venv/torch_extensions

COPY --chown=1000:1000 . .
