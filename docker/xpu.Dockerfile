# Intel. Run with --device=/dev/dri and the host's render group.
#     docker build -f docker/xpu.Dockerfile -t portable-dit:xpu .
ARG BASE=intel/deep-learning-essentials:latest
FROM ${BASE}
USER root
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
# The index of torch for XPU, which PyTorch's install page names.
ARG TORCH_INDEX_URL
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX_URL:?say --build-arg TORCH_INDEX_URL=...} "torch>=2.11"
COPY . /src
RUN pip install --no-cache-dir "/src[serve,h3]" /src/backends/xpu && rm -rf /src
RUN useradd --create-home --uid 10001 draw && mkdir -p /data && chown draw /data
USER draw
VOLUME /data
EXPOSE 8091
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["python3", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8091/health', timeout=2)"]
ENTRYPOINT ["portable-dit"]
CMD ["serve", "--host", "0.0.0.0", "--jobs", "/data/jobs.sqlite3", "--recipe", "intel/arc-b70/h3-image-1x-bf16"]
