"""Counts the matrix products of compiled programs."""

import jax
import jax.numpy as jnp

from common.train import flops
from launch.products import read_products

WIDTH, HIDDEN, ROWS, STEPS = 8, 24, 6, 5


def _loss(weights, x_BD):
    """Computes a feed-forward layer STEPS times, then products of attention."""

    def layer(x_BD, _):
        return jnp.tanh(jnp.tanh(x_BD @ weights["up"]) @ weights["down"]), None

    x_BD, _ = jax.lax.scan(layer, x_BD, length=STEPS)
    x_BHK = x_BD.reshape(ROWS, 2, WIDTH // 2)
    scores_HBB = jnp.einsum("bhk,chk->hbc", x_BHK, x_BHK)
    return jnp.square(jnp.einsum("hbc,chk->bhk", scores_HBB, x_BHK)).sum()


def _arguments():
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {n: jnp.ones(shape) for n, shape in shapes.items()}, jnp.ones((ROWS, WIDTH))


def test_flops_of_a_model_and_its_gradient():
    step, arguments = jax.value_and_grad(_loss), _arguments()
    products = read_products(jax.jit(step).lower(*arguments).compile().as_text())
    counted = sum(count * product.flops for product, count in products.items())
    # A layer and attention each have two products forward and four backward. A product of a layer has ROWS x WIDTH x
    # HIDDEN multiplications, a product of attention ROWS x ROWS x WIDTH.
    layers, attention = 6 * STEPS * 2 * ROWS * WIDTH * HIDDEN, 6 * 2 * ROWS * ROWS * WIDTH
    assert counted == layers + attention == flops.count(jax.make_jaxpr(step)(*arguments))


def test_argument_replaces_an_unknown_trip_count():
    def decode(weights, x_BD, length):
        return jax.lax.while_loop(
            lambda state: state[0] < length,
            lambda state: (state[0] + 1, jnp.tanh(state[1] @ weights["up"] @ weights["down"])),
            (0, x_BD),
        )

    text = jax.jit(decode).lower(*_arguments(), 3).compile().as_text()
    products = read_products(text, unknown_trips=7)
    assert set(products.values()) == {7}
    assert {(x.left, x.right, x.result) for x in products} == {
        (("f32", (ROWS, WIDTH)), ("f32", (WIDTH, HIDDEN)), ("f32", (ROWS, HIDDEN))),
        (("f32", (ROWS, HIDDEN)), ("f32", (HIDDEN, WIDTH)), ("f32", (ROWS, WIDTH))),
    }
