"""Reads collectives from the text of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from common.sharding import make_mesh
from launch.collectives import Collectives, Row, read_collectives

KIB = 1024


ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum.1 = f32[] add(%a, %b)
}
%fused (p: f32[256]) -> f32[256] {
  ROOT %sine = f32[256]{0} sine(%p)
}"""


def program(*lines: str, more: str = "") -> str:
    return "\n".join([ADD, more, "ENTRY %main (x: f32[256]) -> f32[256] {", *lines, "}"])


@pytest.mark.parametrize(
    ("line", "row"),
    [
        # An all-reduce is a reduce-scatter and an all-gather, which receive 3/4 of 1 KiB each.
        (
            "%a = f32[256]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add",
            Row("all-reduce", 1, 2 * 768),
        ),
        (
            "%a = bf16[4,128]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8],"
            " dimensions={0}",
            Row("all-gather", 1, 768),
        ),
        # A device receives a part from three other devices. Each part has the size of the result.
        (
            "%a = f32[64]{0} reduce-scatter(%x), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add",
            Row("reduce-scatter", 1, 768),
        ),
        (
            "ROOT %a = (f32[32]{0}, f32[32]{0}) all-to-all(%x, %y), channel_id=8, replica_groups=mesh['axis_0'=4,"
            "'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}, metadata={op_name=\"gather\"}",
            Row("all-to-all", 1, 128),
        ),
        (
            "%a = f32[256]{0} all-gather(%x), replica_groups=mesh['a'=8] {'a':(1)2}, dimensions={0}",
            Row("all-gather", 1, 512),
        ),
        # The type of `all-gather-start` and similar instructions includes operands and scalars, which do not count.
        (
            "%a = (f32[64]{0}, f32[256]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}",
            Row("all-gather", 1, 768),
        ),
        (
            "%a = ((f32[256]{0}), f32[64]{0}) reduce-scatter-start(%x), replica_groups=[2,4]<=[8], dimensions={0}",
            Row("reduce-scatter", 1, 768),
        ),
        (
            "%a = ((f32[512]{0}), f32[512]{0}) all-to-all-start(%x), replica_groups=[1,8]<=[8], dimensions={0}",
            Row("all-to-all", 1, 1792),
        ),
        (
            "%a = (f32[256]{0}, f32[256]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
            Row("collective-permute", 1, 1024),
        ),
        # Without groups, all devices form one group.
        ("%a = pred[1024]{0} all-reduce(%x), replica_groups={}", Row("all-reduce", 1, 2 * 896)),
    ],
)
def test_bytes_received_by_each_collective(line: str, row: Row) -> None:
    assert read_collectives(program(line), 8) == Collectives([row], 0)


def transfer(kind: str, groups: str, type_: str) -> str:
    """Returns the receiving half of a collective between slices, as the TPU compiler writes it."""
    attributes = (
        '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="x_0",'
        f'_xla_megascale_target={groups},_xla_megascale_transfer_type="{kind}"'
    )
    return (
        f"%r = ({type_}, u32[], token[]) recv(%x), channel_id=1, is_host_transfer=true,"
        f" frontend_attributes={{{attributes}}}"
    )


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (
            transfer("ALL_REDUCE", '"{1,2,3,4}x{0:3}"', "f32[256]{0}"),
            Row("all-reduce between slices", 1, 2 * 768),
        ),
        (
            transfer("ALL_GATHER", '"{1,2}x{0:7}"', "f32[2,128]{1,0}"),
            Row("all-gather between slices", 1, 512),
        ),
        # Two pairs of slices exchange data. The text names the ids of devices, not of slices.
        (
            transfer("REDUCE_SCATTER", "{{100000,200000},{300000,400000}}", "f32[128]{0}"),
            Row("reduce-scatter between slices", 1, 512),
        ),
        # All devices of two slices take part; half of the result comes from the other slice.
        (
            transfer("ALL_TO_ALL", "{{100000,100001,200000,200001}}", "f32[256]{0}"),
            Row("all-to-all between slices", 1, 512),
        ),
        (
            transfer("ONE_TO_ONE", "{{100000->200000},{200000->100000}}", "bf16[256]{0}"),
            Row("collective-permute between slices", 1, 512),
        ),
    ],
)
def test_bytes_received_from_other_slices(line: str, row: Row) -> None:
    found = read_collectives(program(line), 8)
    assert found == ([row], 0)
    assert (found.received, found.received_between) == (0, row.received)


def test_traffic_within_and_between_slices_is_counted_separately() -> None:
    lines = (
        "%a = f32[256]{0} all-reduce(%x), replica_groups=[2,4]<=[8]",
        transfer("ALL_REDUCE", '"{1,2}x{0:7}"', "f32[64]{0}"),
    )
    found = read_collectives(program(*lines), 8)
    assert (found.received, found.received_between) == (2 * 768, 256)


def test_operands_that_name_a_collective_are_not_counted() -> None:
    line = "%fusion.1 = f32[256]{0} fusion(%all-gather.3, %all-reduce-done.1), kind=kLoop, calls=%fused"
    assert read_collectives(program(line), 8).rows == []


LOOP = """%body (p: f32[256]) -> f32[256] {
  %sum = f32[256]{0} all-reduce(%p), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%add
}
%rest (p: f32[256]) -> pred[] {
  ROOT %less = pred[] compare(%p, %p), direction=LT
}"""


def test_loop_body_counts_once_per_iteration() -> None:
    known = '%w = f32[256]{0} while(%x), condition=%rest, body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    once = 2 * KIB * 7 // 8
    assert read_collectives(program(known, more=LOOP), 8) == ([Row("all-reduce", 5, 5 * once)], 0)
    unknown = known.partition(", backend_config")[0]
    assert read_collectives(program(unknown, more=LOOP), 8) == ([Row("all-reduce", 1, once)], 1)
    found = read_collectives(program(unknown, more=LOOP), 8, unknown_trips=3)
    assert found == ([Row("all-reduce", 3, 3 * once)], 1)
    nothing_inside = unknown.replace("body=%body", "body=%rest")
    assert read_collectives(program(nothing_inside, more=LOOP), 8) == ([], 0)


def test_fusions_with_one_channel_count_once() -> None:
    part = (
        "%a.{0} (p: f32[64]) -> f32[256] {{\n  %g.{0} = f32[256]{{0}} all-gather(%p), channel_id=7,"
    )
    part += (
        ' replica_groups=[2,4]<=[8], backend_config={{"async_collective_fusion_config":{{}}}}\n}}'
    )
    lines = [f"%f.{n} = f32[256]{{0}} fusion(%x), kind=kOutput, calls=%a.{n}" for n in range(3)]
    text = program(*lines, more="\n".join(part.format(n) for n in range(3)))
    assert read_collectives(text, 8).rows == [Row("all-gather", 1, 768)]


def test_reduce_scatter_fusion_costs_half_an_all_reduce() -> None:
    """Two reduce-scatter fusions count as two operations, even if they share a channel."""
    fusion = "%all-reduce-scatter.{0} (p: f32[256]) -> f32[64] {{\n  %s = f32[256]{{0}} all-reduce(%p), channel_id=1,"
    fusion += (
        " replica_groups=[2,4]<=[8], to_apply=%add\n  ROOT %d = f32[64]{{0}} dynamic-slice(%s)\n}}"
    )
    lines = [
        f"%f.{n} = f32[64]{{0}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.{n}"
        for n in (1, 2)
    ]
    text = program(*lines, more="\n".join(fusion.format(n) for n in (1, 2)))
    assert read_collectives(text, 8).rows == [Row("reduce-scatter", 2, 2 * 768)]


COUNTER = """%body (p: (u32[], f32[256])) -> (u32[], f32[256]) {
  %p = (u32[], f32[256]{0}) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  %copy = u32[] copy(%i)
  %two = u32[] constant(2)
  %next = u32[] add(%copy, %two)
  %x = f32[256]{0} get-tuple-element(%p), index=1
  %sum = f32[256]{0} all-reduce(%x), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %t = (u32[], f32[256]{0}) tuple(%next, %sum)
}
%rest (p: (u32[], f32[256])) -> pred[] {
  %p = (u32[], f32[256]{0}) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  %end = u32[] constant(7)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}"""


@pytest.mark.parametrize(
    ("change", "times", "unknown"),
    [
        (("", ""), 4, 0),  # four iterations, with the counter at 0, 2, 4 and 6
        (("direction=LT", "direction=NE"), 1, 1),
        (("add(%copy", "multiply(%copy"), 1, 1),
        (("constant(7)", "parameter(1)"), 1, 1),
    ],
)
def test_trip_count_is_inferred_from_counter(
    change: tuple[str, str], times: int, unknown: int
) -> None:
    lines = (
        "%zero = u32[] constant(0)",
        "%from = u32[] copy(%zero)",
        "%given = (u32[], f32[256]{0}) tuple(%from, /*index=1*/%x)",
        "%w = (u32[], f32[256]{0}) while(%given), condition=%rest, body=%body",
    )
    found = read_collectives(program(*lines, more=COUNTER.replace(*change)), 8)
    assert (found.rows[0].count, found.unknown_loops) == (times, unknown)


def test_collectives_of_a_compiled_program() -> None:
    """The program has a loop of five all-reduces of 4 KiB over eight devices, and an all-gather over four devices."""
    mesh = make_mesh({"data": 2, "fsdp": 4}, jax.devices()[:8])
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())

    def summed(x):
        return jax.lax.psum(x, ("data", "fsdp"))

    def function(x, y):
        add = jax.shard_map(
            lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(summed(x)), x),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )
        return add(x), y

    arguments = (
        jax.ShapeDtypeStruct((KIB,), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((KIB,), jnp.float32, sharding=split),
    )
    text = jax.jit(function, out_shardings=whole).lower(*arguments).compile().as_text()
    assert read_collectives(text, 8) == (
        [Row("all-reduce", 5, 5 * 2 * 4 * KIB * 7 // 8), Row("all-gather", 1, 4 * KIB * 3 // 4)],
        0,
    )
