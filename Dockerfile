# The service on a CPU:
#   docker build -t fa-serve .
#   docker run --rm -p 8000:8000 fa-serve
# TORCH_INDEX is where pip looks for a CPU build of torch, besides the index it is configured with.

FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=${TORCH_INDEX}
RUN python -m venv /opt/fa-serve
ENV PATH=/opt/fa-serve/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# the heavy wheels first: a layer that a change of our own source leaves alone
RUN pip install -c constraints.txt torch transformers triton
COPY LICENSE README.md pyproject.toml ./
COPY fa_serve fa_serve
COPY server server
RUN pip install -c constraints.txt '.[server]'

FROM python:3.11-slim
RUN useradd --create-home --uid 1000 fa-serve
COPY --from=build /opt/fa-serve /opt/fa-serve
ENV PATH=/opt/fa-serve/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/fa-serve
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["fa-serve"]
CMD ["serve", "--host", "0.0.0.0"]
