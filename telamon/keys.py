"""Named randomness: every random stream of a run follows from one seed and a name."""

from __future__ import annotations

from enum import IntEnum

import jax
import numpy as np


class Stream(IntEnum):
    """Values are written into checkpoints' meaning: never renumber, only add."""

    INIT = 0
    ACT = 1
    UPDATE = 2
    RANDOM_ACTION = 3
    EVAL = 4
    ENV = 5
    REPLAY = 6
    REPORT = 7


def stream(seed: int, name: Stream, *index: int) -> jax.Array:
    """The key of a stream, folded with any further indices (actor, tick, update, ...)."""
    key = jax.random.fold_in(jax.random.key(seed), int(name))
    for i in index:
        key = jax.random.fold_in(key, i)
    return key


def generator(seed: int, name: Stream, *index: int) -> np.random.Generator:
    """The same naming for numpy code on the host."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, int(name), *index])))
