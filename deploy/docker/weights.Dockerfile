# Weights server: no torch, no simulator.
# Built from the repository's root: docker build -f deploy/docker/weights.Dockerfile .
FROM docker.io/library/debian:bookworm-slim AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
COPY deploy/docker/python.sh /src/deploy/docker/
RUN bash /src/deploy/docker/python.sh environment
ARG EXTRAS=weights
COPY deploy/docker/install.sh deploy/docker/requirements.py /src/deploy/docker/
COPY pyproject.toml /src/
RUN bash /src/deploy/docker/install.sh dependencies $EXTRAS

FROM dependencies AS package
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
COPY . /src/
RUN bash /src/deploy/docker/install.sh package

FROM docker.io/library/debian:bookworm-slim
COPY deploy/docker/python.sh /src/deploy/docker/
RUN bash /src/deploy/docker/python.sh runtime
COPY --from=dependencies /opt/dvla /opt/dvla
COPY --from=package /package /package
COPY deploy/docker/install.sh /src/deploy/docker/
RUN bash /src/deploy/docker/install.sh install
ENV PATH=/opt/dvla/bin:$PATH PYTHONUNBUFFERED=1 DVLA_HEALTH_OF=weights
USER dvla
WORKDIR /data
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=4 \
    CMD ["/opt/dvla/bin/python", "/opt/dvla/health.py"]
ENTRYPOINT ["dvla", "weights"]
