# Images that train and serve: targets `cpu` (the default) and `cuda`. See docs/how-to/container.md.
#
#   make wheel
#   docker build --target cpu --build-arg TORCH_INDEX_URL=URL --tag reconv:cpu .    # URL: PyTorch's index of CPU wheels
#   docker build --target cuda --tag reconv:cuda .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# The wheel that `make wheel` made, with the compiled libraries inside.
FROM scratch AS wheel
COPY dist/reconv-*-manylinux_*.whl /dist/

# Every package but torch and reconv itself. --without-pip: the image needs no second one.
FROM ${PYTHON_IMAGE} AS packages
COPY packaging/requirements.txt packaging/constraints.txt /
RUN python -m venv --without-pip /opt/reconv \
    && pip --python /opt/reconv/bin/python install --no-cache-dir --no-deps --constraint /constraints.txt \
        --requirement /requirements.txt

# "+cpu" is in no version on the default index, so that a wheel with CUDA (5 GB) is never taken by mistake.
FROM packages AS packages-cpu
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX_URL=""
RUN pip --python /opt/reconv/bin/python install --no-cache-dir --constraint /constraints.txt \
        ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} "torch==${TORCH_VERSION}+cpu" \
    && torch=$(echo /opt/reconv/lib/python3*/site-packages/torch) \
    && rm -rf "$torch/include" "$torch/test" "$torch"/bin/*test* "$torch"/bin/*Test* "$torch"/bin/protoc*

FROM packages AS packages-cuda
ARG TORCH_VERSION=2.13.0
RUN pip --python /opt/reconv/bin/python install --no-cache-dir --constraint /constraints.txt \
        "torch==${TORCH_VERSION}"

# What both images have: a user without rights, and two folders that are the only ones it writes to.
FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 1000 reconv \
    && useradd --uid 1000 --gid reconv --home-dir /cache --no-create-home --shell /usr/sbin/nologin reconv \
    && install --directory --owner reconv --group reconv /cache /app /app/runs
ENV PATH=/opt/reconv/bin:${PATH} \
    HOME=/cache \
    RECONV_CACHE=/cache/reconv \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /app
VOLUME ["/app/runs", "/cache"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
ENTRYPOINT ["reconv"]
CMD ["--help"]

# Triton compiles its launchers with a C compiler when a kernel is first used; the packages of torch bring CUDA itself.
FROM runtime AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=packages-cuda /opt/reconv /opt/reconv
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip --python /opt/reconv/bin/python install --no-cache-dir --no-deps /dist/*.whl \
    && pip --python /opt/reconv/bin/python check \
    && python -c "import torch, reconv.data.decode.native as jpeg, reconv.inference.backends.winograd_library as winograd; \
        assert torch.version.cuda and not jpeg.problem() and not winograd.problem()"
USER 1000:1000

FROM runtime AS cpu
COPY --from=packages-cpu /opt/reconv /opt/reconv
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip --python /opt/reconv/bin/python install --no-cache-dir --no-deps /dist/*.whl \
    && pip --python /opt/reconv/bin/python check \
    && python -c "import torch, reconv.data.decode.native as jpeg, reconv.inference.backends.winograd_library as winograd; \
        assert not torch.version.cuda and not jpeg.problem() and not winograd.problem()"
USER 1000:1000
