"""Collectives read from compiled programs: kind, mesh axes, how often, how many bytes."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from trillion_moe.layers.exchange import MAKERS, Route, combine, dispatch, traffic
from trillion_moe.layers.wire import row_bytes
from trillion_moe.plan.collectives import Collective, collectives
from trillion_moe.sharding import Layout


def compiled(f, layout: Layout, spec, shape) -> str:
    over = jax.shard_map(f, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(over).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (partial(lax.psum, axis_name="tp"), Collective("all-reduce", "tp", 1, 8 * 4, 8 * 4)),
        (partial(lax.psum, axis_name=("ep", "cp")), Collective("all-reduce", "ep cp", 1, 8 * 4, 8 * 4)),
        (lambda x: lax.all_gather(x, "ep").sum(0), Collective("all-gather", "ep", 1, 2 * 8 * 4, 2 * 8 * 4)),
        (
            lambda x: lax.all_to_all(x.reshape(2, 4), "cp", 0, 0).reshape(8),
            Collective("all-to-all", "cp", 1, 8 * 4, 4 * 4),
        ),
        (lambda x: lax.ppermute(x, "tp", [(0, 1)]), Collective("collective-permute", "tp", 1, 8 * 4, 8 * 4)),
    ],
)
def test_kind_axes_and_bytes(f, expected: Collective) -> None:
    layout = Layout.make({"ep": 2, "cp": 2, "tp": 2})
    assert collectives([compiled(f, layout, P(("ep", "cp", "tp")), (64,))], layout.mesh) == [expected]


@pytest.mark.parametrize("transport", ["replicated", "all_to_all"])
@pytest.mark.parametrize("wire", [None, "float8_e4m3fn"])
def test_an_exchange_counts_its_bytes_as_the_program_has_them(transport: str, wire: str | None) -> None:
    """Fixed slots: what a device is given is what all devices count, its own slots with it; both ways."""
    layout, n, width, top = Layout.make({"ep": 4}), 12, 300, 3
    ideal = width * 4

    def f(x_NL):
        wanted_NP = jnp.ones((n, 4), bool)
        made = MAKERS[transport](wanted_NP, Route("ep", top, 0.5 if transport == "all_to_all" else None))
        exact = jnp.zeros((n, top), jnp.int32), jnp.ones((n, top))
        x_ML, (ids_MK, weights_MK) = dispatch(made, x_NL, exact, wire)
        moved = traffic(made, "ep", wanted_NP, row_bytes(x_NL, exact, wire), ideal)
        return combine(made, x_ML * weights_MK[:, :1] + ids_MK[:, :1], wire), moved[None]

    over = jax.shard_map(f, mesh=layout.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    program = jax.jit(over).lower(jax.ShapeDtypeStruct((4 * n, width), jnp.float32)).compile()
    slots = 4 * (6 if transport == "all_to_all" else n)
    row = width + 3 * 4 if wire else ideal  # and float32 scales for three blocks of 128
    found = sum(one.bytes for one in collectives([program.as_text()], layout.mesh))
    assert found == slots * (row + top * 8) + slots * row
    moved = program(jnp.ones((4 * n, width), jnp.float32))[1]
    assert moved.tolist() == [[slots * 3 / 4 * (row + top * 8), n * 3 * ideal]] * 4


def test_in_a_loop_it_counts_as_often_as_the_loop_turns() -> None:
    layout = Layout.make({"dp": 4, "tp": 2})

    def inner(x, _):
        return lax.psum(jnp.sin(x), "dp") / 4, None

    def f(x):
        x = lax.scan(lambda x, _: (lax.scan(inner, x, length=3)[0], None), x, length=5)[0]
        return lax.psum(x, "tp")

    found = collectives([compiled(f, layout, P(("dp", "tp")), (64,))], layout.mesh)
    assert found == [Collective("all-reduce", "dp", 15, 15 * 32, 32), Collective("all-reduce", "tp", 1, 32, 32)]


def test_asynchronous_forms() -> None:
    """As XLA writes them for accelerators: groups by formula, operands in front of results."""
    exchange = "(bf16[4,8], bf16[32,8], s32[4], s32[4], s32[4], s32[4], bf16[32,8]) ragged-all-to-all-start(%z)"
    pairs = "source_target_pairs={{0,1},{2,3},{4,5},{6,7}}"
    sync = '"collective_backend_config":{"is_sync":true}'
    trips = 'backend_config={"known_trip_count":{"n":"7"}}'
    text = f"""
HloModule planted

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {{
  %x = bf16[4,8] parameter(0)
  %ag = (bf16[4,8], bf16[8,8]) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={{0}}
  %cp = (bf16[4,8], bf16[4,8], u32[], u32[]) collective-permute-start(%x), {pairs}
  %f = bf16[4,4] fusion(%x), kind=kOutput, calls=%inner
  %agd = bf16[8,8] all-gather-done(%ag)
  %k = bf16[4,4] custom-call(%f), custom_call_target="tpu_custom_call"
  %cpd = bf16[4,8] collective-permute-done(%cp)
}}

%inner (p: bf16[4,2048]) -> bf16[4,4] {{
  %p = bf16[4,2048] parameter(0)
  %q = bf16[2048,4] transpose(%p), dimensions={{1,0}}
  ROOT %d = bf16[4,4] dot(%p, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (p: bf16[4,8]) -> bf16[4,8] {{
  %w = (s32[], bf16[4,8]) while(%t), condition=%c, body=%body, {trips}
  %ar = f32[16] all-reduce-start(%y), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add, backend_config={{{sync}}}
  %n = f32[16] custom-call(%y), custom_call_target="tpu_custom_call"
  %ard = f32[16] all-reduce-done(%ar)
  %rs = f32[4] reduce-scatter(%y), replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {{'axis_0'}}, to_apply=%add
  %ag = f32[2] all-gather(%y), replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {{'b'}}
  %ra = {exchange}, replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}
  %rad = bf16[32,8] ragged-all-to-all-done(%ra)
}}
"""
    layout = Layout.make({"ep": 4, "tp": 2})
    assert collectives([text], layout.mesh) == [
        Collective("all-gather", "tp", 8, 7 * 128 + 8, 128, 7, 7, 7 * 128, 7 * 2 * 4 * 2048 * 4),
        Collective("ragged-all-to-all", "ep", 1, 512, 512, 1, 0, 0, 0),  # nothing is done meanwhile
        Collective("collective-permute", "tp", 7, 7 * 64, 64, 7, 7, 7 * 64, 7 * 2 * 4 * 2048 * 4),
        Collective("all-reduce", "ep", 1, 64, 64),  # two instructions, but the compiler says that it is waited for
        Collective("reduce-scatter", "ep", 1, 16, 16),
    ]


def test_as_tpus_say_it() -> None:
    """Numbers of their own behind the result, parts of an axis, and how often a loop turns only in its condition."""
    text = """
%cond (c: (s32[], u16[8])) -> pred[] {
  %c = (s32[], u16[8]) parameter(0)
  %n = s32[]{:T(128)} constant(6), metadata={}
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%body (b: (s32[], u16[8])) -> (s32[], u16[8]) {
  %ra = ((u16[8], u16[32], s32[2], s32[2], s32[2], s32[2]), u16[32], u32[], u32[]) ragged-all-to-all-start(%x), GROUPS
  %rad = u16[32] ragged-all-to-all-done(%ra)
}

ENTRY %main (p: u16[8]) -> u16[8] {
  %w = (s32[], u16[8]) while(%t), condition=%cond, body=%body
}
""".replace("GROUPS", "replica_groups={{0,2},{1,3}}")
    mesh = Layout.make({"ep": 4}).mesh
    assert collectives([text], mesh) == [Collective("ragged-all-to-all", "part of ep", 6, 6 * 64, 64, 6, 0, 0, 0)]
    with pytest.raises(ValueError, match="nothing awaits %ra = "):
        collectives([text.replace("ragged-all-to-all-done(%ra)", "copy(%ra)")], mesh)


def test_a_small_product_hides_nothing() -> None:
    """2 b m k n = 16,384 FLOPs next to 128 bytes are enough, next to 256 they are not: two gathers of unlike size."""
    text = """
ENTRY %main (p: bf16[16,32]) -> bf16[16,16] {
  %ag = (bf16[32], bf16[64]) all-gather-start(%x), replica_groups={{0,1}}
  %d = bf16[16,16] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %agd = bf16[64] all-gather-done(%ag)
  %p = bf16[16,32] parameter(0)
  %q = bf16[32,16] parameter(1)
}
"""
    mesh = Layout.make({"ep": 2}).mesh
    found = [
        collectives([text.replace("bf16[32]", f"bf16[{n // 2}]").replace("bf16[64]", f"bf16[{n}]")], mesh)
        for n in (64, 128)
    ]
    assert found == [
        [Collective("all-gather", "ep", 1, 128, 128, 1, 1, 128, 16384)],
        [Collective("all-gather", "ep", 1, 256, 256, 1, 0, 0, 16384)],
    ]


def test_branches_narrow_types_and_what_nobody_calls() -> None:
    lines = [
        "%yes () -> f8e4m3fn[16] {",
        "  %ag = f8e4m3fn[16] all-gather(%y), replica_groups={{0,1,2,3}}, dimensions={0}",
        "}",
        "",
        "ENTRY %main () -> f32[] {",
        "  %c = f8e4m3fn[16] conditional(%p, %x, %y), true_computation=%yes, false_computation=%no",
        "}",
    ]
    text, mesh = "\n".join(lines), Layout.make({"ep": 4}).mesh
    assert collectives([text], mesh) == [Collective("all-gather", "ep", 1, 16, 16)]
    assert collectives([text, text], mesh) == [Collective("all-gather", "ep", 2, 32, 16)]  # of two programs
    with pytest.raises(ValueError, match="how often yes is called is not known"):
        collectives([text.replace("true_computation", "other")], mesh)
    with pytest.raises(ValueError, match="the size of XLA's q7 is not known here"):
        collectives([text.replace("f8e4m3fn", "q7")], mesh)


def test_a_permutation_between_nobody_is_none() -> None:
    """XLA leaves it where a permutation's pairs were all dropped: its result is zeros."""
    line = "  %cp = f32[16] collective-permute(%y), source_target_pairs={PAIRS}\n"
    text, mesh = "ENTRY %main () -> f32[] {\n" + line + "}\n", Layout.make({"ep": 2}).mesh
    assert collectives([text.replace("PAIRS", "")], mesh) == []
    (found,) = collectives([text.replace("PAIRS", "{0,1}")], mesh)
    assert (found.kind, found.axes, found.bytes) == ("collective-permute", "ep", 64)


def test_a_form_that_is_not_known() -> None:
    text = "ENTRY %main () -> f32[] {\n  %ar = f32[16] all-reduce(%y), replica_groups=<all>, to_apply=%add\n}\n"
    with pytest.raises(ValueError, match=r"in a form that is not known here: %ar = f32\[16\] all-reduce"):
        collectives([text], Layout.make({"ep": 4}).mesh)
