"""Updates over several devices, in a process of its own: how many there are is settled before JAX starts.

    python tests/learner/devices.py OUT AGENT PLAN [PLAN ...] [--group COORDINATOR RANK SIZE]

A PLAN is DEVICES:FSDP, or 0 for the program of local mode. All plans start from one state and get the same windows. For
each, OUT/AGENT-PLAN-RANK.npz holds all numbers and the .json beside it the rest. Each writes a checkpoint that all
read; the last one goes on to a bad window. With --group the processes share a plan, each with its own windows.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the key-value store has no public name

from learner import checkpoint, update
from learner import mesh as meshes
from learner.group import SOLO, DistributedGroup
from telamon.agents.dreamerv3.agent import DreamerV3
from telamon.agents.dreamerv3.config import DreamerV3Config
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.agents.tdmpc2.config import TDMPC2Config
from telamon.data import ActionSpec, ArraySpec, EnvSpec, Window, as_dtype

ENV = EnvSpec("x:y", (("a", ArraySpec((5,))), ("b", ArraySpec(()))), ActionSpec((3,)), 50)
AGENTS = {
    "tdmpc2": TDMPC2(
        TDMPC2Config(
            enc_dim=128, mlp_dim=128, latent_dim=128, num_enc_layers=1, num_q=2, num_bins=21, horizon=2, batch_size=32
        ),
        ENV,
    ),
    "dreamerv3": DreamerV3(
        DreamerV3Config(
            units=64, hidden=64, deter=512, classes=4, stoch=8, blocks=2, layers=1, head_layers=1, num_bins=21,
            batch_size=16, batch_length=8, imag_length=4, warmup=0,
        ),
        ENV,
    ),
}  # fmt: skip
"""Small, but with arrays that are large enough to be cut."""
NORMALISERS = {TDMPC2: "scale", DreamerV3: "norm"}
"""Field of the train state."""
UPDATES = 3
PARTS = 8
WARM = 2
"""Updates before the common start: moments that are 0 would make a step of every rounding error's sign."""
KEY = 1
"""Seed of the updates' key. An array would start JAX before `jax.distributed` is."""
TIMEOUT = 120.0


def window(agent: Any, seed: int) -> Window:
    """Random rows, every window on a scale of its own: a statistic of a part of them is another one."""
    rng = np.random.default_rng(seed)
    spec, b, t = agent.window_spec, agent.batch_size, agent.window_spec.length
    normal = lambda *shape: rng.standard_normal((b, t, *shape)).astype(np.float32)
    scale = np.arange(1, b + 1, dtype=np.float32).reshape(-1, 1)
    latents = {}
    for name, array in agent.row_spec.latents if spec.latents == "context" else ():
        shape = (b, spec.context, *array.shape)
        drawn = rng.integers(0, 4, shape) if array.dtype == "uint8" else rng.standard_normal(shape)
        latents[name] = drawn.astype(as_dtype(array.dtype))
    flags = (rng.random((b, t)) < 0.1) & spec.cross_episodes
    return Window(
        env_id=np.zeros(b, np.int32), first_row=np.arange(b), obs={"a": normal(5) * scale[..., None], "b": normal()},
        reward=normal() * scale, is_first=flags, is_last=flags, is_terminal=flags & False,
        action=np.clip(normal(3), -1, 1), latents=latents, incarnation=seed,
    )  # fmt: skip


def part(window: Window, rank: int, size: int) -> Window:
    """The windows of one process."""
    per = len(window.env_id) // size
    rows = slice(rank * per, (rank + 1) * per)
    return replace(jax.tree.map(lambda x: x[rows], window), incarnation=window.incarnation)


def spoilt(window: Window) -> Window:
    """With one reward of the last window, which is one device's, that is no number."""
    reward = window.reward.copy()
    reward[-1, 1] = np.nan
    return replace(window, reward=reward)


def start(agent: Any) -> Any:
    """A state on the host: no kernel is 0, and the optimiser has seen some gradients.

    Q is stirred more: TD-MPC2's scale counts a range beyond 1 alone.
    """
    state = update.init(agent, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(7), 200))
    stirred = {
        name: jax.tree.map(
            lambda x, std=0.1 if name == "q" else 0.02: x + std * jax.random.normal(next(keys), x.shape), tree
        )
        for name, tree in state.train.params.items()
    }
    state = state._replace(train=state.train._replace(params=stirred))
    step = update.make_update(agent)
    for index in range(WARM):
        state, _ = step(state, window(agent, 100 + index), jax.random.key(KEY), np.uint32(100 + index))
    return jax.tree.map(np.asarray, state)


def numbers(tree: Any) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x, np.float64) for path, x in found}


def told(agent: Any, state: Any, outcome: Any) -> dict[str, np.ndarray]:
    """What an update says of the whole batch."""
    normaliser = getattr(state.train, NORMALISERS[type(agent)])
    return numbers(outcome._replace(write_back=None)) | {f"normaliser/{k}": v for k, v in numbers(normaliser).items()}


def apart(agent: Any, state: Any) -> dict[str, float]:
    """What the first update would say if each of PARTS devices took its percentiles and norms by itself."""
    smaller = replace(agent, config=replace(agent.config, batch_size=agent.batch_size // PARTS))
    step, parts = update.make_update(smaller), []
    for rank in range(PARTS):
        new, outcome = step(
            jax.device_put(state), part(window(agent, 0), rank, PARTS), jax.random.key(KEY), np.uint32(0)
        )
        parts.append(told(agent, new, outcome))
    return {name: float(np.mean([p[name] for p in parts])) for name in parts[0]}


def collectives(program: str) -> list[dict[str, Any]]:
    """What devices exchange in a compiled program: kind, bytes of the result, whether it is in a loop."""
    size = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1, "u8": 1}
    lines: dict[str, list[str]] = {}
    for line in program.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            body = lines.setdefault(head[1], [])
        elif lines:
            body.append(line)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", program, re.MULTILINE)
    assert entry is not None

    def walk(name: str, loop: bool) -> Iterator[dict[str, Any]]:
        for line in lines[name]:
            kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
            if found := re.match(rf"\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({kinds})(?:-start)?\(", line):
                arrays = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
                count = sum(size[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in arrays)
                yield {"kind": found[2], "bytes": count, "loop": loop}
            for called in re.findall(r"(?:to_apply|calls|body|true_computation|false_computation)=%?([\w.\-]+)", line):
                yield from walk(called, loop or " while(" in line)

    return list(walk(entry[1], False))


class Plan:
    """One way of splitting an agent's updates over devices."""

    def __init__(self, name: str, agent: Any) -> None:
        devices, _, fsdp = name.partition(":")
        self.name, self.agent = name, agent
        self.mesh = meshes.make_mesh(jax.devices()[: int(devices)], int(fsdp)) if fsdp else None
        self.step = update.make_update(agent, self.mesh)
        self.facts: dict[str, Any] = {}

    def placed(self, state: Any) -> Any:
        """A host's state where this plan has it."""
        if self.mesh is None:
            return jax.device_put(state)
        put = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        return jax.tree.map(put, state, update.shardings(self.agent, self.mesh))

    def window(self, window: Window, group: Any = SOLO) -> Window:
        return window if self.mesh is None else meshes.place(part(window, group.rank, group.size), self.mesh)

    def whole(self, state: Any) -> Any:
        """On the host, of all processes."""
        if self.mesh is not None:
            state = jax.jit(lambda x: x, out_shardings=meshes.replicated(self.mesh))(state)
        return jax.tree.map(np.asarray, state)

    def run(self, state: Any, group: Any = SOLO) -> tuple[Any, dict[str, np.ndarray]]:
        """UPDATES updates, each when every process has its windows: (state, numbers)."""
        made: dict[str, np.ndarray] = {}
        state = self.placed(state)
        turn = index = waits = 0
        while index < UPDATES:
            turn += 1
            late = group.rank > 0 and turn % 3 != 0  # the other process comes twice without a batch
            order = group.order(turn, not late, lambda able: "update" if able else "wait", TIMEOUT)
            if order == "wait":
                waits += 1
                continue
            batch = self.window(window(self.agent, index), group)
            assert self.mesh is None or batch.incarnation == index
            old = state
            if self.mesh is not None and index == 0:
                self.facts["exchanged"] = collectives(
                    self.step.lower(state, batch, jax.random.key(KEY), np.uint32(index)).compile().as_text()
                )
            state, outcome = self.step(state, batch, jax.random.key(KEY), np.uint32(index))
            made |= {f"{index}/{k}": v for k, v in told(self.agent, state, outcome).items()}
            made |= {f"{index}/write_back/{k}": v for k, v in numbers(meshes.local(outcome.write_back)).items()}
            index += 1
        train = self.whole(state)
        made |= {f"state/{k}": v for k, v in numbers(train).items()}
        cut = Counter(x.size // x.addressable_shards[0].data.size for x in jax.tree.leaves(state))
        cut_bytes = [x.nbytes for x in jax.tree.leaves(state) if x.addressable_shards[0].data.size < x.size]
        self.facts |= {
            "waits": waits,
            "given_away": all(x.is_deleted() for x in jax.tree.leaves(old)),
            "compiled": self.step._cache_size(),
            "cut": {str(k): v for k, v in cut.items()},
            "cut_share": sum(cut_bytes) / sum(x.nbytes for x in jax.tree.leaves(state)),
            "parameters": sum(x.nbytes for x in jax.tree.leaves(state.train.params)),
            "read": sum(
                x.nbytes for name in state.train._fields if name != "optim"
                for x in jax.tree.leaves(getattr(state.train, name))
            ),
        }  # fmt: skip
        return state, made

    def defend(self, state: Any) -> Any:
        """A bad window, then a good one: what the state and the outcomes say of it."""
        before = self.whole(state)
        state, outcome = self.step(
            state, self.window(spoilt(window(self.agent, 50))), jax.random.key(KEY), np.uint32(50)
        )
        after = self.whole(state)
        same = [a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, (before.train, after.train)))]  # noqa: B905  # one structure
        self.facts["bad"] = {
            "unchanged": all(same),
            "skipped": int(outcome.skipped),
            "streak": int(outcome.streak),
            "first": update.first_non_finite(outcome.metrics),
        }
        state, outcome = self.step(state, self.window(window(self.agent, 51)), jax.random.key(KEY), np.uint32(51))
        self.facts["good"] = {"skipped": int(outcome.skipped), "streak": int(outcome.streak)}
        return state

    def snapshot(self, state: Any) -> None:
        """Whether acting parameters outlive the state that they are of."""
        expected = self.agent.acting_params(self.whole(state).train)
        taken = update.make_snapshot(self.agent, self.mesh)(state)
        self.step(state, self.window(window(self.agent, 52)), jax.random.key(KEY), np.uint32(52))
        pairs = zip(jax.tree.leaves(taken), jax.tree.leaves(expected), strict=True)
        self.facts["snapshot"] = all(
            np.asarray(a).tobytes() == b.tobytes() and a.sharding.is_fully_replicated for a, b in pairs
        )

    def like(self) -> Any:
        """What `checkpoint.load` needs to know."""
        shapes = jax.eval_shape(partial(update.fresh, self.agent), jax.random.key(0))
        if self.mesh is None:
            return shapes
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            update.shardings(self.agent, self.mesh),
        )

    def reads(self, directory: Path, name: str, expected: Any) -> bool:
        """Whether a checkpoint of other devices comes back bit for bit, and where this plan has it."""
        found = checkpoint.load(directory, name, self.like()).state
        pairs = zip(jax.tree.leaves(self.whole(found)), jax.tree.leaves(expected), strict=True)
        equal = all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for a, b in pairs)
        if self.mesh is None:
            return equal
        wanted = jax.tree.leaves(update.shardings(self.agent, self.mesh))
        return equal and all(x.sharding == w for x, w in zip(jax.tree.leaves(found), wanted, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--group", nargs=3)
    options = parser.parse_args()
    group: Any = SOLO
    if options.group is not None:
        coordinator, rank, size = options.group[0], int(options.group[1]), int(options.group[2])
        jax.distributed.initialize(coordinator, size, rank, initialization_timeout=120, heartbeat_timeout_seconds=100)
        group = DistributedGroup(distributed.global_state.client, rank, size)
    agent = AGENTS[options.agent]
    plans = [Plan(name, agent) for name in options.plans]
    begin = start(agent)
    saver, directory = checkpoint.Saver(), options.out / f"checkpoints-{options.agent}"
    for plan in plans:
        state, made = plan.run(begin, group)
        expected = plan.whole(state)
        saver.save(directory, "0001", state, {}, {"counters": {}})
        if plan.mesh is None:
            plan.facts["apart"] = apart(agent, begin)
        elif group is SOLO and plan is plans[-1]:
            plan.snapshot(plan.defend(state))
        saver.wait()
        group.order(sys.maxsize, True, lambda able: "read", TIMEOUT)  # the first process gives a checkpoint its name
        for other in plans:
            plan.facts[f"read by {other.name}"] = other.reads(directory, "0001", expected)
        file = options.out / f"{options.agent}-{plan.name.replace(':', '-')}-{group.rank}"
        np.savez(f"{file}.npz", **made)
        Path(f"{file}.json").write_text(json.dumps(plan.facts))
    saver.close()
    if group is not SOLO:
        jax.distributed.shutdown()


if __name__ == "__main__":
    sys.exit(main())
