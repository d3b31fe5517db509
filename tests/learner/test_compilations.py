"""Compilations are counted, by all threads, while somebody counts."""

from __future__ import annotations

import threading

import jax
import numpy as np

from actors.collector import jit_act
from learner.compilations import Compilations, Compiled
from telamon.data import Schedule
from telamon.envs import counting
from tests.probe import ACTION_SIZE, Probe


def jitted():
    """A function of its own name, which nobody has compiled."""

    def doubled_for_this_test(x):
        return x + x

    return jax.jit(doubled_for_this_test)


def test_each_program_counts_once():
    found, double = Compilations(), jitted()
    assert found.figures == Compiled(0, 0.0, 0)
    with found.counted(warm=lambda: False):
        for size in (2, 3, 2, 3):
            double(np.zeros(size, np.float32))
    assert (found.figures.programs, found.figures.again) == (2, 0)
    assert found.figures.seconds > 0
    before = found.figures
    double(np.zeros(4, np.float32))
    assert found.figures == before  # nobody counts any more


def test_what_is_compiled_again_once_nothing_should_be_is_counted_apart():
    found, warm = Compilations(), []
    one, other = jitted(), jax.jit(lambda x: x * 3)
    with found.counted(warm=lambda: bool(warm)):
        one(np.zeros(2, np.float32))
        one(np.zeros(3, np.float32))
        assert found.figures.again == 0
        warm.append(True)
        other(np.zeros(2, np.float32))  # the first of its name: a report, say
        assert found.figures.again == 0
        one(np.zeros(4, np.float32))
        assert (found.figures.programs, found.figures.again) == (4, 1)


def test_an_evaluation_is_no_recompilation_of_the_policy():
    """They come in either order: the first evaluation before all training, the policy when it is first asked."""
    env = counting.make("continuous", 1, 0, lengths=(5,), action_size=ACTION_SIZE)
    agent = Probe(env.spec, Schedule("transitions", 0))
    params = agent.acting_params(agent.init(jax.random.key(0)))
    step = env.reset()
    given = params, agent.initial_carry(1), step.obs, step.is_first, jax.random.key(1), np.uint32(0)
    found = Compilations()
    with found.counted(warm=lambda: True):
        for mode in ("eval", "train"):
            jit_act(agent, 1, mode)(*given)
    assert (found.figures.programs, found.figures.again) == (2, 0)


def test_other_threads_count():
    found, double = Compilations(), jitted()
    with found.counted(warm=lambda: True):
        thread = threading.Thread(target=lambda: double(np.zeros(2, np.float32)))
        thread.start()
        thread.join()
    assert found.figures.programs == 1
