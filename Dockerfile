# An image for CPUs, or for GPUs with the CUDA version of an extra:
#   docker build --tag transformer-jax .
#   docker build --tag transformer-jax --build-arg EXTRA=cuda13 .
# The versions in constraints.txt are those that the tests passed with, on Python 3.11.
FROM python:3.11-slim
ARG EXTRA=
WORKDIR /opt/transformer-jax
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY transformer_jax transformer_jax
# The CUDA libraries come from PyPI, so the image needs only the driver of its host.
RUN python -m pip install --no-cache-dir --constraint constraints.txt ".[cloud${EXTRA:+,$EXTRA}]" \
    && transformer-jax version
# Mount a folder at /cache to keep prepared text and compiled programs. Any user may run the image.
RUN mkdir -m 1777 /cache /data
ENV TRANSFORMER_JAX_CACHE=/cache
# Google Kubernetes Engine mounts the driver here, but does not add the folder to the search path.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64
WORKDIR /data
CMD ["transformer-jax", "help"]
