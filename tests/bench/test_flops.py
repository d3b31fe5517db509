import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.flops import flops

A, B = jnp.ones((8, 16)), jnp.ones((16, 32))
PRODUCT = 2 * 8 * 16 * 32


def test_a_product_is_two_operations_per_multiply_add():
    assert flops(jnp.matmul, A, B) == PRODUCT


def test_a_scan_counts_its_body_as_often_as_it_runs():
    square = jnp.ones((8, 8))
    chain = lambda x: jax.lax.scan(lambda c, _: (c @ x, None), x, length=7)[0]
    assert flops(chain, square) == 7 * 2 * 8**3


def test_a_batch_a_jit_and_a_cond_are_followed():
    batched = jax.jit(jax.vmap(jnp.matmul, in_axes=(0, None)))
    assert flops(batched, jnp.ones((5, 8, 16)), B) == 5 * PRODUCT
    branch = lambda p, a, b: jax.lax.cond(p, lambda a, b: a @ b, lambda a, b: jnp.zeros((8, 32)), a, b)
    assert flops(branch, True, A, B) == PRODUCT


def test_a_gradient_costs_two_more_products():
    loss = lambda a, b: (a @ b).sum()
    assert flops(jax.value_and_grad(loss, argnums=(0, 1)), A, B) == 3 * PRODUCT


def test_a_convolution():
    image, kernel = jnp.ones((2, 3, 10, 10)), jnp.ones((4, 3, 3, 3))
    conv = lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID")
    assert flops(conv, image, kernel) == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)


def test_a_while_loop_with_products_is_refused():
    loop = lambda a: jax.lax.while_loop(lambda x: x.sum() < 1e9, lambda x: x @ x, a)
    with pytest.raises(ValueError, match="while loop"):
        flops(loop, np.ones((4, 4), np.float32))
