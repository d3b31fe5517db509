"""A DreamerV3 agent small enough for a test, with parameters that leave nothing at zero.

What is compiled here is compiled without optimisation, and once per agent and process: compiling is nearly all that
these tests take. Sizes of different axes differ, so that no two can be swapped unseen.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.dreamerv3 import losses
from telamon.agents.dreamerv3.agent import DreamerV3, TrainState, UpdateNoise, is_image
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.dreamerv3.losses import Batch, Found
from telamon.data import ActionSpec, ArraySpec, EnvSpec, Window
from telamon.normalizers import PercentileRange

ENV = EnvSpec(
    id="tiny",
    obs=(("zeta", ArraySpec((3,))), ("alpha", ArraySpec(()))),  # not in alphabetical order, and with a scalar
    action=ActionSpec((2,)),
    episode_length=50,
)

MIXED = EnvSpec(
    id="mixed",
    obs=(
        ("sense/arm.x", ArraySpec((3,))),
        ("level", ArraySpec(())),
        ("grid", ArraySpec((2, 2))),
        ("kind of thing", ArraySpec((), "int32", 4)),
        ("doors", ArraySpec((2,), "bool", 2)),
        ("view/right", ArraySpec((12, 16, 3), "uint8")),
        ("left view", ArraySpec((12, 16, 1), "uint8")),
    ),
    action=(
        ("steer", ActionSpec((2,))),
        ("keys/both hands", ActionSpec((2,), (3, 5))),
        ("gear", ActionSpec((), (4,))),
    ),
    episode_length=None,
)

SIZES: dict[str, Any] = dict(
    units=8, hidden=8, deter=16, stoch=2, classes=4, blocks=4, layers=1, num_bins=11, depth=2, mults=(1, 2), bspace=2,
    batch_size=3, batch_length=6, imag_length=4, report_length=5, free_nats=0.35,
    warmup=0, lr=0.01,
)  # fmt: skip

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
init = jit(DreamerV3.init, static_argnums=0)
update = jit(DreamerV3.update, static_argnums=0)
act = jit(DreamerV3.act, static_argnums=0, static_argnames="mode")
report = jit(DreamerV3.report, static_argnums=0)
act_noise = jit(DreamerV3.draw_act_noise, static_argnums=(0, 2))
update_noise = jit(DreamerV3.draw_update_noise, static_argnums=0)
report_noise = jit(DreamerV3.draw_report_noise, static_argnums=0)


@partial(jit, static_argnums=0)
def evaluate(of: DreamerV3, state: TrainState, batch: Batch, noise: UpdateNoise) -> tuple[jax.Array, Found]:
    """The loss and everything found on the way."""
    return losses.loss(state.params, state.slow, state.norm, of.networks, of.rssm, batch, noise)


def config(**changes: Any) -> DreamerV3Config:
    return DreamerV3Config(**{**SIZES, **changes})


def agent(env: EnvSpec = ENV, **changes: Any) -> DreamerV3:
    return DreamerV3(config(**changes), env)


@cache
def params(of: DreamerV3, seed: int = 0) -> Any:
    """Random numbers everywhere: no zero heads, no unit gains. Rewards and values are of ordinary size: the bins are
    e^4 apart, so their logits fall by 6 from bin to bin.
    """
    rng = np.random.default_rng(seed)

    def spread(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name, shape = path[-1].key, leaf.shape
        fan_in = np.prod(shape[:-1]) / (shape[0] if len(shape) == 3 else 1)
        scale = {"kernel": 1 / np.sqrt(fan_in), "bias": 0.3, "scale": 0.3}[name]
        return jnp.asarray((name == "scale") + scale * rng.normal(size=shape), jnp.float32)

    tree = jax.tree_util.tree_map_with_path(spread, jax.eval_shape(of.init, jax.random.key(0)).params)
    bins = of.config.num_bins
    for head in ("rew", "val"):
        last = tree[head][max(tree[head])]
        last["bias"] = last["bias"] - 6.0 * np.abs(np.arange(bins) - bins // 2)
    return tree


def state(of: DreamerV3, seed: int = 0) -> TrainState:
    """A state before its first update, with a slow critic of its own and a return scale above its floor."""
    return of.start(params(of, seed), params(of, seed + 1)["val"])._replace(
        norm=PercentileRange(jnp.float32(0.5), jnp.float32(2.5))
    )


@cache
def fresh(of: DreamerV3, seed: int = 0) -> TrainState:
    """A state as a run begins with it."""
    return init(of, jax.random.key(seed))


def values(array: ArraySpec, lead: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random entries [*lead, *shape] of what an environment with this array could give."""
    shape = (*lead, *array.shape)
    if is_image(array):
        return rng.integers(0, 256, shape, np.uint8)
    if array.classes is not None:
        return np.asarray(rng.integers(0, array.classes, shape)).astype(array.dtype)
    return np.asarray(rng.normal(size=shape)).astype(array.dtype)


def observations(env: EnvSpec, lead: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {key: values(array, lead, rng) for key, array in env.obs}


def window(of: DreamerV3, seed: int = 0) -> Window:
    """Random rows. Of those trained, 2 of the first window is a true end and of the second a time limit; 3 is the
    reset after it.
    """
    rng = np.random.default_rng(seed)
    c = of.config
    lead = (c.batch_size, of.window_spec.length)
    first, last, terminal = (np.zeros(lead, bool) for _ in range(3))
    first[:, 0] = True
    first[:2, c.context + 3], last[:2, c.context + 2], terminal[0, c.context + 2] = True, True, True
    actions = {}
    for key, spec in of.env.actions:
        if spec.classes is None:
            actions[key] = rng.normal(size=(*lead, *spec.shape)).astype(np.float32)
        else:
            highs = np.reshape(spec.classes, spec.shape)
            actions[key] = rng.integers(0, highs, (*lead, *spec.shape)).astype(np.int32)
    deter = rng.normal(size=(c.batch_size, c.context, c.deter)).astype(c.dtype)
    return Window(
        env_id=np.zeros(c.batch_size, np.int32), first_row=np.zeros(c.batch_size, np.int64),
        obs={key: values(array, lead, rng) for key, array in of.env.obs},
        reward=rng.normal(size=lead).astype(np.float32), is_first=first, is_last=last, is_terminal=terminal,
        action=actions["action"] if isinstance(of.env.action, ActionSpec) else actions,
        latents={"deter": deter, "stoch": rng.integers(0, c.classes, (c.batch_size, c.context, c.stoch), np.uint8)},
    )  # fmt: skip


@cache
def found(of: DreamerV3) -> tuple[jax.Array, Found]:
    """One evaluation of the loss, on `state`, `window` and the noise of key 0."""
    return evaluate(of, state(of), of.batch(window(of)), update_noise(of, jax.random.key(0)))


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """A tree's arrays by their path."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
