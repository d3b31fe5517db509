"""The DreamerV3 agent: the contract of `telamon.agents.base` on top of losses, optim and the RSSM.

Acting filters each observation into a latent state and samples the policy, in evaluation too. The latents are stored
with the rows; a window starts from those of its context row, and an update writes fresh ones back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.base import Action, Mode, OpenLoop, Report
from telamon.agents.dreamerv3 import losses, optim
from telamon.agents.dreamerv3.config import RECIPES, DreamerV3Config
from telamon.agents.dreamerv3.losses import Batch, Found
from telamon.agents.dreamerv3.networks import (
    Networks,
    Params,
    action_width,
    check_sides,
    encode_action,
    head_width,
)
from telamon.agents.dreamerv3.rssm import RSSM, State
from telamon.data import BARE_ACTION, ActionSpec, ArraySpec, EnvSpec, RowSpec, TrainRatio, Window, WindowSpec
from telamon.networks import ema
from telamon.normalizers import PercentileRange

REPORT_WINDOWS = 6
"""Most windows of an open-loop prediction."""


class TrainState(NamedTuple):
    """Everything that an update changes."""

    params: Params
    slow: Params
    """The slow critic."""
    optim: Any
    """Of optax: squared gradients, momentum, counts."""
    norm: PercentileRange
    """Of returns."""
    updates: jax.Array
    """int32."""


class UpdateNoise(NamedTuple):
    """Every random draw of one update. Gumbel picks classes, N(0, 1) moves continuous actions."""

    observed: jax.Array
    """[B, T, S, C] Gumbel: the posterior."""
    imagined: jax.Array
    """[H, N, S, C] Gumbel: the prior, N = B * rows imagined from."""
    action: dict[str, jax.Array]
    """[H, N, n] per action key."""


class ReportNoise(NamedTuple):
    """Every random draw of one report."""

    update: UpdateNoise
    foreseen: jax.Array
    """[rows foreseen, windows, S, C] Gumbel."""


class ActNoise(NamedTuple):
    """Every random draw of one tick of E environments."""

    latent: jax.Array
    """[E, S, C] Gumbel."""
    action: dict[str, jax.Array]
    """[E, n] per action key."""


class Carry(NamedTuple):
    """What an actor carries from tick to tick."""

    state: State
    prev_action: jax.Array
    """[E, A], encoded."""


@dataclass(frozen=True)
class DreamerV3:
    """DreamerV3 for one environment. Raises ValueError for what it cannot learn."""

    config: DreamerV3Config
    env: EnvSpec

    def __post_init__(self) -> None:
        if not self.env.obs:
            raise ValueError(f"dreamerv3 learns from observations, but {self.env.id} has none")
        for key, array in self.env.obs:
            if len(array.shape) > 2 and not is_image(array):
                raise ValueError(
                    f"dreamerv3 takes images as uint8 [height, width, channels] and vectors of at most two axes, but "
                    f"{key!r} of {self.env.id} is {array.dtype} {list(array.shape)}; reshape or convert it"
                )
            if not is_image(array) and array.classes is None and np.dtype(array.dtype).kind in "iub":
                raise ValueError(
                    f"dreamerv3 learns integers as categories, but {key!r} of {self.env.id} is {array.dtype} without "
                    "known bounds from 0; declare it Discrete or MultiDiscrete, or give it as float32"
                )
        halvings = len(self.config.image_mults) - self.config.image_strided
        for key, array in self.images:
            check_sides(key, array.shape, halvings)
            if array.shape[:2] != self.images[0][1].shape[:2]:
                raise ValueError(
                    f"dreamerv3 sees all images as one, but {key!r} of {self.env.id} is {list(array.shape[:2])} and "
                    f"{self.images[0][0]!r} is {list(self.images[0][1].shape[:2])}; give them one size"
                )
        if self.images:
            c = self.config
            channels = c.depth * c.image_mults[-1]
            if c.deter % c.bspace or channels % c.bspace:
                raise ValueError(
                    f"agent.deter={c.deter} and the last stage's {channels} channels (agent.depth * agent.mults) must "
                    f"be multiples of agent.bspace={c.bspace}"
                )

    # what the task implies

    @property
    def vectors(self) -> tuple[tuple[str, ArraySpec], ...]:
        return tuple((key, array) for key, array in self.env.obs if not is_image(array))

    @property
    def images(self) -> tuple[tuple[str, ArraySpec], ...]:
        return tuple((key, array) for key, array in self.env.obs if is_image(array))

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    @property
    def learns_terminations(self) -> bool:
        return True

    @property
    def acts_at_random(self) -> bool:
        return False

    @cached_property
    def networks(self) -> Networks:
        return Networks(self.config, self.vectors, self.images, self.env.actions)

    @cached_property
    def rssm(self) -> RSSM:
        return RSSM(self.config, action_width(self.env.actions), self.networks.token_width)

    @property
    def row_spec(self) -> RowSpec:
        c = self.config
        latents = (("deter", ArraySpec((c.deter,), c.dtype)), ("stoch", ArraySpec((c.stoch,), "uint8")))
        return RowSpec(self.env.obs, self.env.action_arrays, latents)

    @property
    def window_spec(self) -> WindowSpec:
        c = self.config
        return WindowSpec(
            length=c.context + c.batch_length, context=c.context, cross_episodes=True, closed_only=False,
            start="windows", latents="context", online=True, annotate=True,
        )  # fmt: skip

    def schedule(self, num_envs: int) -> TrainRatio:
        """train_ratio / (B T) updates per row, once as many windows can be sampled as the recipe asks for.

        Raises ValueError where the replay never holds as many.
        """
        if self.config.buffer_size < self.config.start_windows:
            raise ValueError(
                f"agent.buffer_size={self.config.buffer_size} is below {self.config.start_windows}, the windows "
                "at which training starts; raise it"
            )
        return TrainRatio(self.config.updates_per_row, self.config.start_windows, self.window_spec.length)

    def capacity(self, num_envs: int) -> int:
        """Rows per environment that hold `buffer_size` windows."""
        return math.ceil(self.config.buffer_size / num_envs) + self.window_spec.length - 1

    # state

    def init(self, key: jax.Array) -> TrainState:
        nets, dyn = jax.random.split(key)
        params = self.networks.init(nets) | {"dyn": self.rssm.init(dyn)}
        return self.start(params, jax.tree.map(jnp.copy, params["val"]))

    def start(self, params: Params, slow: Params) -> TrainState:
        """Given parameters, imported ones for example, before their first update."""
        return TrainState(
            params,
            slow,
            optim.make(self.config).init(params),
            losses.normalizer(self.config).init(),
            jnp.zeros((), jnp.int32),
        )

    def acting_params(self, state: TrainState) -> Params:
        return {name: state.params[name] for name in ("enc", "dyn", "pol")}

    # acting

    def initial_carry(self, num_envs: int) -> Carry:
        return Carry(self.rssm.initial(num_envs), jnp.zeros((num_envs, self.rssm.action_width)))

    def draw_act_noise(self, key: jax.Array, num_envs: int) -> ActNoise:
        latent, action = jax.random.split(key)
        c = self.config
        return ActNoise(jax.random.gumbel(latent, (num_envs, c.stoch, c.classes)), self._action_noise(action, num_envs))

    def act(
        self,
        params: Params,
        carry: Carry,
        obs: Mapping[str, jax.Array],
        is_first: jax.Array,
        noise: ActNoise,
        mode: Mode,
    ) -> tuple[Action, Carry, dict[str, jax.Array]]:
        """Actions [E, *action shape], the new carry, and the posterior's latents. Both modes sample."""
        tokens = self.networks.encode(params, obs, lead=1)
        seen = self.rssm.observe_step(params["dyn"], carry.state, tokens, carry.prev_action, is_first, noise.latent)
        policy = self.networks.policy(params, losses.features(seen))
        action = {key: policy[key].sample(noise.action[key]) for key, _ in self.env.actions}
        encoded = encode_action(self.env.actions, action, lead=1)
        bare = isinstance(self.env.action, ActionSpec)
        return (
            action[BARE_ACTION] if bare else action,
            Carry(State(seen.deter, seen.stoch), encoded),
            latents(seen.deter, seen.stoch),
        )

    # learning

    def draw_update_noise(self, key: jax.Array) -> UpdateNoise:
        c = self.config
        observed, imagined, action = jax.random.split(key, 3)
        n = c.batch_size * (c.imag_last or c.batch_length)
        return UpdateNoise(
            observed=jax.random.gumbel(observed, (c.batch_size, c.batch_length, c.stoch, c.classes)),
            imagined=jax.random.gumbel(imagined, (c.imag_length, n, c.stoch, c.classes)),
            action=self._action_noise(action, c.imag_length, n),
        )

    def _action_noise(self, key: jax.Array, *lead: int) -> dict[str, jax.Array]:
        """Per action key, what one draw takes: [*lead, n]."""
        noise = {}
        for (name, spec), k in zip(self.env.actions, jax.random.split(key, len(self.env.actions)), strict=True):
            draw = jax.random.normal if spec.classes is None else jax.random.gumbel
            noise[name] = draw(k, (*lead, head_width(spec)))
        return noise

    def batch(self, window: Window) -> Batch:
        """Windows [B, context + T] of rows: the context gives the carry, each row the action before the next."""
        c = self.config
        k, stored = c.context, window.action
        named = stored if isinstance(stored, Mapping) else {BARE_ACTION: stored}
        actions = encode_action(self.env.actions, {key: jnp.asarray(x) for key, x in named.items()}, lead=2)
        if k == 0:
            carry = self.rssm.initial(len(window.reward))
            prev_action = jnp.concatenate([jnp.zeros_like(actions[:, :1]), actions[:, :-1]], 1)
        else:
            deter, index = (jnp.asarray(window.latents[name])[:, -1] for name in ("deter", "stoch"))
            carry = State(deter.astype(c.dtype), jax.nn.one_hot(index, c.classes, dtype=c.dtype))
            prev_action = actions[:, k - 1 : -1]
        rows = lambda x: jnp.asarray(x)[:, k:]
        return Batch(
            obs={key: rows(window.obs[key]) for key, _ in self.env.obs},
            prev_action=prev_action,
            reward=rows(window.reward).astype(jnp.float32),
            is_first=rows(window.is_first),
            is_last=rows(window.is_last),
            is_terminal=rows(window.is_terminal),
            carry=carry,
        )

    def update(
        self, state: TrainState, window: Window, noise: UpdateNoise
    ) -> tuple[TrainState, dict[str, jax.Array], dict[str, jax.Array]]:
        state, metrics, found, _ = self.update_with_intermediates(state, self.batch(window), noise)
        post = found.model.posterior
        return state, metrics, latents(post.deter, post.stoch)

    def update_with_intermediates(
        self, state: TrainState, batch: Batch, noise: UpdateNoise
    ) -> tuple[TrainState, dict[str, jax.Array], Found, Params]:
        """Losses (which move the return scale), then the optimiser, then the slow critic. Also returns gradients."""
        c = self.config
        grad = jax.value_and_grad(losses.loss, has_aux=True)
        (total, found), grads = grad(state.params, state.slow, state.norm, self.networks, self.rssm, batch, noise)
        steps, opt = optim.make(c).update(grads, state.optim, state.params)
        params = jax.tree.map(lambda p, s: p + s, state.params, steps)
        slow = self._slow(state, params["val"])
        metrics = {
            **{f"{name}_loss": mean for name, mean in found.losses.items()},
            "total_loss": total,
            **losses.statistics(found, c),
            "grad_norm": optim.global_norm(grads),
            "update_norm": optim.global_norm(steps),
            "param_norm": optim.global_norm(params),
        }
        return TrainState(params, slow, opt, found.actor_critic.norm, state.updates + 1), metrics, found, grads

    def _slow(self, state: TrainState, critic: Params) -> Params:
        """The slow critic after an update."""
        c = self.config
        first = RECIPES[c.recipe].hard_first_slow & (state.updates == 0)
        due = state.updates % c.slow_every == 0
        followed = ema(state.slow, critic, c.slow_rate)
        return jax.tree.map(
            lambda old, new, copy: jnp.where(first, copy, jnp.where(due, new, old)), state.slow, followed, critic
        )

    # reporting

    def draw_report_noise(self, key: jax.Array) -> ReportNoise:
        c = self.config
        update, foreseen = jax.random.split(key)
        n, length = min(REPORT_WINDOWS, c.batch_size), min(c.report_length, c.batch_length)
        shape = (length - length // 2, n, c.stoch, c.classes)
        return ReportNoise(self.draw_update_noise(update), jax.random.gumbel(foreseen, shape))

    def report(self, state: TrainState, window: Window, noise: ReportNoise) -> Report:
        """Losses, and how the model continues the first half of each window from the actions alone."""
        batch, params = self.batch(window), state.params
        _, found = losses.loss(params, state.slow, state.norm, self.networks, self.rssm, batch, noise.update)
        foreseen, n = noise.foreseen.shape[:2]
        length = min(self.config.report_length, self.config.batch_length)
        observed = length - foreseen
        post = jax.tree.map(lambda x: x[:n, :observed], found.model.posterior)

        def step(carry: State, x: tuple[jax.Array, jax.Array]) -> tuple[State, State]:
            state, _ = self.rssm.imagine_step(params["dyn"], carry, *x)
            return state, state

        start = State(post.deter[:, -1], post.stoch[:, -1])
        actions = batch.prev_action[:n, observed:length].swapaxes(0, 1)
        _, ahead = jax.lax.scan(step, start, (actions, noise.foreseen))
        deter, stoch = (
            jnp.concatenate([seen, later.swapaxes(0, 1)], 1)
            for seen, later in zip((post.deter, post.stoch), ahead, strict=True)
        )
        decoded = self.networks.decode(params, (deter, stoch.reshape(*stoch.shape[:2], -1)))
        predicted = self.networks.prediction(decoded)
        open_loop = {}
        for key, array in self.env.obs:
            shape = array.shape if is_image(array) else (array.size,)
            shown = lambda x, shape=shape: x.reshape(n, length, *shape).astype(
                jnp.uint8 if len(shape) == 3 else jnp.float32
            )
            open_loop[key] = OpenLoop(shown(batch.obs[key][:n, :length]), shown(predicted[key]))
        means = {f"{name}_loss": mean for name, mean in found.losses.items()}
        return Report(means, open_loop, jnp.asarray(observed, jnp.int32))


def is_image(array: ArraySpec) -> bool:
    """Whether an observation goes through the convolutions."""
    return len(array.shape) == 3 and array.dtype == "uint8"


def latents(deter: jax.Array, stoch: jax.Array) -> dict[str, jax.Array]:
    """What a row stores: deter [..., D] in the compute dtype, and the classes [..., S] of stoch, uint8."""
    return {"deter": deter, "stoch": jnp.argmax(stoch, -1).astype(jnp.uint8)}
