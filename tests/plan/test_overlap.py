"""Exchanges that are hidden behind the work of experts, and one that cannot be, as compilers schedule them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from trillion_moe import aot
from trillion_moe.compiler import OPTIONS
from trillion_moe.meshes.chips import Gpu
from trillion_moe.meshes.machine import compiled_for, machine
from trillion_moe.plan.collectives import collectives
from trillion_moe.sharding import Layout

N, WIDTH = 4096, 2048


def exchanged(dependent: bool):
    """Chunks are multiplied while the next is underway; dependent: only once it has come."""

    def f(x_CNL, w_LL):
        p = lax.axis_size("ep")
        starts_P, sizes_P = jnp.arange(p, dtype=jnp.int32) * (N // p), jnp.full(p, N // p, jnp.int32)
        ends_P = jnp.full(p, N // p, jnp.int32) * lax.axis_index("ep")

        def step(here_NL, after_NL):
            room_NL = jnp.zeros_like(after_NL)
            coming_NL = lax.ragged_all_to_all(after_NL, room_NL, starts_P, sizes_P, ends_P, sizes_P, axis_name="ep")
            x_NL = here_NL + (coming_NL * 0 if dependent else 0)
            return coming_NL, jnp.tanh(x_NL @ w_LL)

        return lax.scan(step, x_CNL[0], x_CNL)[1]

    return f


@pytest.mark.aot
@pytest.mark.parametrize("name", ["h200x16", "v5p_32"])
def test_what_waits_for_a_collective_does_not_hide_it(name: str) -> None:
    mesh = machine(name)
    chip = compiled_for(mesh)
    layout = Layout.make(mesh.axes, devices=aot.devices(chip, mesh.topology))
    x = jax.ShapeDtypeStruct((4, N, WIDTH), jnp.bfloat16, sharding=layout.sharding())
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=layout.sharding())
    found = {}
    for dependent in (False, True):
        over = jax.shard_map(exchanged(dependent), mesh=layout.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        options = dict(OPTIONS["gpu"]) if isinstance(chip, Gpu) else None
        compiled = aot.compile_over(chip, layout.mesh, jax.jit(over), x, w, options=options).compiled
        (found[dependent],) = [
            row for row in collectives([compiled.as_text()], layout.mesh) if row.kind.startswith("ragged")
        ]
    assert found[False].count == found[True].count == found[False].overlapped
    assert found[True].overlapped == 0
