# Telamon on CPUs: local runs, actors, replay shards, the head of a cluster. From the root of the checkout:
#
#   docker build --file deploy/docker/cpu.Dockerfile --tag telamon-cpu:0.1.0 .
#   docker run --rm --init --shm-size 4g --volume "$PWD/runs:/runs" telamon-cpu:0.1.0 train tdmpc2 dmc:cartpole-swingup
#
# --shm-size: Ray's object store, and latents and windows of a replay shard, are files of /dev/shm; Docker's own bound is
# 64 MB. The user is number 10001, and /runs must be writable to it.

FROM python:3.12.12-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
RUN python -m venv /opt/telamon
ENV PATH=/opt/telamon/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# What is installed changes seldom, so it has a layer of its own. `ray[default]` adds the dashboard and its job service.
ARG EXTRAS=service,cluster,dmc,gym,plot,video
COPY pyproject.toml constraints.txt deploy/docker/requirements.py ./
RUN python requirements.py "$EXTRAS" > requirements.txt \
 && pip install --only-binary :all: --constraint constraints.txt --requirement requirements.txt 'ray[default]'

COPY README.md LICENSE NOTICE ./
COPY telamon telamon
COPY replay_server replay_server
COPY actors actors
COPY learner learner
COPY deploy deploy
RUN pip install --no-deps .

FROM python:3.12.12-slim-bookworm
# Rendering without a display, for videos and for environments of pixels. No versions: Debian keeps only the newest of a
# release, and the tag above names the release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libegl1 libegl-mesa0 libgl1-mesa-dri \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home telamon \
 && install --directory --owner telamon --group telamon /runs
COPY --from=build /opt/telamon /opt/telamon
ENV PATH=/opt/telamon/bin:$PATH MUJOCO_GL=egl RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
# `telamon train` makes runs/NAME below the folder that it is started in.
WORKDIR /
VOLUME /runs
ENTRYPOINT ["telamon"]
CMD ["--help"]
