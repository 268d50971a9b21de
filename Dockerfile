# The service, for a CPU or for a GPU:
#   docker build -t fa-serve:cpu .
#   docker build -t fa-serve:cuda --target cuda .
#   docker run --rm -p 127.0.0.1:8000:8000 -v fa-serve-weights:/weights fa-serve:cpu serve Qwen/Qwen3-0.6B
#   docker run --rm --gpus all --shm-size 1g -p 127.0.0.1:8000:8000 -v fa-serve-weights:/weights fa-serve:cuda
# Weights from the hub are kept in the volume /weights. Settings are flags after `serve`, or FA_SERVE_* in the environment.
# Every package is a wheel with the hash that the files of requirements/ have; pip refuses any other file.
# RAY=1 adds what `fa-serve ray` needs: docker build --build-arg RAY=1 -t fa-serve:cpu-ray .
# TORCH_INDEX is an index with a CPU build of torch; pip searches it and the index that it is configured with.
# BASE_IMAGE is one image for all stages. `make pin-images` writes its digest here; without a digest the tag may move.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/fa-serve/bin:$PATH
RUN python -m venv /opt/fa-serve
WORKDIR /src

# The large wheels come first, in a layer that stays cached when only our source changes.
FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG RAY=
COPY requirements/cpu.txt requirements/ray.txt requirements/
RUN pip install --require-hashes --only-binary :all: --extra-index-url "${TORCH_INDEX}" -r requirements/cpu.txt \
  ${RAY:+-r requirements/ray.txt}
COPY LICENSE README.md pyproject.toml ./
COPY fa_serve fa_serve
COPY server server
RUN pip install --no-index --no-deps --no-build-isolation .

# torch with CUDA, and the Triton version that it pins; constraints.txt says why
FROM build AS build-cuda
ARG RAY=
COPY requirements/cuda.txt requirements/ray.txt requirements/
RUN pip install --require-hashes --only-binary :all: -r requirements/cuda.txt ${RAY:+-r requirements/ray.txt}
COPY LICENSE README.md pyproject.toml ./
COPY fa_serve fa_serve
COPY server server
RUN pip install --no-index --no-deps --no-build-isolation .

FROM ${BASE_IMAGE} AS runtime
RUN useradd --create-home --uid 1000 fa-serve && install -d -o fa-serve -g fa-serve /weights
ENV PATH=/opt/fa-serve/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/weights FA_SERVE_HOST=0.0.0.0
VOLUME /weights
WORKDIR /home/fa-serve
EXPOSE 8000
# While the model loads, /ready answers 503. Docker counts that as unhealthy only after the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 CMD ["python", "-c", \
  "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ.get(\"FA_SERVE_PORT\", 8000)}/ready', timeout=4)"]
ENTRYPOINT ["fa-serve"]
CMD ["serve"]

FROM runtime AS cuda
# Triton compiles its launchers with the machine's C compiler
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/fa-serve /opt/fa-serve
USER 1000

# `docker build` makes the last stage by default.
FROM runtime AS cpu
COPY --from=build-cpu /opt/fa-serve /opt/fa-serve
USER 1000
