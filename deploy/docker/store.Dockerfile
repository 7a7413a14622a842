# Rollout store: no torch, no simulator.
# Built from the repository's root: docker build -f deploy/docker/store.Dockerfile .
FROM docker.io/library/debian:bookworm-slim AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
COPY deploy/lib.sh deploy/install_torch.sh /src/deploy/
COPY deploy/docker/build.sh deploy/docker/requirements.py /src/deploy/docker/
RUN bash /src/deploy/docker/build.sh python
ARG EXTRAS=store
COPY pyproject.toml /src/
RUN bash /src/deploy/docker/build.sh dependencies $EXTRAS
COPY . /src/
RUN bash /src/deploy/docker/build.sh package

FROM docker.io/library/debian:bookworm-slim
COPY deploy/docker/build.sh /src/deploy/docker/
RUN bash /src/deploy/docker/build.sh runtime
COPY --from=build /opt/dvla /opt/dvla
ENV PATH=/opt/dvla/bin:$PATH PYTHONUNBUFFERED=1 DVLA_HEALTH_OF=store
USER dvla
WORKDIR /data
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=4 \
    CMD ["/opt/dvla/bin/python", "/opt/dvla/health.py"]
ENTRYPOINT ["dvla", "store"]
