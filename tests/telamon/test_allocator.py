import subprocess
import sys

PROGRAM = """
import resource, sys
from telamon.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import jax, jax.numpy as jnp

f = jax.jit(lambda x: x @ x @ x)
x = jnp.zeros((330_000, 8, 8))  # one product of 84 MB is kept for the next: more than a thread's arena holds
for call in range(16):
    if call == 12:  # the heap has found its size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", PROGRAM, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return int(done.stdout)


def test_temporaries_are_not_given_back_between_calls():
    assert faults("keep") < 0.5 * faults("default")
