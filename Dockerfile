# Image of the sidecar.
#
#   docker build --tag epd-sidecar:0.1.0 .
#   docker run --volume "$PWD/sidecar.yaml:/etc/epd-sidecar/sidecar.yaml:ro" --publish 9002:9002 epd-sidecar:0.1.0
#
# For a build that can be repeated, pin the base image by its digest (`docker buildx imagetools inspect IMAGE` prints
# it); the Python packages are pinned by constraints.txt:
#
#   docker build --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:<64 hexadecimal digits> .
#
# The configuration is read from /etc/epd-sidecar/sidecar.yaml, and SIDECAR__... variables override it. Nothing is
# written: run it with a read-only root file system.

# The version of Python that the tests run with.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir --constraint constraints.txt hatchling
COPY pyproject.toml README.md LICENSE ./
COPY sidecar ./sidecar
RUN python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .
# Installed from outside, so that no pip comes with it.
RUN python -m venv --without-pip /opt/epd-sidecar && \
    python -m pip --python /opt/epd-sidecar/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt /wheels/epd_sidecar-*.whl

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="epd-sidecar" \
      org.opencontainers.image.description="Envoy external-processing sidecar for disaggregated multimodal inference" \
      org.opencontainers.image.licenses="Apache-2.0"
# The base image brings pip, and with ensurepip the means to get it back.
RUN rm -rf /usr/local/bin/pip* \
           /usr/local/bin/wheel \
           /usr/local/lib/python3*/ensurepip \
           /usr/local/lib/python3*/site-packages/*
COPY --from=build /opt/epd-sidecar /opt/epd-sidecar
ENV PATH="/opt/epd-sidecar/bin:$PATH" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
# gRPC of the filter; metrics and HTTP health checks.
EXPOSE 9002 9090
# Turns readiness off, serves on for 5 s, drains for ext_proc.drain_timeout: give it --stop-timeout 45 or more.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s --retries=2 \
    CMD ["epd-sidecar", "health", "--config", "/etc/epd-sidecar/sidecar.yaml"]
ENTRYPOINT ["epd-sidecar"]
CMD ["serve", "--config", "/etc/epd-sidecar/sidecar.yaml"]
