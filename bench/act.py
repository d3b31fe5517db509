"""Time of one decision for a batch of environments, from observation to action on the host. JSON lines.

TD-MPC2 plans, DreamerV3 samples its policy.

python bench/act.py [--preset 1 5 size1m size12m] [--envs 1 16] [--env-batching auto] [--recipe paper] [--dtype float32]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a bare accelerator machine has no installed telamon

from actors.collector import jit_act
from bench.cases import agent, parser
from bench.flops import flops
from bench.timing import interleaved, report
from telamon.agents.dreamerv3.config import WIDTHS
from telamon.allocator import keep_freed_memory


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--envs", type=int, nargs="+", default=[1, 16])
    p.add_argument("--env-batching", choices=("auto", "vmap", "map"), default="auto")
    options = p.parse_args()
    keep_freed_memory()
    for preset in options.preset:
        batching = {} if preset in WIDTHS else {"env_batching": options.env_batching}
        subject = agent(options, preset, **batching)
        params = subject.acting_params(jax.jit(subject.init)(jax.random.key(0)))
        for envs in options.envs:
            act, key = jit_act(subject, envs, "train"), jax.random.key(1)
            rng = np.random.default_rng(0)
            obs = {k: rng.standard_normal((envs, *a.shape), np.float32).astype(a.dtype) for k, a in subject.env.obs}
            first = np.zeros(envs, bool)
            carry = subject.initial_carry(envs)
            count = flops(act, params, carry, obs, first, key, np.uint32(0))

            def one(act=act, params=params, obs=obs, first=first, key=key):
                nonlocal carry
                action, carry, _ = act(params, carry, obs, first, key, np.uint32(0))
                return np.asarray(action)

            times = interleaved(one, max(3, options.repetitions // envs))
            line = report(
                "act", *times, count, preset=preset, envs=envs, recipe=options.recipe, dtype=options.dtype,
                env_batching=options.env_batching, obs=options.obs, action=options.action,
            )  # fmt: skip
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
