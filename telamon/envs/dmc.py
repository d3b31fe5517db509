"""dm_control suite tasks: `dmc:cartpole-swingup` (domain-task, dashes for underscores, as in TD-MPC2's task names)."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mujoco
import numpy as np

from telamon.data import BARE_ACTION, ArraySpec, EnvSpec
from telamon.envs.base import DM_CONTROL_REPEAT, Action, EnvError, OnError, UnknownEnv
from telamon.envs.checks import box_action, env_seed, obs_dtype, to_bounds
from telamon.envs.host import HostEnvs, Transition

RENDER_SIZE = 384
"""Pixels per side, as in TD-MPC2's videos."""

_DOMAINS = {"cup": "ball_in_cup", "pointmass": "point_mass"}
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_ASSETS = ("tex_", "mesh_", "skin_")
"""Prefixes of model arrays that no task changes and that make up most of a model's bytes."""


def _import_suite() -> ModuleType:
    """Imports dm_control.suite with a renderer that works without a display.

    dm_control picks its renderer while it is imported, and by default one that needs a display. EGL needs none, but its
    import fails where no driver is installed; training needs no pictures, so it then goes on without a renderer.
    """
    headless = sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"} & os.environ.keys()
    if headless:
        os.environ["MUJOCO_GL"] = "egl"
    try:
        from dm_control import suite
    except (ImportError, AttributeError):  # PyOpenGL raises AttributeError where libEGL is missing
        if not headless:
            raise
        os.environ["MUJOCO_GL"] = "off"
        from dm_control import suite
    return suite


suite = _import_suite()


def task_names() -> list[str]:
    """All tasks of the suite, as `make` takes them."""
    short = {v: k for k, v in _DOMAINS.items()}
    return [f"{short.get(d, d)}-{t.replace('_', '-')}" for d, t in suite.ALL_TASKS]


def make(
    name: str, num_envs: int, seed: int, *, action_repeat: int | None = None, on_error: OnError = "stop", **kwargs: Any
) -> HostEnvs:
    """A batch of one suite task. `kwargs` are the task's own (`time_limit`, ...). Raises UnknownEnv, EnvError."""
    return batch_of(f"dmc:{name}", name, num_envs, seed, action_repeat, on_error, kwargs, DMControl)


def batch_of(
    env_id: str,
    name: str,
    num_envs: int,
    seed: int,
    action_repeat: int | None,
    on_error: OnError,
    task_kwargs: Mapping[str, Any],
    one: Callable[[Any, Mapping[str, np.ndarray], int], DMControl],
    obs: tuple[tuple[str, ArraySpec], ...] | None = None,
) -> HostEnvs:
    """A batch of one suite task, whose environments `one(env, reference, camera)` makes. Raises UnknownEnv, EnvError.

    obs: what is observed; None for the task's own vectors.
    """
    domain, _, task = name.partition("-")
    domain, task = _DOMAINS.get(domain, domain), task.replace("-", "_")
    if (domain, task) not in suite.ALL_TASKS:
        raise UnknownEnv(name)
    repeat = DM_CONTROL_REPEAT if action_repeat is None else action_repeat

    def load(index: int, rebuild: int) -> DMControl:
        random = env_seed(seed, index, rebuild)
        env = suite.load(domain, task, {**task_kwargs, "random": random})
        return one(env, reference, 2 if domain == "quadruped" else 0)

    try:
        probe = suite.load(domain, task, {**task_kwargs, "random": 0})
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise EnvError(str(error)) from error
    reference = {k: v.copy() for k, v in model_arrays(probe).items()}
    limit, action = probe._step_limit, probe.action_spec()  # the limit has no public name
    action_spec, bounds = box_action(
        np.broadcast_to(action.minimum, action.shape), np.broadcast_to(action.maximum, action.shape), action.dtype
    )
    spec = EnvSpec(
        id=env_id,
        obs=obs or tuple((k, ArraySpec(v.shape, obs_dtype(v.dtype, k))) for k, v in probe.observation_spec().items()),
        action=action_spec,
        episode_length=None if math.isinf(limit) else math.ceil(math.ceil(limit) / repeat),
        action_repeat=repeat,
    )
    return HostEnvs(spec, load, num_envs, on_error, {BARE_ACTION: bounds})


def model_arrays(env: Any) -> dict[str, np.ndarray]:
    """The arrays of an environment's MuJoCo model (views), large assets left out."""
    model = env.physics.model.ptr
    names = (n for n in dir(model) if not n.startswith(("_", *_ASSETS)))
    return {n: v for n in names if isinstance(v := getattr(model, n), np.ndarray)}


def camera_of(physics: Any, size: int, number: int) -> Any:
    """A camera of dm_control's. To make one costs more than a plain picture."""
    from dm_control.mujoco import Camera  # here, because it too picks a renderer while it is imported

    return Camera(physics, size, size, camera_id=number)


@contextmanager
def drawing() -> Iterator[None]:
    """Raises NotImplementedError, with what to do about it, where dm_control has no renderer."""
    try:
        yield
    except (RuntimeError, mujoco.FatalError) as error:  # dm_control's stand-in for a renderer, or one without a display
        raise NotImplementedError(
            f"dm_control cannot draw here ({error}); without a display it needs EGL: install libegl1 and a driver"
        ) from error


class DMControl:
    """One dm_control environment (`OneEnv`).

    reference: a model's arrays as the suite loads them, relative to which a state holds this one's. Tasks draw targets,
    terrain and constants into the *model*, which MuJoCo's own state leaves out.
    """

    def __init__(self, env: Any, reference: Mapping[str, np.ndarray], camera: int) -> None:
        self._env = env
        self._camera = camera
        action = env.action_spec()
        self._low, self._high = action.minimum, action.maximum
        self._reference = reference
        self._seen: Mapping[str, Any] = {}

    def reset(self) -> None:
        self._seen = self._env.reset().observation

    def step(self, action: Action) -> Transition:
        step = self._env.step(to_bounds(action, self._low, self._high))
        self._seen = step.observation
        return Transition(step.reward, step.last(), step.last() and step.discount == 0)

    def observe(self) -> Mapping[str, Any]:
        return self._seen

    def get_state(self) -> dict[str, np.ndarray]:
        """MuJoCo's integration state, the model arrays the task changed, the step count and the task's generator."""
        physics = self._env.physics
        model = model_arrays(self._env)
        random = self._env.task.random.get_state(legacy=False)
        return {
            "physics": physics.get_state(sig=_STATE),
            "steps": np.array([self._env._step_count, self._env._reset_next_step]),
            "random": np.append(random["state"]["key"], [random["state"]["pos"], random["has_gauss"]]).astype(
                np.uint32
            ),
            "gauss": np.array(random["gauss"]),
            **{f"model/{k}": v.copy() for k, v in model.items() if not np.array_equal(v, self._reference[k])},
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._env.reset()  # some tasks set their own attributes here
        for name, array in model_arrays(self._env).items():
            array[...] = state.get(f"model/{name}", self._reference[name])
        physics = self._env.physics
        physics.set_state(state["physics"], sig=_STATE)
        mujoco.mj_forward(physics.model.ptr, physics.data.ptr)  # what follows from the state, or the next step diverges
        self._env._step_count, self._env._reset_next_step = int(state["steps"][0]), bool(state["steps"][1])
        *key, pos, has_gauss = state["random"].tolist()
        self._env.task.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": np.array(key, np.uint32), "pos": pos},
                "has_gauss": has_gauss,
                "gauss": float(state["gauss"]),
            }
        )

    def render(self) -> np.ndarray:
        with drawing():
            return self._env.physics.render(RENDER_SIZE, RENDER_SIZE, camera_id=self._camera)

    def close(self) -> None:
        self._env.close()
