# AMD. Run with --device=/dev/kfd --device=/dev/dri --group-add video --ipc=host.
#     docker build -f docker/rocm.Dockerfile -t portable-dit:rocm .
ARG BASE=rocm/pytorch:latest
FROM ${BASE}
COPY . /src
RUN pip install --no-cache-dir "/src[serve,h3]" /src/backends/rocm && rm -rf /src
RUN useradd --create-home --uid 10001 draw && mkdir -p /data && chown draw /data
USER draw
VOLUME /data
EXPOSE 8091
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["python3", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8091/health', timeout=2)"]
ENTRYPOINT ["portable-dit"]
CMD ["serve", "--host", "0.0.0.0", "--jobs", "/data/jobs.sqlite3", "--recipe", "amd/mi350x/h3-image-1x-bf16"]
