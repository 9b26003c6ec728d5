# Ascend. Run with the davinci devices and the driver's folders mounted, as the vendor's guide says.
#     docker build -f docker/ascend.Dockerfile -t portable-dit:ascend .
ARG BASE=quay.io/ascend/cann:latest
FROM ${BASE}
# The two belong together: the torch of torch-npu's own number, from the vendor's table.
ARG TORCH_VERSION=2.10.0
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}" "torch-npu==${TORCH_VERSION}"
COPY . /src
RUN pip install --no-cache-dir "/src[serve,h3]" /src/backends/ascend && rm -rf /src
RUN useradd --create-home --uid 10001 draw && mkdir -p /data && chown draw /data
USER draw
VOLUME /data
EXPOSE 8091
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["python3", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8091/health', timeout=2)"]
ENTRYPOINT ["portable-dit"]
CMD ["serve", "--host", "0.0.0.0", "--jobs", "/data/jobs.sqlite3", "--recipe", "ascend/a2/h3-image-1x-bf16"]
