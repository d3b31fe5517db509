"""The TD-MPC2 agent: the contract of `telamon.agents.base` on top of losses, optim and planner.

Single task, state observations. Acting plans with MPPI; one update is made per environment transition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from telamon.agents.base import Mode, Report
from telamon.agents.tdmpc2 import losses, optim
from telamon.agents.tdmpc2.config import RECIPES, TDMPC2Config, discount
from telamon.agents.tdmpc2.losses import Batch
from telamon.agents.tdmpc2.networks import Networks, Params
from telamon.agents.tdmpc2.planner import PlanNoise, draw_pairs, draw_plan_noise, plan
from telamon.agents.tdmpc2.policy import sample
from telamon.data import ActionSpec, EnvSpec, RowSpec, Schedule, Window, WindowSpec
from telamon.networks import ema
from telamon.normalizers import RunningScale


class TrainState(NamedTuple):
    """Everything that an update changes."""

    params: Params
    target_q: Params
    optim: optim.OptimState
    scale: jax.Array
    """The running Q scale S."""


class UpdateNoise(NamedTuple):
    """Every random draw of one update."""

    td_eps: jax.Array
    """[H, B, A] N(0, 1): policy samples in the TD target."""
    td_pair: jax.Array
    """int32 [2]: target members."""
    pi_eps: jax.Array
    """[H + 1, B, A] N(0, 1): policy samples in the policy loss."""
    pi_pair: jax.Array
    """int32 [2]: online members."""
    dropout: jax.Array
    """Key of the Q dropout, folded per call."""


class Found(NamedTuple):
    """What one update computed on its way; gradients are those before clipping."""

    target: losses.Target
    model: losses.WorldModel
    grads: Params
    policy: losses.Policy
    pi_grads: Params


class ActNoise(NamedTuple):
    """Every random draw of one tick of E environments."""

    plan: PlanNoise
    """Leaves [E, ...], but one list of pairs for all: a pair per environment would gather weights per environment."""
    policy_eps: jax.Array
    """[E, A]: acting without a planner."""


NOISE_AXES = PlanNoise(pi_traj_eps=0, candidates=0, terminal_eps=0, pairs=None, elite=0, final=0, dropout=0)  # type: ignore[arg-type]  # vmap axes, not arrays


@dataclass(frozen=True)
class TDMPC2:
    """TD-MPC2 for one environment. Raises ValueError for what it cannot learn."""

    config: TDMPC2Config
    env: EnvSpec

    def __post_init__(self) -> None:
        if not isinstance(self.env.action, ActionSpec):
            raise ValueError(
                f"tdmpc2 plans over one vector of actions, but {self.env.id} has a dict of "
                f"{', '.join(key for key, _ in self.env.action)}; choose an ENV with a Box action, or dreamerv3"
            )
        if self.env.action.classes is not None:
            raise ValueError(
                f"tdmpc2 plans over continuous actions, but {self.env.id} has discrete actions "
                f"{self.env.action.classes}; choose an ENV with a Box action (`telamon envs` lists them), or dreamerv3"
            )
        for key, array in self.env.obs:
            if len(array.shape) > 1:
                raise ValueError(
                    f"tdmpc2 takes vector observations, but {key!r} of {self.env.id} has shape {array.shape}; "
                    "choose an ENV with vector observations (`telamon check-env ENV` shows them)"
                )
        if self.config.episode_length is None and self.env.episode_length is None:
            raise ValueError(
                f"tdmpc2 takes its discount from the episode length, but {self.env.id} has no known time limit; "
                "set agent.episode_length (agent steps per episode)"
            )

    # what the task implies

    @property
    def episode_length(self) -> int:
        """Agent steps per episode. The config's word wins over the environment's."""
        length = self.config.episode_length or self.env.episode_length
        assert length is not None  # refused at construction
        return length

    @property
    def gamma(self) -> float:
        c = self.config
        return discount(self.episode_length, c.discount_denom, c.discount_min, c.discount_max)

    @property
    def action_spec(self) -> ActionSpec:
        assert isinstance(self.env.action, ActionSpec)  # a dict is refused at construction
        return self.env.action

    @property
    def action_dim(self) -> int:
        return self.action_spec.array.size

    @property
    def iterations(self) -> int:
        return self.config.iterations + (2 if self.action_dim >= 20 else 0)

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    @property
    def learns_terminations(self) -> bool:
        """Whether true terminations mean anything to this agent; the knob is agent.episodic."""
        return self.config.episodic

    @property
    def acts_at_random(self) -> bool:
        return True

    @cached_property
    def networks(self) -> Networks:
        return Networks(self.config, sum(a.size for _, a in self.env.obs), self.action_dim)

    @property
    def row_spec(self) -> RowSpec:
        return RowSpec(self.env.obs, self.action_spec.array)

    @property
    def window_spec(self) -> WindowSpec:
        return WindowSpec(length=self.config.horizon + 1, start="episodes", last_start=self.config.last_start)

    def schedule(self, num_envs: int) -> Schedule:
        """S + 1 random transitions (of one environment), then a burst of S updates, then one update per transition.

        S = max(1000, 5 episodes), and with many environments never before their first round of episodes has closed.
        """
        given = self.config.seed_steps
        seed = max(1000, 5 * self.episode_length) if given is None else given
        rounds = num_envs * math.ceil(max(seed, num_envs * self.episode_length) / num_envs)
        return Schedule("transitions", start=rounds, lead=num_envs)

    def capacity(self, num_envs: int) -> int:
        """Rows per environment that hold `buffer_size` transitions in episodes of full length."""
        episodes = math.ceil(self.config.buffer_size / num_envs / self.episode_length)
        return episodes * (self.episode_length + 1)

    # state

    def init(self, key: jax.Array) -> TrainState:
        params = self.networks.init(key)
        return self.start(params, jax.tree.map(jnp.copy, params["q"]))

    def start(self, params: Params, target_q: Params) -> TrainState:
        """Given parameters, imported ones for example, before their first update."""
        return TrainState(params, target_q, optim.init(*split(params)), RunningScale(self.config.tau).init())

    def acting_params(self, state: TrainState) -> Params:
        return state.params

    def flatten_obs(self, obs: Mapping[str, jax.Array | np.ndarray]) -> jax.Array:
        """All entries in the environment's own key order, scalars as one: {key: [..., *shape]} -> float32 [..., S]."""
        parts = []
        for key, array in self.env.obs:
            x = jnp.asarray(obs[key], jnp.float32)
            parts.append(x.reshape(*x.shape[: x.ndim - len(array.shape)], array.size))
        return jnp.concatenate(parts, -1)

    # acting

    def initial_carry(self, num_envs: int) -> jax.Array:
        """The previous plan's mean, [E, H, A]."""
        return jnp.zeros((num_envs, self.config.horizon, self.action_dim))

    def draw_act_noise(self, key: jax.Array, num_envs: int) -> ActNoise:
        plan_key, policy_key = jax.random.split(key)
        draw = lambda k: draw_plan_noise(k, self.config, self.action_dim, self.iterations)
        noise = jax.vmap(draw)(jax.random.split(plan_key, num_envs))
        return ActNoise(
            noise._replace(pairs=noise.pairs[0]), jax.random.normal(policy_key, (num_envs, self.action_dim))
        )

    def act(
        self,
        params: Params,
        carry: jax.Array,
        obs: Mapping[str, jax.Array],
        is_first: jax.Array,
        noise: ActNoise,
        mode: Mode,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Actions [E, *action shape], the new carry, and no latents. Evaluation is stochastic, as the reference's."""
        z = self.networks.encode(params, self.flatten_obs(obs))
        if not self.config.mpc:
            mean, log_std = self.networks.policy(params, z)
            action = jnp.tanh(mean) if mode == "eval" else sample(mean, log_std, noise.policy_eps).action
            return action.reshape(-1, *self.action_spec.shape), carry, {}

        one = lambda z, prev, t0, noise: plan(
            self.networks, params, self.gamma, z, prev, t0, noise, eval_mode=mode == "eval"
        )[:2]
        batching = self.config.env_batching
        if batching == "auto":
            batching = "map" if jax.default_backend() == "cpu" else "vmap"
        if batching == "vmap":
            action, mean = jax.vmap(one, in_axes=(0, 0, 0, NOISE_AXES))(z, carry, is_first, noise.plan)
        else:
            shared = noise.plan.pairs  # closed over: a map runs over every leaf that it is given
            per_env = noise.plan._replace(pairs=jnp.zeros(len(z)))
            single = lambda x: one(x[0], x[1], x[2], x[3]._replace(pairs=shared))
            action, mean = jax.lax.map(single, (z, carry, is_first, per_env))
        return action.reshape(-1, *self.action_spec.shape), mean, {}

    # learning

    def draw_update_noise(self, key: jax.Array) -> UpdateNoise:
        c = self.config
        td, td_pair, pi, pi_pair, drop = jax.random.split(key, 5)
        return UpdateNoise(
            td_eps=jax.random.normal(td, (c.horizon, c.batch_size, self.action_dim)),
            td_pair=draw_pairs(td_pair, c.num_q, 1)[0],
            pi_eps=jax.random.normal(pi, (c.horizon + 1, c.batch_size, self.action_dim)),
            pi_pair=draw_pairs(pi_pair, c.num_q, 1)[0],
            dropout=drop,
        )

    def batch(self, window: Window) -> Batch:
        """Windows [B, H + 1] of rows as time-major transitions. A row holds the reward on *entering* it."""
        time_major = lambda x: jnp.swapaxes(jnp.asarray(x), 0, 1)
        action = time_major(window.action)[:-1]
        return Batch(
            obs=time_major(self.flatten_obs(window.obs)),
            action=action.reshape(*action.shape[:2], self.action_dim),
            reward=time_major(window.reward)[1:],
            terminated=time_major(window.is_terminal)[1:].astype(jnp.float32),
        )

    def losses(
        self, state: TrainState, batch: Batch, noise: UpdateNoise
    ) -> tuple[losses.Target, tuple[jax.Array, losses.WorldModel], Params]:
        """TD target, world-model loss with intermediates, and its gradients."""
        td_key, value_key, _ = _dropout_keys(noise.dropout)
        td_dropout = td_key if RECIPES[self.config.recipe].q_dropout_always else None
        target = losses.td_target(
            self.networks, state.params, state.target_q, self.gamma, batch, noise.td_eps, noise.td_pair, td_dropout
        )
        grad = jax.value_and_grad(losses.world_model_loss, has_aux=True)
        found, grads = grad(split(state.params)[0], self.networks, batch, target, value_key)
        return target, found, grads

    def update(
        self, state: TrainState, window: Window, noise: UpdateNoise
    ) -> tuple[TrainState, dict[str, jax.Array], None]:
        state, metrics, _ = self.update_with_intermediates(state, self.batch(window), noise)
        return state, metrics, None

    def update_with_intermediates(
        self, state: TrainState, batch: Batch, noise: UpdateNoise
    ) -> tuple[TrainState, dict[str, jax.Array], Found]:
        """One update: target, world model, policy (old latents, new Q), target EMA (new Q)."""
        world, pi = split(state.params)
        target, (_, model), grads = self.losses(state, batch, noise)
        world, opt, grad_norm = optim.world_step(self.config, grads, state.optim, world)

        policy_key = _dropout_keys(noise.dropout)[2]
        grad = jax.value_and_grad(losses.policy_loss, has_aux=True)
        (pi_loss, policy), pi_grads = grad(
            pi, self.networks, world["q"], model.zs, state.scale, noise.pi_eps, noise.pi_pair, policy_key
        )
        pi, opt, pi_grad_norm = optim.policy_step(self.config, pi_grads, opt, pi)

        target_q = ema(state.target_q, world["q"], self.config.tau)
        metrics = {
            **model.losses,
            "pi_loss": pi_loss,
            "grad_norm": grad_norm,
            "pi_grad_norm": pi_grad_norm,
            "pi_scale": policy.scale,
            "pi_entropy": policy.entropy.mean(),
        }
        if model.termination_logits is not None:
            metrics |= losses.termination_statistics(model.termination_logits[-1], batch.terminated[-1])
        state = TrainState({**world, "pi": pi}, target_q, opt, policy.scale)
        return state, metrics, Found(target, model, grads, policy, pi_grads)

    def draw_report_noise(self, key: jax.Array) -> UpdateNoise:
        return self.draw_update_noise(key)

    def report(self, state: TrainState, window: Window, noise: UpdateNoise) -> Report:
        """World-model losses without a change of state; TD-MPC2 predicts no observations."""
        _, (_, model), _ = self.losses(state, self.batch(window), noise)
        return Report(model.losses, {}, jnp.zeros((), jnp.int32))


def split(params: Params) -> tuple[Params, Params]:
    """(world model, policy): the two optimisers' parameters."""
    return {k: v for k, v in params.items() if k != "pi"}, params["pi"]


def _dropout_keys(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Separate keys for the Q passes of the TD target, the value loss and the policy loss."""
    td, value, policy = jax.random.split(key, 3)
    return td, value, policy
