# The built-in model, or any that fits the memory, on the CPU.
#     docker build -f docker/cpu.Dockerfile -t portable-dit:cpu .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
# An index of CPU-only torch, which PyTorch's install page names; without it several GB of GPU libraries come along.
ARG TORCH_INDEX_URL=
RUN pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url ${TORCH_INDEX_URL}} "torch>=2.10"
COPY . /src
RUN pip install --no-cache-dir "/src[serve,h3]" && rm -rf /src
RUN useradd --create-home --uid 10001 draw && mkdir -p /data && chown draw /data
USER draw
VOLUME /data
EXPOSE 8091
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["python3", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8091/health', timeout=2)"]
ENTRYPOINT ["portable-dit"]
CMD ["serve", "--host", "0.0.0.0", "--jobs", "/data/jobs.sqlite3", "--recipe", "cpu/h3-mini"]
