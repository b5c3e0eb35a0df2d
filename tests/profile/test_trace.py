"""What a trace says of compiled programs: planted ones on the CPU, and traces of accelerators written by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from trillion_moe.layers.moe import EXCHANGE
from trillion_moe.profile.trace import Instruction, instructions, shares, traced
from trillion_moe.sharding import Layout

LAYOUT = Layout.make({"ep": 4})


def compiled(f, *args):
    over = jax.shard_map(f, mesh=LAYOUT.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    return jax.jit(over).lower(*args).compile()


def found(f):
    x = jax.device_put(jnp.ones((256, 256)), LAYOUT.sharding("expert", None))
    program = compiled(f, x)
    data = traced(lambda: [jax.block_until_ready(program(x)) for _ in range(3)])
    return shares(data, instructions([program.as_text() or ""]))


def talk(x):
    return lax.all_to_all(lax.psum(x, "ep"), "ep", 0, 0, tiled=True)


def compute(x):
    return lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ x.T @ x), x)


def test_a_program_that_only_talks() -> None:
    talked = found(talk)
    assert talked.devices == 4
    assert talked.events >= 3 * 4 * 2
    assert set(talked.by_kind) == {"all-reduce", "all-to-all"}
    assert all(share > 0 for share in talked.by_kind.values())
    assert talked.exchange == 0
    assert 0 < talked.collectives <= talked.busy <= 1
    assert 0.5 * talked.busy < talked.exposed < 1.001 * talked.collectives
    assert sum(talked.by_kind.values()) == pytest.approx(talked.collectives)


def test_a_program_that_only_computes() -> None:
    """Its loop counts by what runs within."""
    computed = found(compute)
    assert (computed.collectives, computed.exposed, computed.exchange, computed.by_kind) == (0, 0, 0, {})
    assert computed.events >= 3 * 4 * 5 * 2
    assert 0 < computed.busy <= 1


def test_the_exchange_with_experts_is_told_apart() -> None:
    """By the name that the model gives it, through gradients too; what else is sent is not counted."""

    def f(x):
        def through(x):
            with jax.named_scope(EXCHANGE):
                return jnp.sum(lax.all_to_all(x, "ep", 0, 0, tiled=True) ** 2)

        return lax.psum(jax.grad(through)(x), "ep")

    both = found(f)
    assert 0 < both.exchange < both.collectives
    assert both.exchange == pytest.approx(both.by_kind["all-to-all"])


def test_a_trace_without_instructions_is_none() -> None:
    """What ran was another program."""
    x = jnp.ones(8)
    data = traced(lambda: jax.block_until_ready(jnp.sin(x)))
    assert shares(data, {"jit_f": {"fusion": Instruction("", False)}}) is None


# --- accelerators -----------------------------------------------------------------------------------------------------

HLO = f"""HloModule jit_f, is_scheduled=true

%async_computation (p: f32[8]) -> f32[2] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %reduce-scatter.9 = f32[2]{{0}} reduce-scatter(%p), dimensions={{0}}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %fusion.1 = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%c, metadata={{op_name="jit(f)/mul"}}
  %all-gather-start.1 = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%x), metadata={{op_name="jit(f)/{EXCHANGE}/a"}}
  %all-gather-done.1 = f32[32]{{0}} all-gather-done(%all-gather-start.1), metadata={{op_name="jit(f)/{EXCHANGE}/a"}}
  %async-start = ((f32[8]{{0}}), f32[2]{{0}}) async-start(%x), calls=%async_computation
  %async-done = f32[2]{{0}} async-done(%async-start)
  %while.3 = (f32[8]{{0}}) while(%t), condition=%a, body=%b
  ROOT %psum.7 = f32[8]{{0}} all-reduce(%x), to_apply=%add, metadata={{op_name="jit(f)/psum"}}
}}
"""


def test_what_instructions_are() -> None:
    assert instructions([HLO])["jit_f"] == {
        "p": Instruction("", False),
        "reduce-scatter.9": Instruction("reduce-scatter", False),
        "x": Instruction("", False),
        "fusion.1": Instruction("", False),
        "all-gather-start.1": Instruction("all-gather", True),
        "all-gather-done.1": Instruction("all-gather", True),
        "async-start": Instruction("reduce-scatter", False),
        "async-done": Instruction("reduce-scatter", False),
        "while.3": Instruction(None, False),
        "psum.7": Instruction("all-reduce", False),
    }


def text(planes) -> str:
    """An XSpace: plane name -> line name -> (event name, start and end in microseconds, its stats)."""
    out = []
    for plane, lines in planes.items():
        names = sorted({name for events in lines.values() for name, *_ in events})
        stats = sorted({stat for events in lines.values() for *_, given in events for stat in given})
        out.append(f'planes {{ name: "{plane}"')
        for line, events in lines.items():
            out.append(f'lines {{ name: "{line}"')
            for name, start, end, given in events:
                out.append(
                    f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 10**6} "
                    f"duration_ps: {(end - start) * 10**6} "
                )
                out += [f'stats {{ metadata_id: {stats.index(k) + 1} str_value: "{v}" }}' for k, v in given.items()]
                out.append("}")
            out.append("}")
        for kind, values in (("event_metadata", names), ("stat_metadata", stats)):
            out += [f'{kind} {{ key: {i} value {{ id: {i} name: "{n}" }} }}' for i, n in enumerate(values, 1)]
        out.append("}")
    return "\n".join(out)


def gpu(op: str, start: int, end: int, module: str = "jit_f"):
    return f"kernel of {op}", start, end, {"hlo_op": op, "hlo_module": module}


def test_two_gpus() -> None:
    """Kernels on streams: what overlaps counts once, other programs' not at all, each device has its own time."""
    trace = {
        "/device:GPU:0": {
            "Stream #1": [gpu("fusion.1", 0, 40), gpu("psum.7", 60, 80), gpu("fusion.1", 90, 99, "jit_other")],
            "Stream #2": [gpu("all-gather-start.1", 20, 50)],
            "XLA Ops": [gpu("all-gather-start.1", 20, 50)],  # the same again, as tools derive it
        },
        "/device:GPU:1": {"Stream #1": [gpu("fusion.1", 0, 100)], "Steps": [("3", 0, 100, {})]},
        "/host:CPU": {"python": [("$x.py:3 f", 0, 400, {})]},
    }
    data = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(text(trace))
    )
    s = shares(data, instructions([HLO]))
    assert (s.devices, s.seconds) == (2, pytest.approx(100e-6))
    assert s.busy == pytest.approx((70 + 100) / 200)
    assert s.collectives == pytest.approx((30 + 20) / 200)
    assert s.exposed == pytest.approx((10 + 20) / 200)
    assert s.exchange == pytest.approx(30 / 200)
    assert s.by_kind == {"all-gather": pytest.approx(30 / 200), "all-reduce": pytest.approx(20 / 200)}


def test_a_tpu() -> None:
    """Instructions have lines of their own and say no module; loops contain what else is there."""
    trace = {
        "/device:TPU:0": {
            "XLA Modules": [("jit_f(123)", 0, 100, {})],
            "XLA Ops": [
                ("%while.3 = (f32[8]) while(%t)", 0, 100, {}),
                ("%fusion.1 = f32[8] fusion(%x)", 0, 40, {}),
                ("all-gather-done.1", 40, 50, {}),
            ],
            "Async XLA Ops": [("%all-gather-start.1 = (f32[8], f32[32]) all-gather-start(%x)", 10, 50, {})],
            "Source": [("fusion.1", 60, 100, {})],
        }
    }
    s = shares(jax.profiler.ProfileData.from_text_proto(text(trace)), instructions([HLO]))
    assert (s.busy, s.collectives, s.exposed, s.exchange) == (
        1,
        pytest.approx(0.8),
        pytest.approx(0.2),
        pytest.approx(0.8),
    )
