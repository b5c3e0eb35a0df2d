"""Models loaded over a mesh: the arrays of one device, and of the files no more than the devices of a process have."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tests.mesh_tools import HEADS, VISION
from tests.tiny import MOE, tiny_k3

import trillion_moe as tm
from trillion_moe import checkpoint
from trillion_moe.checkpoint import fill
from trillion_moe.checkpoint.safetensors_io import Reader
from trillion_moe.layers.segments import plan_for, staged
from trillion_moe.model import Model
from trillion_moe.sharding import Layout, shardings
from trillion_moe.transforms import quantize_experts

INSIDE = {"expert_mlp": ("tp",)}
MESHES = [
    ({"fsdp": 2, "ep": 4}, {}),  # matrices cut along the columns of their files
    ({"pp": 2, "ep": 2, "tp": 2}, INSIDE),  # and along rows
    ({"dp": 4, "tp": 2}, INSIDE),  # and four times the same
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Kimi K3 with a vision tower and packed experts."""
    folder = tmp_path_factory.mktemp("parts") / "tiny"
    cfg = tiny_k3(**HEADS, vision=VISION, moe=dataclasses.replace(MOE, hidden_size=64))
    random = np.random.default_rng(0)
    model = jax.tree.map(lambda spec: random.normal(size=spec.shape).astype(spec.dtype), Model(cfg))
    tm.save(folder, quantize_experts(jax.tree.map(jax.numpy.asarray, model)))
    return folder


@pytest.fixture
def bytes_read(monkeypatch) -> Counter:
    """How often each tensor of the folder's file has been read so far, in bytes, by where it starts in the file."""
    found, into = Counter(), Reader.into

    def counted(self, file, start, out):
        found[start] += out.nbytes
        return into(self, file, start, out)

    monkeypatch.setattr(Reader, "into", counted)
    return found


def load(folder: Path, sizes=None, rules=None, *, decode=False, dtype=None, packed="nk") -> Model:
    """`tm.load` with the packed layout of any back end."""
    stored = checkpoint.read_config(folder)
    layout = None if sizes is None else Layout.make(sizes, rules=rules or {})
    cfg = dataclasses.replace(stored, quantization=None) if decode else stored
    model = Model(cfg, dtype=dtype, plan=plan_for(cfg, layout))
    model = model if decode else quantize_experts(model, layout=packed)
    model.layout = layout
    return checkpoint.load_into(model, folder, stored, keep_dtypes=dtype is None)


def expected(folder: Path, model: Model, **options) -> Model:
    """What the model must hold, loaded whole under its own depth plan."""
    stored, over = checkpoint.read_config(folder), model.layout
    blueprint = Model(model.config, dtype=options.get("dtype"), plan=model.plan)
    if not options.get("decode"):
        blueprint = quantize_experts(blueprint, layout=options.get("packed", "nk"))
    whole = checkpoint.load_into(blueprint, folder, stored, keep_dtypes=options.get("dtype") is None)
    whole.layout = over
    return whole


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MESHES[0], {"packed": "kn"}),
        (MESHES[1], {}),
        (MESHES[1], {"packed": "kn"}),
        (MESHES[1], {"decode": True, "dtype": "bfloat16"}),
        (MESHES[2], {"decode": True}),
    ],
)
def test_as_on_one_device_and_nothing_read_twice(folder: Path, bytes_read: Counter, mesh, options) -> None:
    model = load(folder, *mesh, **options)
    assert model.layout is not None
    over = bytes_read.total()
    bytes_read.clear()
    whole = expected(folder, model, **options)
    assert over == bytes_read.total()
    where = jax.tree.leaves(shardings(model, model.layout))
    for one, was, at in zip(jax.tree.leaves(model), jax.tree.leaves(whole), where, strict=True):
        assert (one.dtype, one.sharding) == (was.dtype, at)
        np.testing.assert_array_equal(one, was)


@pytest.mark.parametrize(
    ("devices", "experts", "rows"),
    [
        (np.s_[0, 0, 0, 0, 0, :], range(4), 1.0),  # two that share the inside of experts
        (np.s_[1, 0, 0, 1, 0, 1], range(4, 8), 0.5),  # one
    ],
)
def test_a_process_reads_what_its_devices_have(folder, bytes_read, monkeypatch, devices, experts, rows) -> None:
    """Of the experts of its stage those that it has: of gate and up the rows, of down, cut along its columns, all; and
    their scales once more, in search of damage."""
    layout = Layout.make(MESHES[1][0], rules=INSIDE)
    mine = set(np.ravel(layout.mesh.devices[devices]).tolist())
    read = []

    def of_mine(sharding, shape):
        return {device: at for device, at in sharding.devices_indices_map(shape).items() if device in mine}

    def keep(shape, dtype, where, parts):
        read.append(parts)
        return jax.numpy.zeros(shape, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(NamedSharding, "addressable_devices_indices_map", of_mine)
        patch.setattr(fill, "assemble", keep)
        model = load(folder, *MESHES[1])
    tensors = spans(folder)
    got = Counter()
    for start, nbytes in bytes_read.items():
        got[next(name for name, span in tensors.items() if start in span)] += nbytes
    layers = layers_of(model, layout, mine)
    for name, span in tensors.items():
        if match := re.search(r"layers\.(\d+)\..*experts\.(\d+)\.(w\d)\.weight_(\w+)", name):
            layer, e, which, part = match.groups()
            share = (1.0 if which == "w2" else rows) + (part == "scale")
            due = len(span) * share if int(layer) in layers and int(e) in experts else 0
            assert got[name] == due, name
    assert 0 < len(layers) < 4
    for parts, was in zip(read, jax.tree.leaves(expected(folder, model)), strict=True):
        assert len(parts) in (1, len(mine))
        for box, part in parts.items():
            np.testing.assert_array_equal(part, np.asarray(was)[tuple(slice(*side) for side in box)])


def layers_of(model: Model, layout: Layout, devices: set) -> set[int]:
    """Which layers lie on the stage of these devices."""
    segment = staged(model.plan)
    assert segment is not None
    assert segment.numbers is not None
    (stage,) = {int(np.argwhere(layout.mesh.devices == device)[0, 0]) for device in devices}
    each = segment.repeats // layout.size("pp")
    groups = segment.numbers[stage * each : (stage + 1) * each]
    return {n for group in groups for n in group if n is not None}


def spans(folder: Path) -> dict[str, range]:
    """Where in its file every tensor lies."""
    data = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:begin])
    table.pop("__metadata__", None)
    return {name: range(*(begin + at for at in entry["data_offsets"])) for name, entry in table.items()}
