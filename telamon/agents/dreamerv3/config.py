"""DreamerV3's hyperparameters, sizes and recipes (arXiv:2301.04104, table 4; spelt as the code behind it has them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """Where the code behind the published scores and the reference's latest code differ (docs/numerics.md)."""

    policy_unimix: float
    """Share of uniform probability in the policy of discrete actions."""
    replayed_start: bool
    """Imagination takes reward and continuation of its first state from replay, not from the model."""
    decoder_scale: float
    """Scale of the initial output weights of vector observations."""
    squared_error_floor: float
    """Squared errors of symlog predictions below this count as 0."""
    hard_first_slow: bool
    """The first update copies the critic into the slow critic."""
    start_in_rows: bool
    """Training starts once as many windows can be sampled as a batch has rows, not as it has windows."""
    mults: tuple[int, ...]
    """Channels of the image stages, in units of `depth`."""
    strided: bool
    """Image stages halve by strides after one at full resolution, instead of by pooling."""


RECIPES = {
    "paper": Recipe(
        policy_unimix=0.01, replayed_start=True, decoder_scale=0.1, squared_error_floor=1e-8,
        hard_first_slow=True, start_in_rows=False, mults=(1, 2, 3, 4, 4), strided=True,
    ),
    "latest": Recipe(
        policy_unimix=0.0, replayed_start=False, decoder_scale=1.0, squared_error_floor=0.0,
        hard_first_slow=False, start_in_rows=True, mults=(2, 3, 4, 4), strided=False,
    ),
}  # fmt: skip

WIDTHS = {
    "size1m": 64, "size12m": 256, "size25m": 384, "size50m": 512, "size100m": 768, "size200m": 1024, "size400m": 1536
}  # fmt: skip
"""The reference's sizes, named by the parameters of an image model, and the width d from which all else follows."""


def size(name: str) -> dict[str, int]:
    """The fields of DreamerV3Config that a size sets. Raises ValueError for an unknown one."""
    if name not in WIDTHS:
        raise ValueError(f"size {name!r} is none of {', '.join(WIDTHS)}")
    d = WIDTHS[name]
    return dict(units=d, hidden=d, deter=8 * d, classes=d // 16, depth=d // 16)


@dataclass(frozen=True)
class LossScales:
    """Weights of the terms of the loss."""

    rec: float = 1.0
    """Reconstruction of each observation."""
    rew: float = 1.0
    """Reward."""
    con: float = 1.0
    """Continuation."""
    dyn: float = 1.0
    """The prior towards the posterior."""
    rep: float = 0.1
    """The posterior towards the prior."""
    policy: float = 1.0
    """The actor, in imagination."""
    value: float = 1.0
    """The critic, in imagination."""
    repval: float = 0.3
    """The critic, on replayed rows."""


@dataclass(frozen=True)
class DreamerV3Config:
    """Defaults are size12m and the settings that all published results share."""

    recipe: Literal["paper", "latest"] = "paper"
    """The code behind the published scores, or the reference's latest code."""

    units: int = 256
    """Width of every hidden layer outside of the RSSM."""
    hidden: int = 256
    """Width of the RSSM's hidden layers."""
    deter: int = 2048
    """Width of the deterministic state."""
    stoch: int = 32
    """Categorical latents of the stochastic state."""
    classes: int = 16
    """Classes of each latent."""
    blocks: int = 8
    """Blocks of the recurrent weights; must divide deter."""
    layers: int = 3
    """Hidden layers of encoder, decoder, policy and critic."""
    head_layers: int = 1
    """Hidden layers of the reward and continuation heads."""
    num_bins: int = 255
    """Two-hot bins of reward and value, an odd number."""
    unimix: float = 0.01
    """Share of uniform probability in the latents."""
    min_std: float = 0.1
    """Least standard deviation of a continuous policy."""
    max_std: float = 1.0
    """Greatest standard deviation of a continuous policy."""

    depth: int = 16
    """Channels of an image stage are depth * mults."""
    kernel: int = 5
    """Side of the convolution kernels."""
    mults: tuple[int, ...] | None = None
    """Image stages; None: the recipe's."""
    strided: bool | None = None
    """Stages halve by strides after one at full resolution, instead of by pooling; None: as the recipe."""
    bspace: int = 8
    """Blocks of the layer from deter to the smallest image."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of the networks and of the stored deter; parameters, norms, losses, returns stay float32."""

    batch_size: int = 16
    """Windows per update."""
    batch_length: int = 64
    """Trained rows per window."""
    context: int = 1
    """Leading rows of a window that only set the state, from latents stored with them; 0 starts from zeros."""
    train_ratio: float = 32.0
    """Trained rows per row collected: train_ratio / (batch_size * batch_length) updates per row; negative: one
    update per row; 0: none."""
    buffer_size: int = 5_000_000
    """Rows kept over all environments."""

    loss_scales: LossScales = LossScales()
    free_nats: float = 1.0
    """Divergence per row below which dyn and rep are not pressed further."""
    horizon: int = 333
    """The discount is 1 - 1 / horizon, per agent step."""
    imag_length: int = 15
    """Imagined steps per trained row."""
    imag_last: int = 0
    """Imagine from the last so many rows of each window; 0: from all."""
    lam: float = 0.95
    """Trace of the lambda return."""
    actent: float = 3e-4
    """Weight of the policy's entropy."""
    slowreg: float = 1.0
    """Weight of the critic's loss towards the slow critic."""

    lr: float = 4e-5
    """Learning rate after the warm-up."""
    warmup: int = 1000
    """Updates over which the rate rises from 0; the first changes no parameter. 0: a constant rate."""
    agc: float = 0.3
    """Bound of each tensor's gradient norm, relative to the tensor's norm."""
    beta1: float = 0.9
    """Decay of the momentum."""
    beta2: float = 0.999
    """Decay of the squared gradients."""
    eps: float = 1e-20
    """Added to the root of the squared gradients."""
    weight_decay: float = 0.0
    """On kernels alone."""
    slow_rate: float = 0.02
    """Rate at which the slow critic follows."""
    slow_every: int = 1
    """Updates between its steps."""
    return_rate: float = 0.01
    """Rate of the averaged percentiles of returns."""
    return_floor: float = 1.0
    """Least scale by which advantages are divided."""

    report_length: int = 32
    """Rows of the open-loop predictions; the second half is foreseen."""

    def __post_init__(self) -> None:
        choices = {"recipe": tuple(RECIPES), "dtype": ("float32", "bfloat16")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"agent.{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        positive = (
            "units hidden deter stoch classes blocks layers head_layers depth kernel bspace batch_size batch_length "
            "buffer_size horizon imag_length lr agc eps slow_every return_floor"
        ).split()
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"agent.{name}={getattr(self, name)} must be above 0")
        for name in "context imag_last warmup weight_decay free_nats actent slowreg".split():
            if not getattr(self, name) >= 0:
                raise ValueError(f"agent.{name}={getattr(self, name)} must not be negative")
        for name in "unimix lam beta1 beta2 slow_rate return_rate".split():
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"agent.{name}={getattr(self, name)} must lie in 0..1")
        for holds, broken in (
            (self.deter % self.blocks == 0,
             f"agent.deter={self.deter} must be a multiple of agent.blocks={self.blocks}"),
            (self.num_bins >= 3 and self.num_bins % 2 == 1,
             f"agent.num_bins={self.num_bins} must be odd and 3 or more, so that one bin is 0"),
            (self.classes <= 256, f"agent.classes={self.classes} must be at most 256: indices are stored as bytes"),
            (0 < self.min_std <= self.max_std,
             f"agent.min_std={self.min_std} must lie in (0, agent.max_std={self.max_std}]"),
            (self.batch_length >= 2, f"agent.batch_length={self.batch_length} must be 2 or more: returns look ahead"),
            (self.imag_last <= self.batch_length,
             f"agent.imag_last={self.imag_last} must not exceed agent.batch_length={self.batch_length}"),
            (2 <= self.report_length, f"agent.report_length={self.report_length} must be 2 or more"),
            (self.mults is None or (self.mults and min(self.mults) > 0),
             f"agent.mults={self.mults} must be one or more positive numbers"),
        ):  # fmt: skip
            if not holds:
                raise ValueError(broken)

    @property
    def image_mults(self) -> tuple[int, ...]:
        return RECIPES[self.recipe].mults if self.mults is None else self.mults

    @property
    def image_strided(self) -> bool:
        return RECIPES[self.recipe].strided if self.strided is None else self.strided

    @property
    def discount(self) -> float:
        return 1 - 1 / self.horizon

    @property
    def updates_per_row(self) -> float:
        return self.train_ratio / (self.batch_size * self.batch_length)

    @property
    def start_windows(self) -> int:
        """Windows that must be sampleable before the first update."""
        rows = self.batch_length if RECIPES[self.recipe].start_in_rows else 1
        return self.batch_size * rows
