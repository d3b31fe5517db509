"""Floating-point operations of a function, by walking its jaxpr.

XLA's own cost analysis counts the body of a scan once, whatever its length; here a body counts as often as it runs.
Counted are matrix products and convolutions, two operations per multiply-add: what a decision or an update mostly is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def flops(function: Callable[..., Any], *args: Any) -> int:
    """FLOPs of the products in one call. Raises ValueError for a `while` loop, whose length a jaxpr does not hold."""
    return _walk(jax.make_jaxpr(function)(*args).jaxpr)


def _walk(jaxpr: Jaxpr) -> int:
    return sum(_equation(e) for e in jaxpr.eqns)


def _equation(e: Any) -> int:
    name = e.primitive.name
    if name == "dot_general":
        return _dot(e)
    if name == "conv_general_dilated":
        return _conv(e)
    if name == "while":
        inside = sum(_walk(j) for j in _inner(e.params))
        if inside:
            raise ValueError("a while loop with products in it has no length that a jaxpr knows; use lax.scan")
        return 0
    counts = [_walk(j) for j in _inner(e.params)]
    if name == "cond":
        return max(counts)
    return sum(counts) * (e.params["length"] if name == "scan" else 1)


def _inner(params: dict[str, Any]) -> list[Jaxpr]:
    values = [v for p in params.values() for v in (p if isinstance(p, (tuple, list)) else (p,))]
    return [v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in values if isinstance(v, (ClosedJaxpr, Jaxpr))]


def _dot(e: Any) -> int:
    (contract, _), _ = e.params["dimension_numbers"]
    left, out = e.invars[0].aval, e.outvars[0].aval
    return 2 * math.prod(out.shape) * math.prod(left.shape[i] for i in contract)


def _conv(e: Any) -> int:
    """Every output element meets one kernel's worth of inputs."""
    kernel, out = e.invars[1].aval, e.outvars[0].aval
    out_features = kernel.shape[e.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(out.shape) * math.prod(kernel.shape) // out_features
