"""Memory traffic of loops and Pallas kernels, read from the text of compiled programs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from launch import estimate
from launch.topology import Topology
from launch.traffic import kernel_bytes, loop_factor

LOOP = """%fused (whole: f32[10,256], place: s32[]) -> f32[256] {
  %whole = f32[10,256]{1,0} parameter(0)
  %place = s32[] parameter(1)
  %part = f32[1,256]{1,0} dynamic-slice(%whole, %place, %place), dynamic_slice_sizes={1,256}
  ROOT %flat = f32[256]{0} bitcast(%part)
}
%stored (whole: f32[10,256], part: f32[256], place: s32[]) -> f32[10,256] {
  %whole = f32[10,256]{1,0} parameter(0)
  %part = f32[256]{0} parameter(1)
  %place = s32[] parameter(2)
  %row = f32[1,256]{1,0} bitcast(%part)
  ROOT %new = f32[10,256]{1,0} dynamic-update-slice(%whole, %row, %place, %place)
}
%body (p: (s32[], f32[10,256])) -> (s32[], f32[10,256]) {
  %p = (s32[], f32[10,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[10,256]{1,0} get-tuple-element(%p), index=1
LINE
  ROOT %t = (s32[], f32[10,256]{1,0}) tuple(%i, %x)
}
%rest (p: (s32[], f32[10,256])) -> pred[] {
  %p = (s32[], f32[10,256]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
ENTRY %main (x: f32[10,256], i: s32[]) -> (s32[], f32[10,256]) {
  %x = f32[10,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %twice = f32[10,256]{1,0} add(%x, %x)
  %given = (s32[], f32[10,256]{1,0}) tuple(%i, %twice)
  ROOT %w = (s32[], f32[10,256]{1,0}) while(%given), condition=%rest, body=%body, TRIPS
}
"""
CONSTANT = "%r = f32[256]{0} constant({...})\n  "
ROW = 256 * 4
WHOLE = 10 * ROW
OUTSIDE = 3 * WHOLE  # two operands and a result


@pytest.mark.parametrize(
    ("line", "inside"),
    [
        ("%a = f32[10,256]{1,0} multiply(%x, %x)", 3 * WHOLE),
        ("%a = f32[10,256]{1,0:T(8,128)} copy(%x)", 2 * WHOLE),
        ("%a = f32[1,256]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,256}", 2 * ROW),
        ("%a = f32[256]{0} fusion(%x, %i), kind=kLoop, calls=%fused", 2 * ROW + 4),
        # An in-place update reads the new row and the index, and writes only this row of the array.
        (f"{CONSTANT}%a = f32[10,256]{{1,0}} fusion(%x, %r, %i), kind=kLoop, calls=%stored", 2 * ROW + 4),
        # The gathered array is larger than the operand. The type of `all-gather-start` lists both.
        ("%a = (f32[10,256]{1,0}, f32[40,256]{1,0}) all-gather-start(%x), dimensions={0}", 5 * WHOLE),
        ("%a = f32[10,256]{1,0} bitcast(%x)", 0),
    ],
)  # fmt: skip
def test_loop_factor_counts_every_iteration(line: str, inside: int) -> None:
    trips = 'backend_config={"known_trip_count":{"n":"7"}}'
    text = LOOP.replace("LINE", f"  {line}").replace("TRIPS", trips)
    assert loop_factor(text) == pytest.approx((OUTSIDE + 7 * inside) / (OUTSIDE + inside))
    assert loop_factor(text.replace(trips, "metadata={}")) == 1  # unknown trip count


def test_loop_factor_matches_unrolled_loop() -> None:
    """The traffic of a loop is the compiler's count for the unrolled loop, within 10 %."""

    def function(count: int, unroll: bool) -> Callable:
        def once(x, weights):
            return jnp.tanh(x @ weights) * 0.5

        def made(x, weights):
            if not unroll:
                return jax.lax.fori_loop(0, count, lambda _, x: once(x, weights), x)
            for _ in range(count):
                x = once(x, weights)
            return x

        return made

    def traffic(count: int, unroll: bool) -> tuple[float, float]:
        x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
        weights = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        compiled = jax.jit(function(count, unroll)).lower(x, weights).compile()
        return compiled.cost_analysis()["bytes accessed"], loop_factor(compiled.as_text())

    expected, one = traffic(6, unroll=True)
    assert one == 1
    once, often = traffic(6, unroll=False)
    assert once < expected / 3
    assert once * often == pytest.approx(expected, rel=0.1)


@pytest.mark.medium
def test_accumulation_has_the_traffic_of_separate_steps(make_config) -> None:
    """Only the traffic of the optimizer update differs: with accumulation, the update runs once."""
    one = Topology("cpu:1", jax.devices()[:1], None)
    config = make_config(dropout=0.0, encoder_layers=1, decoder_layers=1)
    small = estimate.estimate(config, one)
    config.train.accumulate = 4
    config.data.tokens_per_batch *= 4
    found = estimate.estimate(config, one)
    assert found.flops == 4 * small.flops
    assert found.traffic == pytest.approx(4 * small.traffic, rel=0.05)


def test_pallas_kernels_count_their_operands_and_results() -> None:
    """The compiler counts all other custom calls."""
    kernel = '%k = (f32[10], bf16[6]) custom-call(%x, %y), custom_call_target="tpu_custom_call"'
    text = f"""ENTRY %main (x: f32[100], y: bf16[8]) -> f32[10] {{
  %x = f32[100]{{0}} parameter(0)
  %y = bf16[8]{{0}} parameter(1)
  {kernel}
  ROOT %r = f32[10]{{0}} custom-call(%x), custom_call_target="Sharding"
}}
"""
    assert kernel_bytes(text) == 4 * 100 + 2 * 8 + 4 * 10 + 2 * 6
