"""Named settings, `--preset NAME...`: what the official code sets for a size of agent or a family of tasks.

They apply in the order given: later ones win, and flags of the command line win over all. Keys are those of the command
line. Steps are environment steps, as everywhere here: where the official code counts rows, its number times the action
repeat. The recipe decides the column: `paper` the code behind the published scores, `latest` its newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deploy.config import RunConfig
from telamon.agents.dreamerv3.config import WIDTHS, size
from telamon.agents.tdmpc2.config import PRESETS as TDMPC2_SIZES


@dataclass(frozen=True)
class Preset:
    """What a name sets."""

    text: str
    """The first line says what it is; then command, expected score, cost."""
    values: Mapping[str, Any]
    """By key of the command line, GROUP.NAME."""
    latest: Mapping[str, Any] = field(default_factory=dict)
    """What recipe `latest` has in place of them, or besides."""


def apply(config: RunConfig, names: Iterable[str]) -> RunConfig:
    """`config` after each preset in turn. Raises ValueError for an unknown one."""
    presets = PRESETS[config.algorithm]
    for name in names:
        if name not in presets:
            raise ValueError(f"preset {name!r} is none of {', '.join(presets)}")
        preset = presets[name]
        values = {**preset.values, **(preset.latest if config.agent.recipe == "latest" else {})}
        config = _set(config, values)
    return config


def _set(config: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass or mapping with the values at keys of the form GROUP.NAME changed."""
    changed: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        group, dot, rest = key.partition(".")
        if dot:
            groups.setdefault(group, {})[rest] = value
    if isinstance(config, Mapping):
        return {**config, **changed}
    return replace(config, **changed, **{group: _set(getattr(config, group), v) for group, v in groups.items()})


def listing(algorithm: str) -> str:
    """The presets of an algorithm, a line each."""
    return "\n".join(f"  {name:<12} {preset.text.splitlines()[0]}" for name, preset in PRESETS[algorithm].items())


def _agent(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"agent.{key}": value for key, value in values.items()}


def _size(name: str) -> dict[str, Any]:
    return _agent(size(name))


BFLOAT16 = {"agent.dtype": "bfloat16"}
"""What the official task presets compute in. Accelerators like it; on a CPU add --agent.dtype float32."""
SIXTEEN = {"env.num": 16}
"""Environments of the official code, where a task does not say otherwise."""

TDMPC2 = {
    str(name): Preset(
        f"{name} million parameters"
        if isinstance(name, int)
        else "a small model with a small planner: easy tasks in minutes on two CPU cores",
        _agent(values),
    )
    for name, values in TDMPC2_SIZES.items()
}

DREAMERV3_SIZES = {
    name: Preset(f"a size of the agent alone, width {width}", _size(name)) for name, width in WIDTHS.items()
}
"""Named by the parameters of an image model. Cost of an update on two CPU cores, on vectors: 0.25 to 0.4 s at size1m,
1.85 s at size12m (bench/results.md)."""

DREAMERV3_TASKS = {
    "dmc_proprio": Preset(
        """DeepMind Control from vectors

        telamon train dreamerv3 dmc:walker-walk --preset dmc_proprio
        Score (recipe paper; published training returns, mean over 18 tasks of 5 seeds): 675 at 250,000 environment
        steps, 758 at 490,000; walker-walk 890 and 881, cartpole-swingup 840 and 856 (`telamon plot --reference
        dreamerv3`).
        Cost: an update every 2 rows, 125,000 for 500,000 environment steps: 64 hours on two CPU cores at 1.85 s each
        (float32; extrapolated).
        """,
        {"steps": 600_000, **SIXTEEN, "env.action_repeat": 2, **_size("size12m"), "agent.train_ratio": 512.0,
         **BFLOAT16},
        latest={"steps": 1_100_000, "env.action_repeat": 1, **_size("size1m"), "agent.train_ratio": 1024.0},
    ),
    "dmc_vision": Preset(
        """DeepMind Control from 64 x 64 pixels

        telamon train dreamerv3 dmcpixels:walker-walk --preset dmc_vision
        Score (published training returns, mean over 20 tasks of 8 to 10 seeds): 659 at 475,000 environment steps, 785
        at 1,000,000; walker-walk 940 and 960 (`telamon plot --reference dreamerv3-vision`).
        Cost: an update every 2 rows (recipe latest: every 4, at size200m), 250,000 for 1,000,000 environment steps.
        """,
        {"steps": 1_200_000, **SIXTEEN, "env.action_repeat": 2, "env.options.size": 64, **_size("size12m"),
         "agent.train_ratio": 512.0, **BFLOAT16},
        latest={"steps": 1_100_000, "env.action_repeat": 1, **_size("size200m"), "agent.train_ratio": 256.0},
    ),
    "atari": Preset(
        """Atari, 200 million frames

        telamon train dreamerv3 atari:pong --preset atari
        Score: the published ones are of 200 million frames; no curve is shipped.
        Cost: an update every 32 rows, 1.6 million in all, at size200m: accelerators only. Lower agent.buffer_size for
        the memory of your machine.
        """,
        {"steps": 204_000_000, **SIXTEEN, "env.action_repeat": 4, "env.options.size": 96, "env.options.gray": True,
         "env.options.sticky": True, "env.options.actions": "all", "env.options.noops": 0, "env.options.limit": 108_000,
         **_size("size200m"), "agent.train_ratio": 32.0, **BFLOAT16},
        latest={"env.options.noops": 30},
    ),
    "atari100k": Preset(
        """Atari, 400,000 frames

        telamon train dreamerv3 atari:pong --preset atari100k
        Score (published training scores at 400,000 frames, mean of 5 seeds): pong -4, boxing 80, breakout 9, krull
        7968, freeway 0 (`telamon plot --reference dreamerv3-atari100k`).
        Cost: an update every 4 rows, 25,000 for 400,000 frames, at size200m: accelerators; size12m on two CPU cores
        takes days.
        """,
        {"steps": 440_000, "env.num": 1, "env.action_repeat": 4, "env.options.size": 64, "env.options.gray": False,
         "env.options.sticky": False, "env.options.actions": "all", "env.options.noops": 0,
         "env.options.limit": 100_000, **_size("size200m"), "agent.train_ratio": 256.0, **BFLOAT16},
        latest={"env.options.actions": "needed", "env.options.noops": 30, "env.options.limit": 108_000},
    ),
    "crafter": Preset(
        """Crafter, one environment, 1 million steps

        telamon train dreamerv3 crafter:reward --preset crafter
        Score: no curve is shipped. Cost: an update every 2 rows, 500,000 for 1,000,000 steps, at size200m.
        """,
        {"steps": 1_100_000, "env.num": 1, "env.action_repeat": 1, "env.options.size": 64, **_size("size200m"),
         "agent.train_ratio": 512.0, **BFLOAT16},
    ),
    "bsuite": Preset(
        """bsuite: one environment, an update per row; steps stay yours

        telamon train dreamerv3 ENV --preset bsuite
        Score: no curve is shipped. Cost: an update per row, at size200m.
        """,
        {"env.num": 1, "env.action_repeat": 1, **_size("size200m"), "agent.train_ratio": 1024.0, **BFLOAT16},
    ),
    "procgen": Preset(
        """Procgen (no adapter of ours: bring your ENV, 96 x 96 pixels), 110 million steps

        telamon train dreamerv3 ENV --preset procgen
        Score: no curve is shipped. Cost: an update every 16 rows, 6.9 million in all, at size200m.
        """,
        {"steps": 110_000_000, **SIXTEEN, "env.action_repeat": 1, **_size("size200m"), "agent.train_ratio": 64.0,
         **BFLOAT16},
    ),
    "dmlab": Preset(
        """DMLab (no adapter of ours: bring your ENV, 64 x 64 pixels), 104 million frames

        telamon train dreamerv3 ENV --preset dmlab
        Score: no curve is shipped. Cost: an update every 32 rows, 810,000 in all, at size200m.
        """,
        {"steps": 104_000_000, **SIXTEEN, "env.action_repeat": 4, **_size("size200m"), "agent.train_ratio": 32.0,
         **BFLOAT16},
    ),
    "minecraft": Preset(
        """Minecraft (no adapter of ours: bring your ENV); steps stay yours

        telamon train dreamerv3 ENV --preset minecraft; the paper's own runs had 64 environments (--env.num 64).
        Score: no curve is shipped. Cost: an update every 32 rows, at size200m.
        """,
        {**SIXTEEN, "env.action_repeat": 1, **_size("size200m"), "agent.train_ratio": 32.0, **BFLOAT16},
    ),
    "loconav": Preset(
        """Locomotion and navigation (no adapter of ours: bring your ENV); steps stay yours

        telamon train dreamerv3 ENV --preset loconav
        Score: no curve is shipped. Cost: an update every 4 rows, at size200m.
        """,
        {**SIXTEEN, "env.action_repeat": 1, **_size("size200m"), "agent.train_ratio": 256.0, **BFLOAT16},
    ),
    "debug": Preset(
        """the smallest agent, to see a run work: it learns nothing

        telamon train dreamerv3 gym:CartPole-v1 --preset debug --steps 1000
        Score: none. Cost: some seconds, most of them compiling.
        """,
        {"env.num": 4, "agent.batch_size": 4, "agent.batch_length": 12, "agent.report_length": 8,
         "agent.train_ratio": 8.0, "agent.units": 8, "agent.deter": 12, "agent.hidden": 3, "agent.stoch": 2,
         "agent.classes": 4, "agent.blocks": 4, "agent.bspace": 4, "agent.num_bins": 9, "agent.layers": 2,
         "agent.depth": 2},
        latest={"agent.batch_size": 8, "agent.batch_length": 10, "agent.deter": 8, "agent.num_bins": 5,
                "agent.layers": 1},
    ),
    "laptop": Preset(
        """small tasks in minutes to hours on two CPU cores: size1m, 16 environments, float32

        telamon train dreamerv3 gymnax:CartPole-v1 --preset laptop --steps 24000
        Score and cost: bench/results.md. No published result was made with it.
        """,
        {**SIXTEEN, **_size("size1m"), "agent.batch_size": 16, "agent.batch_length": 64, "agent.train_ratio": 512.0,
         "agent.dtype": "float32"},
    ),
}  # fmt: skip

PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "tdmpc2": TDMPC2,
    "dreamerv3": {**DREAMERV3_SIZES, **DREAMERV3_TASKS},
}
"""By algorithm and by the name that `--preset` takes."""
