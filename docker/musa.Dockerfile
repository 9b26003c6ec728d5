# Moore Threads. The base has to bring the vendor's torch and torch_musa; run with --runtime=mthreads.
#     docker build -f docker/musa.Dockerfile -t portable-dit:musa .
# The vendor's image for torch_musa; there is no public one to name here.
ARG BASE
FROM ${BASE}
COPY . /src
RUN pip install --no-cache-dir "/src[serve,h3]" /src/backends/musa && rm -rf /src
RUN useradd --create-home --uid 10001 draw && mkdir -p /data && chown draw /data
USER draw
VOLUME /data
EXPOSE 8091
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["python3", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8091/health', timeout=2)"]
ENTRYPOINT ["portable-dit"]
CMD ["serve", "--host", "0.0.0.0", "--jobs", "/data/jobs.sqlite3", "--recipe", "mthreads/s5000/h3-image-2x-bf16-tensor2"]
