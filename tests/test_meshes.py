"""Machines: their files agree with themselves, with their chips and compilers, and with Kimi K3's sizes."""

import dataclasses
import importlib
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from trillion_moe import aot
from trillion_moe.config import ModelConfig
from trillion_moe.meshes import machine as module
from trillion_moe.meshes.chips import CHIPS, KNOWN, TERA, Gpu, Tpu
from trillion_moe.meshes.machine import ICI, Link, Machine, Tier, compiled_for, machine, machines, mesh_of
from trillion_moe.model import Model
from trillion_moe.sharding import AXES, Layout, LayoutError, shardings

NAMES = machines()
README = Path(module.__file__).parent / "README.md"
EXPERTS, HEADS, ROWS, HIDDEN = 896, 96, 163_840, 7168  # Kimi K3: routed experts, heads, vocabulary, width
EXPERT_BYTES = 92 * EXPERTS * 3 * 3584 * 3072 * 17 // 32  # in MXFP4: half a byte each, and a byte for 32
TWO = Tier("a", 2, 2.0, 1.0)


def test_there_are_the_machines_that_are_named():
    assert len(NAMES) == 21
    assert {"cpu_8", "v5p_32", "v5p_1024", "tpu7x_64", "h100x1024", "gb200_nvl72", "ascend_910c_384"} < set(NAMES)


def test_an_unknown_machine_is_named_with_those_there_are():
    with pytest.raises(LayoutError, match=r"no machine 'abacus': .*cpu_8, .*v6e_256"):
        machine("abacus")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_named_as_its_machine_and_adds_up(name):
    found = machine(name)
    assert found.name == name
    assert set(found.axes) <= set(AXES)
    bandwidths = [tier.bandwidth for tier in found.tiers]
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert all(1e-7 < tier.latency < 1e-4 for tier in found.tiers)
    if found.topology is not None:
        chip = compiled_for(found)
        prefix, _, sides = found.topology.rpartition(":")
        assert prefix == (chip.name if isinstance(chip, Tpu) else "")
        assert math.prod(map(int, sides.split("x"))) * chip.facts.devices_per_chip == found.devices


@pytest.mark.parametrize("name", NAMES)
def test_kimi_k3_can_be_laid_on_it(name):
    found = machine(name)
    ep, tp = found.axes.get("ep", 1), found.axes.get("tp", 1)
    assert EXPERTS % ep == HEADS % tp == ROWS % tp == HIDDEN % (found.axes.get("fsdp", 1) * ep) == 0
    assert found.tier("tp") == found.tiers[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_array_of_kimi_k3_can_be_cut_as_its_rules_say(name, k3):
    found = machine(name)
    shape = tuple(found.axes.get(axis, 1) for axis in AXES)
    mesh = Mesh(np.full(shape, jax.devices()[0]), AXES)  # one device in all places: nothing is put there
    shardings(k3, dataclasses.replace(Layout.make({}, rules=found.rules), mesh=mesh))


@pytest.fixture(scope="module")
def k3(goldens):
    return Model(ModelConfig.from_file(goldens / "config" / "kimi_k3_config.json"))


@pytest.mark.parametrize("name", [name for name in NAMES if machine(name).facts])
def test_a_machine_says_so_where_kimi_k3_does_not_fit(name):
    found = machine(name)
    cut = math.prod(found.axes.get(axis, 1) for axis in ("pp", "ep", *found.rules.get("expert_mlp", ())))
    says = "do not fit" in importlib.import_module(f"trillion_moe.meshes.{name}").__doc__
    assert says == (EXPERT_BYTES / cut > found.facts.hbm_bytes)


@pytest.mark.parametrize("name", KNOWN)
def test_facts_are_in_the_range_of_what_is_built(name):
    chip, facts = KNOWN[name], KNOWN[name].facts
    assert chip.name == name
    if name == "cpu":
        assert facts is None
        return
    assert 30e9 < facts.hbm_bytes < 300e9
    assert 1e12 < facts.memory_bandwidth < 10e12
    assert 300 * TERA < facts.bf16_flops < 3000 * TERA
    assert facts.fp8_flops in (None, facts.bf16_flops, 2 * facts.bf16_flops)
    assert facts.devices_per_chip in (1, 2)
    assert "https://" in facts.source


def test_the_compiler_is_told_a_gpus_facts():
    assert CHIPS.items() <= KNOWN.items()
    for chip in KNOWN.values():
        if isinstance(chip, Gpu):
            assert f"device_memory_size: {chip.facts.hbm_bytes}\n" in chip.target
            assert f"memory_bandwidth: {chip.facts.memory_bandwidth}\n" in chip.target


@pytest.mark.parametrize("name", ["ascend_910c_384", "cpu_8"])
def test_nothing_is_compiled_where_there_is_no_compiler(name):
    with pytest.raises(LayoutError, match=f"{name}: nothing can be compiled"):
        compiled_for(machine(name))


@pytest.mark.parametrize("tiers", [(), (TWO,), (TWO, TWO), (Tier("b", 4, 1.0, 1.0), TWO)])
def test_tiers_that_do_not_rise_to_the_devices_are_refused(tiers):
    with pytest.raises(LayoutError, match="must rise to the 4 devices"):
        Machine("m", "cpu", {"ep": 4}, tiers)


def test_an_unknown_chip_is_refused_with_those_there_are():
    with pytest.raises(LayoutError, match=r"m: no chip 'abacus': there are v5p, .*ascend_910c"):
        Machine("m", "abacus", {"ep": 2}, (TWO,))


@pytest.mark.parametrize("name", NAMES)
def test_where_an_exchange_has_neighbours_in_a_node_a_row_crosses_between_nodes_once(name):
    found = machine(name)
    inside = math.prod(size for axis, size in found.axes.items() if AXES.index(axis) > AXES.index("ep"))
    two_tiers = inside < found.tiers[0].span < inside * found.axes.get("ep", 1)
    assert (found.transport == "hierarchical") == two_tiers
    if two_tiers:
        assert found.node == found.tiers[0].span // inside


@pytest.mark.parametrize(("axis", "span"), [("tp", 8), ("ep", 1024), ("fsdp", 1024), ("dp", 1024)])
def test_an_axis_is_as_slow_as_what_lies_between_its_neighbours(axis, span):
    assert machine("h200x1024").tier(axis).span == span


def test_a_torus_is_as_fast_as_the_links_through_its_middle():
    link = Link("x", 1.0, 0.5, "")
    assert link.torus(4, 4, 4) == Tier("x", 64, 2.0, 0.5)
    assert link.torus(2, 4, 4, rings=False) == Tier("x", 32, 1.0, 0.5)
    assert link.torus(4, 4, 4, per_chip=2) == Tier("x", 128, 1.0, 0.5)
    # The maker says 3.2 TB/s through the middle of v6e's pod; 128 chips send half of what they send through it.
    assert ICI.torus(16, 16).bandwidth * 128 / 2 == 3.2e12


def test_a_machine_lays_a_mesh_over_the_devices_there_are():
    layout = machine("cpu_8").layout()
    assert {axis: size for axis, size in layout.mesh.shape.items() if size > 1} == {"fsdp": 2, "ep": 2, "tp": 2}
    assert (layout.transport, layout.capacity, layout.chunks) == ("replicated", None, 1)
    with pytest.raises(LayoutError, match="= 16 devices, but there are 8"):
        machine("h200x16").layout()


@pytest.mark.aot
@pytest.mark.parametrize("name", [name for name in NAMES if machine(name).topology])
def test_its_axes_fit_its_topology(name):
    from trillion_moe import aot

    found = machine(name)
    devices = aot.devices(compiled_for(found), found.topology)
    mesh = found.layout(devices).mesh
    assert mesh.size == len(devices) == found.devices


def row(name: str) -> str:
    found = machine(name)
    axes = " x ".join(f"{axis} {size}" for axis, size in found.axes.items())
    memory = f"{found.facts.hbm_bytes * found.devices / 1e12:.1f} TB" if found.facts else ""
    return f"| {name} | {found.devices} | {found.chip} | {axes} | {memory} | {found.cloud or ''} |"


def test_the_readme_lists_the_machines():
    expected = [row(name) for name in sorted(NAMES, key=lambda n: [int(p) if p.isdigit() else p for p in split(n)])]
    assert [line for line in README.read_text().splitlines() if re.match(r"\| \w+ \| \d", line)] == expected


def test_what_a_flag_says() -> None:
    assert mesh_of("ep=4,tp=2") == {"ep": 4, "tp": 2}
    assert mesh_of("h200x16") == "h200x16"
    assert mesh_of("some=where/mine.py") == "some=where/mine.py"


def test_the_readmes_own_machine(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    layout = machine(str(tmp_path / "mine.py")).layout()
    assert (layout.size("fsdp"), layout.size("ep")) == (2, 2)
    assert layout.transport == "all_to_all"


def split(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


@pytest.mark.aot
def test_no_ragged_exchange_on_a_chip_that_cannot_compile_one():
    mesh = machine("tpu7x_64")
    there = aot.devices(compiled_for(mesh), mesh.topology)
    with pytest.raises(LayoutError, match="transport 'ragged' does not compile for TPU7x: legal are replicated"):
        dataclasses.replace(mesh, transport="ragged").layout(there)
