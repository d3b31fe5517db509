"""Which device holds what: a mesh of all devices, the batch split over all of it, parameters over a part.

An update is one program over global arrays. Devices do not know of one another there: a mean, a percentile or a norm is
one of the whole batch and the whole gradient, and the compiler inserts what must be exchanged.

*Data parallel* (`fsdp=1`): every device holds all parameters. *Fully sharded* (`fsdp=N`): N devices share each large
array of the train state, optimiser included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from telamon.agents.base import PyTree
from telamon.data import Window

AXES = ("data", "fsdp")
SHARDED_BYTES = 2**16
"""Smaller arrays are not worth an exchange of their own: every device holds them. Of the published sizes, TD-MPC2 5 and
317 and DreamerV3 12m and 200m, they are less than 1 %."""


Held = Literal["live", "in_use", "limit"]
"""Bytes of a device: of this process's arrays, of all that it holds, the most that it may hold."""

TOLD: Mapping[Held, str] = {"in_use": "bytes_in_use", "limit": "bytes_limit"}
"""Where `Device.memory_stats` has it."""


def make_mesh(devices: Sequence[jax.Device], fsdp: int = 1) -> Mesh:
    """All devices as [data, fsdp], neighbours on the wires beside each other where the platform tells.

    Raises ValueError where `fsdp` does not divide them.
    """
    if fsdp < 1 or len(devices) % fsdp:
        valid = ", ".join(str(n) for n in range(1, len(devices) + 1) if len(devices) % n == 0)
        raise ValueError(f"mesh.fsdp={fsdp} does not divide {len(devices)} devices; it may be {valid}")
    return jax.make_mesh((len(devices) // fsdp, fsdp), AXES, (AxisType.Auto, AxisType.Auto), devices=devices)


def check_batch(batch_size: int, mesh: Mesh) -> None:
    """Raises ValueError where a batch cannot be split evenly over the mesh, with the nearest sizes that can."""
    below = batch_size // mesh.size * mesh.size
    if below != batch_size:
        nearest = " or ".join(str(size) for size in (below, below + mesh.size) if size > 0)
        raise ValueError(
            f"agent.batch_size={batch_size} cannot be split evenly over {mesh.size} devices; "
            f"the nearest sizes that can are {nearest}"
        )


def device_bytes() -> dict[str, dict[Held, int]]:
    """What each of this process's devices holds, by its name; what a device does not tell is left out.

    Waits for no device. Its cost grows with the count of arrays: about a millisecond for a thousand of them.
    """
    live: Counter[Any] = Counter()
    for array in jax.live_arrays():
        size = array.dtype.itemsize * math.prod(array.sharding.shard_shape(array.shape))
        for device in array.sharding.addressable_devices:
            live[device] += size
    found: dict[str, dict[Held, int]] = {}
    for device in jax.local_devices():
        told: Mapping[str, int] = device.memory_stats() or {}  # None on CPU
        held = found[str(device)] = {"live": live[device]}
        held.update({kind: told[key] for kind, key in TOLD.items() if key in told})
    return found


# shardings


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split(mesh: Mesh) -> NamedSharding:
    """The leading axis (windows) over all devices."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def partition(shape: Sequence[int], itemsize: int, fsdp: int) -> PartitionSpec:
    """Where an array of the train state is cut: the largest axis that `fsdp` divides (the last of equals), or nowhere.

    itemsize: bytes per element.
    """
    if fsdp == 1 or math.prod(shape) * itemsize < SHARDED_BYTES:
        return PartitionSpec()
    axes = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
    if not axes:
        return PartitionSpec()
    cut = max(axes, key=lambda axis: (shape[axis], axis))
    return PartitionSpec(*(AXES[1] if axis == cut else None for axis in range(cut + 1)))


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """A NamedSharding for every array of a train state. tree: arrays or their shapes and dtypes."""
    fsdp = mesh.shape[AXES[1]]
    return jax.tree.map(lambda x: NamedSharding(mesh, partition(x.shape, x.dtype.itemsize, fsdp)), tree)


# between the host and the devices


def place(window: Window, mesh: Mesh) -> Window:
    """Global arrays from this process's windows: B / processes of them, in the order of its devices on the mesh.

    On CPU they may share the memory of the host's arrays, which must not be written to afterwards.
    """
    put = lambda x: jax.make_array_from_process_local_data(split(mesh), x)
    return replace(jax.tree.map(put, window), incarnation=window.incarnation)


def local(tree: PyTree) -> PyTree:
    """This process's part of arrays that are split over windows, in the order in which `place` took them; numpy."""

    def rows(x: jax.Array) -> np.ndarray[Any, Any]:
        if x.is_fully_addressable:
            return np.asarray(x)
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    return jax.tree.map(rows, tree)
