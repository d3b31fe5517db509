# Telamon on NVIDIA GPUs: the image for CPUs and JAX's CUDA packages. They bring CUDA, cuDNN and NCCL themselves, so the
# host needs a driver and the NVIDIA container toolkit, and no other base image. From the root of the checkout:
#
#   docker build --file deploy/docker/cpu.Dockerfile --tag telamon-cpu:0.1.0 .
#   docker build --file deploy/docker/cuda.Dockerfile --tag telamon-cuda:0.1.0 .
#   docker run --rm --init --gpus all --shm-size 16g --volume "$PWD/runs:/runs" telamon-cuda:0.1.0 doctor

FROM telamon-cpu:0.1.0
USER 0:0
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN python requirements.py cuda > requirements.txt \
 && pip install --no-cache-dir --only-binary :all: --constraint constraints.txt --requirement requirements.txt
# What the toolkit mounts from the host: the libraries to compute, to look at the devices, and to render.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
USER 10001:10001
WORKDIR /
