"""TD-MPC2's hyperparameters, size presets and recipes (arXiv:2310.16828, tables 8 and 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """Where the code behind the published curves and the reference's latest code differ (docs/numerics.md)."""

    squashed_entropy: bool
    """The policy's entropy bonus includes the tanh Jacobian."""
    q_dropout_always: bool
    """Q dropout also acts in TD targets and in the planner, not only in losses."""
    stale_policy_norm: bool
    """The previous update's clipped policy gradient counts in the world model's clip norm."""
    elite_draw: Literal["inverse_cdf", "gumbel"]
    """How the executed elite is drawn from the scores."""


RECIPES = {
    "paper": Recipe(squashed_entropy=True, q_dropout_always=True, stale_policy_norm=True, elite_draw="inverse_cdf"),
    "latest": Recipe(squashed_entropy=False, q_dropout_always=False, stale_policy_norm=False, elite_draw="gumbel"),
}

PRESETS: dict[int | str, dict[str, int]] = {
    1: dict(enc_dim=256, mlp_dim=384, latent_dim=128, num_enc_layers=2, num_q=2),
    5: dict(enc_dim=256, mlp_dim=512, latent_dim=512, num_enc_layers=2, num_q=5),
    19: dict(enc_dim=1024, mlp_dim=1024, latent_dim=768, num_enc_layers=3, num_q=5),
    48: dict(enc_dim=1792, mlp_dim=1792, latent_dim=768, num_enc_layers=4, num_q=5),
    317: dict(enc_dim=4096, mlp_dim=4096, latent_dim=1376, num_enc_layers=5, num_q=8),
    "laptop": dict(
        enc_dim=128, mlp_dim=128, latent_dim=64, num_enc_layers=2, num_q=2, batch_size=128,
        num_samples=192, num_elites=24, num_pi_trajs=8, iterations=4,
    ),
}  # fmt: skip
"""The paper's sizes, named by their parameters in millions (multi-task; single-task models are a little smaller), and
`laptop`: a small model with a small planner, which learns easy tasks in minutes on two CPU cores. No published result
was made with it."""


@dataclass(frozen=True)
class TDMPC2Config:
    """Defaults are preset 5 and the paper's single-task settings."""

    recipe: Literal["paper", "latest"] = "paper"
    """The code behind the published curves, or the reference's latest code."""

    enc_dim: int = 256
    """Width of the encoder's hidden layers."""
    mlp_dim: int = 512
    """Width of every other hidden layer."""
    latent_dim: int = 512
    """Width of the latent state."""
    num_enc_layers: int = 2
    """Layers of the encoder, the output layer included; at least one is hidden."""
    num_q: int = 5
    """Members of the Q ensemble."""
    simnorm_dim: int = 8
    """Classes per group of the latent's softmax; must divide latent_dim."""
    dropout: float = 0.01
    """In the first layer of each Q member."""
    num_bins: int = 101
    """Two-hot bins of reward and value."""
    vmin: float = -10.0
    """Lowest two-hot bin, in symlog space."""
    vmax: float = 10.0
    """Highest two-hot bin, in symlog space."""
    log_std_min: float = -10.0
    """Bound of the policy's log standard deviation."""
    log_std_max: float = 2.0
    """Bound of the policy's log standard deviation."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of the networks; losses, distributions and parameters stay float32."""

    batch_size: int = 256
    """Windows per update."""
    horizon: int = 3
    """Steps of the training rollout and of a plan."""
    rho: float = 0.5
    """Weight of step t is rho^t."""
    consistency_coef: float = 20.0
    """Weight of the latent-consistency loss."""
    reward_coef: float = 0.1
    """Weight of the reward loss."""
    value_coef: float = 0.1
    """Weight of the value loss."""
    termination_coef: float = 1.0
    """Weight of the termination loss (episodic)."""
    entropy_coef: float = 1e-4
    """Weight of the policy's entropy."""
    episodic: bool = False
    """Learn and plan with true terminations. Without it an environment that terminates is refused."""

    lr: float = 3e-4
    """Learning rate of both Adam optimisers."""
    enc_lr_scale: float = 0.3
    """The encoder's learning rate is lr * enc_lr_scale."""
    grad_clip_norm: float = 20.0
    """Global gradient norm to which each optimiser clips."""
    tau: float = 0.01
    """Rate of the target Q and of the running Q scale."""

    mpc: bool = True
    """Plan each decision; False acts from the policy prior."""
    iterations: int = 6
    """MPPI iterations per decision; 2 more from 20 action dimensions on."""
    num_samples: int = 512
    """Candidate plans, policy trajectories included."""
    num_pi_trajs: int = 24
    """Candidate plans that the policy prior proposes."""
    num_elites: int = 64
    """Best candidates, to which an iteration refits."""
    min_std: float = 0.05
    """Least standard deviation of the candidates."""
    max_std: float = 2.0
    """Their standard deviation in the first iteration, and its bound."""
    temperature: float = 0.5
    """Multiplies the elites' value differences: larger is greedier."""
    env_batching: Literal["auto", "vmap", "map"] = "auto"
    """Plan several environments as one batch or one after another. auto: in turn on CPU, where a batch leaves the
    cache."""

    episode_length: int | None = None
    """Agent steps per episode where the environment does not tell; the discount and the seed phase follow from it."""
    discount_denom: float = 5.0
    """The discount's horizon is this fraction of an episode: episode_length / discount_denom."""
    discount_min: float = 0.95
    """Least discount."""
    discount_max: float = 0.995
    """Greatest discount."""

    buffer_size: int = 1_000_000
    """Transitions kept over all environments."""
    seed_steps: int | None = None
    """Random transitions before the first update; None: max(1000, 5 episodes)."""
    last_start: bool = True
    """Train on each episode's last window; False reproduces the early code, which never did."""

    def __post_init__(self) -> None:
        choices = {"recipe": tuple(RECIPES), "dtype": ("float32", "bfloat16"), "env_batching": ("auto", "vmap", "map")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"agent.{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        positive = (
            "enc_dim mlp_dim latent_dim num_enc_layers simnorm_dim batch_size horizon rho lr enc_lr_scale "
            "grad_clip_norm iterations num_samples num_elites discount_denom buffer_size"
        ).split()
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"agent.{name}={getattr(self, name)} must be above 0")
        for holds, broken in (
            (self.num_q >= 2, f"agent.num_q={self.num_q} must be 2 or more: targets take the smaller of two members"),
            (self.num_bins >= 2, f"agent.num_bins={self.num_bins} must be 2 or more"),
            (self.vmin < self.vmax, f"agent.vmin={self.vmin} must be below agent.vmax={self.vmax}"),
            (self.latent_dim % self.simnorm_dim == 0,
             f"agent.latent_dim={self.latent_dim} must be a multiple of agent.simnorm_dim={self.simnorm_dim}, "
             "the size of its softmax groups"),
            (0 <= self.dropout < 1, f"agent.dropout={self.dropout} must lie in [0, 1)"),
            (self.log_std_min < self.log_std_max,
             f"agent.log_std_min={self.log_std_min} must be below agent.log_std_max={self.log_std_max}"),
            (0 < self.tau <= 1, f"agent.tau={self.tau} must lie in (0, 1]"),
            (0 <= self.num_pi_trajs <= self.num_samples,
             f"agent.num_pi_trajs={self.num_pi_trajs} must lie in 0..agent.num_samples={self.num_samples}"),
            (self.num_elites <= self.num_samples,
             f"agent.num_elites={self.num_elites} must not exceed agent.num_samples={self.num_samples}"),
            (0 <= self.min_std <= self.max_std,
             f"agent.min_std={self.min_std} must lie in [0, agent.max_std={self.max_std}]"),
            (self.temperature >= 0, f"agent.temperature={self.temperature} must not be negative"),
            (self.episode_length is None or self.episode_length > 0,
             f"agent.episode_length={self.episode_length} must be above 0"),
            (0 <= self.discount_min <= self.discount_max <= 1,
             f"agent.discount_min={self.discount_min}, agent.discount_max={self.discount_max} must rise within 0..1"),
            (self.seed_steps is None or self.seed_steps >= 0,
             f"agent.seed_steps={self.seed_steps} must not be negative"),
        ):  # fmt: skip
            if not holds:
                raise ValueError(broken)


def discount(episode_length: int, denom: float = 5.0, low: float = 0.95, high: float = 0.995) -> float:
    """TD-MPC2's heuristic: clip((f - 1) / f, low, high) with f = episode_length / denom (in agent steps).

    A horizon of a fifth of the episode: 50 and 100 -> 0.95, 200 -> 0.975, 500 -> 0.99, 1000 and beyond -> 0.995.
    """
    f = episode_length / denom
    return min(max((f - 1) / f, low), high)
