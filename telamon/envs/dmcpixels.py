"""dm_control suite tasks seen through a camera: `dmcpixels:walker-walk`, observation {"image"} and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from telamon.data import ArraySpec
from telamon.envs.base import EnvError, OnError
from telamon.envs.checks import IMAGE_SIZES, check_option
from telamon.envs.dmc import RENDER_SIZE, DMControl, batch_of, camera_of, drawing, task_names
from telamon.envs.host import HostEnvs

__all__ = ["Pixels", "make", "task_names"]

_PLAIN = {"shadow": False, "reflection": False}


def make(
    name: str,
    num_envs: int,
    seed: int,
    *,
    action_repeat: int | None = None,
    on_error: OnError = "stop",
    size: int = 64,
    fast_render: bool = False,
    **kwargs: Any,
) -> HostEnvs:
    """A batch of one suite task. Raises UnknownEnv; EnvError where nothing can be drawn.

    size: pixels per side.
    fast_render: no shadows, reflections or smoothed edges: several times cheaper, and other pictures than those that
    published scores were reached on.
    kwargs: the task's own (`time_limit`, ...).
    """
    check_option("size", size, IMAGE_SIZES)
    check_option("fast_render", fast_render, (False, True))

    def one(env: Any, reference: Mapping[str, np.ndarray], camera: int) -> Pixels:
        return Pixels(env, reference, camera, size, fast_render)

    obs = (("image", ArraySpec((size, size, 3), "uint8")),)
    batch = batch_of(f"dmcpixels:{name}", name, num_envs, seed, action_repeat, on_error, kwargs, one, obs)
    try:
        batch.render()
    except NotImplementedError as error:
        batch.close()
        raise EnvError(str(error)) from error
    return batch


class Pixels(DMControl):
    """One dm_control environment that is seen through camera `camera`."""

    def __init__(
        self, env: Any, reference: Mapping[str, np.ndarray], camera: int, size: int, fast_render: bool
    ) -> None:
        super().__init__(env, reference, camera)
        self._size = size
        self._flags = _PLAIN if fast_render else {}
        self._view: Any = None
        if fast_render:  # the model's buffer and its smoothing are settled when it is first drawn
            visual = env.physics.model.vis
            visual.quality.offsamples = 0
            visual.global_.offwidth = visual.global_.offheight = size

    def observe(self) -> dict[str, np.ndarray]:
        return {"image": self._draw()}

    def render(self) -> np.ndarray:
        """What the agent sees, enlarged."""
        times = max(1, RENDER_SIZE // self._size)
        return self._draw().repeat(times, axis=0).repeat(times, axis=1)

    def _draw(self) -> np.ndarray:
        with drawing():
            if self._view is None:
                self._view = camera_of(self._env.physics, self._size, self._camera)
            return self._view.render(render_flag_overrides=self._flags)
