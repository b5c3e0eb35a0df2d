"""Layers on pipeline stages: which lie where, who works when, and that they compute what they do on one device."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.mesh_tools import EIGHT, HEADS, WITHIN, assert_as_on_one_device, problem
from tests.tiny import filled, tiny_k3

import trillion_moe as tm
from trillion_moe import sharding
from trillion_moe.layers.schedule import Schedule
from trillion_moe.layers.segments import (
    Stages,
    check_plan,
    depth_plan,
    layer_places,
    plan_for,
    staged,
    staged_plan,
    stages_of,
)
from trillion_moe.meshes.machine import MEMORY, Machine
from trillion_moe.model import Model
from trillion_moe.programs import checked
from trillion_moe.run_config import RunConfig, RunConfigError, TrainConfig
from trillion_moe.sharding import Layout, LayoutError
from trillion_moe.transforms import arrange_experts
from trillion_moe.transforms.segments import restack

K3 = Path(__file__).parent.parent / "configs" / "kimi_k3"


# --- which layer lies where ------------------------------------------------------------------------------------------


def runs_of(cfg, stages: int, virtual: int = 1) -> list[list[int]]:
    """The layers of each run, in the order in which a microbatch meets them; those before the stages first."""
    plan = staged_plan(cfg, stages, virtual)
    check_plan(cfg, plan)
    segment = staged(plan)
    assert segment is not None
    assert segment.numbers is not None
    assert (segment.stages, segment.virtual) == (stages, virtual)
    each = segment.repeats // (stages * virtual)
    runs = []
    for run, stage in itertools.product(range(virtual), range(stages)):
        at = (stage * virtual + run) * each  # as they lie: all runs of a stage together
        runs.append([n for group in segment.numbers[at : at + each] for n in group if n is not None])
    return [list(range(runs[0][0])), *runs]


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (4, 1), (2, 2), (3, 4), (8, 3)])
def test_stages_are_all_layers_of_kimi_k3_in_order(stages: int, virtual: int) -> None:
    """fault 119: 93 layers over 4 stages: in a known trainer the last three were never run, and nothing said so."""
    cfg = tm.ModelConfig.from_file(K3)
    runs = runs_of(cfg, stages, virtual)
    assert [n for run in runs for n in run] == list(range(93))
    assert all(runs[1:])
    assert runs[0] == [0]  # the dense one


def test_groups_of_kimi_k3() -> None:
    cfg = tm.ModelConfig.from_file(K3)
    segment = staged(staged_plan(cfg, 4))
    assert segment is not None
    assert segment.numbers is not None
    assert [kind.attention for kind in segment.layers] == ["kda", "kda", "mla", "kda"]
    assert segment.repeats == 24
    assert sum(n is None for group in segment.numbers for n in group) == 4  # 96 slots for 92 layers
    assert segment.numbers[-1] == (None, None, 92, None)
    with pytest.raises(
        LayoutError, match=r"pp 16 x virtual 1 = 16 stages leave one empty.*1, 2, 3, 4, 5, 6, 8, 12, 23, 24, 46"
    ):
        staged_plan(cfg, 16)


def test_stages_follow_what_is_changed_last() -> None:
    """fault 122: nothing about the stages is stored beside the mesh, so that nothing can be left over from another."""
    cfg, rows = tiny_k3(**EIGHT), 16
    for stages, virtual in ((2, 1), (4, 1), (2, 2)):
        machine = Machine("mine", "cpu", {"pp": stages}, (MEMORY.switched(stages),), virtual=virtual)
        layout = dataclasses.replace(machine, microbatches=8).layout()
        found = stages_of(plan_for(cfg, layout), layout, rows)
        assert found == Stages(stages, virtual, 8, "1f1b", (stages - 1) / (8 * virtual + stages - 1), 8, 0)
    assert stages_of(plan_for(cfg, Layout.make({"dp": 2})), Layout.make({"dp": 2}), rows) is None


def test_five_layers_over_two() -> None:
    assert runs_of(tiny_k3(), 2) == [[0], [1, 2, 3], [4]]
    assert runs_of(tiny_k3(**EIGHT), 4) == [[], [0, 1], [2, 3], [4, 5], [6, 7]]


# --- who works when --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("stages", "virtual", "microbatches"), [(2, 1, 2), (4, 1, 8), (3, 1, 6), (2, 3, 4), (4, 2, 4)])
def test_every_job_once_and_after_what_it_needs(stages: int, virtual: int, microbatches: int, late: bool) -> None:
    schedule = Schedule(stages, virtual, microbatches, late)
    times = {}
    for way, stage, tick in itertools.product(("forward", "backward"), range(stages), range(schedule.ticks)):
        job = getattr(schedule, way)(tick, stage)
        if job.live:
            place = int(job.run) * stages + stage
            assert (way, int(job.microbatch), place) not in times
            times[way, int(job.microbatch), place] = tick, int(job.index)
    assert len(times) == 2 * stages * schedule.jobs
    for stage in range(stages):  # what waits is not overwritten before it is fetched
        held = {}
        for tick in range(schedule.ticks):
            if (job := schedule.forward(tick, stage)).live:
                held[int(job.index) % schedule.kept] = int(job.index)
            if (job := schedule.backward(tick, stage)).live:
                assert held[int(job.index) % schedule.kept] == int(job.index)
    places = stages * virtual
    for m, place in itertools.product(range(microbatches), range(places)):
        (there, index), (back, same) = times["forward", m, place], times["backward", m, place]
        assert index == same  # where its rows were put is where they are looked for
        assert there <= back
        if place:
            assert there == times["forward", m, place - 1][0] + 1  # what was sent arrives in the next tick
        if place < places - 1:
            assert back == times["backward", m, place + 1][0] + 1
    assert times["backward", 0, places - 1][0] == (schedule.forward_ticks if late else places - 1)


def test_bubble() -> None:
    assert Schedule(4, 1, 8, late=False).bubble == 3 / 11
    assert Schedule(4, 2, 8, late=False).bubble == 3 / 19
    assert Schedule(4, 1, 16, late=False).kept == 7  # of GPipe all 16
    assert Schedule(4, 1, 16, late=True).kept == 16


# --- the same numbers ------------------------------------------------------------------------------------------------

SLOW = [
    ("all weights, eight", {"pp": 4}, {}),
    ("all weights, eight", {"pp": 2, "dp": 2}, {"virtual": 2}),
    ("adapters, five", {"pp": 2, "ep": 2, "tp": 2}, {"transport": "all_to_all"} | WITHIN),
    ("pictures, five", {"pp": 2, "fsdp": 2}, {"schedule": "gpipe"}),
    ("balanced, five", {"pp": 2, "cp": 2}, {}),
    ("all weights, five", {"pp": 2, "ep": 2}, {"transport": "ragged"}),
]


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("kimi linear, five", {"pp": 2, "tp": 2}, {"microbatches": 4}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_over_stages_as_on_one_device(name: str, sizes: dict[str, int], options: dict) -> None:
    """fault 121 among them: two runs of layers a stage."""
    assert_as_on_one_device(name, Layout.make(sizes, **options))


@pytest.mark.slow
def test_logits_and_evaluation_over_stages() -> None:
    """Rows of unequal lengths; one microbatch is of padding alone but for its first token."""
    model, batch, _ = problem("all weights, five")
    over = tm.place(model, Layout.make({"pp": 2, "tp": 2}))
    tokens, lengths = batch["tokens"], np.array([32, 7, 1, 32, 20, 32, 31, 16])
    segments = (np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.int32)
    logits, caches = tm.forward(over, tokens, segments=segments)
    assert caches is None
    expected, _ = tm.forward(model, tokens, segments=segments)
    np.testing.assert_allclose(np.asarray(logits)[segments > 0], np.asarray(expected)[segments > 0], atol=2e-4)
    inputs = {"tokens": tokens, "segments": segments}
    assert float(tm.loss(over, inputs)[0]) == pytest.approx(float(tm.loss(model, inputs)[0]), rel=1e-5)


# --- models that are cut ---------------------------------------------------------------------------------------------


def assert_same(a: Model, b: Model) -> None:
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


def test_restacked_and_back() -> None:
    model = filled(tiny_k3())
    there = restack(model, staged_plan(model.config, 2))
    assert len(layer_places(there.plan)) == 5
    back = restack(there, depth_plan(model.config))
    assert_same(model, back)


def test_saved_from_stages_and_loaded_onto_them(tmp_path: Path) -> None:
    """Empty slots are in no file: folders are the same byte for byte, in Orbax the plan stands beside the arrays."""
    model = tm.quantize_experts(filled(tiny_k3(**HEADS)))
    layout = Layout.make({"pp": 2, "ep": 2})
    tm.save(tmp_path / "one", model)
    over = tm.load(tmp_path / "one", mesh=layout)
    assert staged(over.plan) is not None
    tm.save(tmp_path / "over", over)
    files = sorted(f.name for f in (tmp_path / "one").iterdir())
    assert files == sorted(f.name for f in (tmp_path / "over").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "over" / name).read_bytes(), name
    tm.save(tmp_path / "orbax", over, format="orbax")
    assert json.loads((tmp_path / "orbax" / "model.json").read_text())["plan"][1]["numbers"][1] == [None, None, 4]
    for mesh in (layout, {"pp": 2}, {"ep": 2}, None):
        again = tm.load(tmp_path / "orbax", mesh=mesh)
        placed = restack(again, model.plan) if again.plan != model.plan else again
        assert_same(restack(over, model.plan), placed)


@pytest.mark.slow
def test_adapters_over_stages(tmp_path: Path) -> None:
    """Counted, exported and read back without the empty slots; adapters of some layers alone are refused."""
    cfg = tm.LoRAConfig(rank=4, targets=("attention",))
    over = tm.place(filled(tiny_k3(**HEADS)), Layout.make({"pp": 2}))
    with pytest.raises(
        ValueError, match=r"layer 4 lies on a pipeline's stages.*legal is to adapt all or none of a kind"
    ):
        tm.add_lora(over, tm.LoRAConfig(targets=("layers.3.attention.o",)), jax.random.key(0))
    adapters, base = tm.partition(tm.add_lora(over, cfg, jax.random.key(0)))
    adapted = tm.combine(jax.tree.map(lambda x: x + 0.1, adapters), base)
    tm.export_adapter(tmp_path / "adapter", adapted)
    again = tm.load_adapter(filled(tiny_k3(**HEADS)), tmp_path / "adapter")
    assert_same(again, restack(adapted, again.plan))
    onto = tm.load_adapter(over, tmp_path / "adapter")
    tokens = np.arange(4, 4 + 16, dtype=np.int32).reshape(2, 8)
    np.testing.assert_allclose(tm.forward(onto, tokens)[0], tm.forward(adapted, tokens)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"pp": 2}, {"schedule": "zigzag"}, "no schedule 'zigzag': legal are 1f1b, gpipe"),
        ({"pp": 2}, {"microbatches": 3}, "microbatches = 3: legal are multiples of pp = 2"),
        ({"dp": 2}, {"microbatches": 2}, "microbatches = 2 over pp = 1"),
        ({"dp": 2}, {"virtual": 2}, "virtual = 2 over pp = 1"),
        ({"pp": 2}, {"rules": {"stages": ()}}, "the rule of 'stages'"),
    ],
)
def test_layouts_that_are_refused(sizes: dict[str, int], options: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.make(sizes, **options)


def test_what_stages_cannot_do_is_refused() -> None:
    layout = Layout.make({"pp": 2}, microbatches=4)
    model = tm.place(filled(tiny_k3(**HEADS)), layout)
    tokens = np.full((6, 8), 5, np.int32)
    with pytest.raises(LayoutError, match=r"6 rows of 8 tokens cannot be cut into 4 microbatches.*multiples of 4 rows"):
        tm.forward(model, tokens)
    with pytest.raises(LayoutError, match="over pipeline stages there are no traces"):
        tm.trace(model, tokens[:4])
    with pytest.raises(LayoutError, match="a mesh with pp = 2 has stages, which have no caches: legal is 1"):
        tm.generate(model, [[5, 6, 7]] * 4, max_new_tokens=2)
    with pytest.raises(LayoutError, match="cut for pp 2 x virtual 1, the mesh has pp 1"):
        sharding.place(model, Layout.make({"dp": 2}))
    kept = RunConfig(model="m", data="d", lora=None, train=TrainConfig(remat=False))
    with pytest.raises(RunConfigError, match=r"train\.remat = false over pp = 2: legal is true"):
        checked(tiny_k3(**HEADS), kept, "cpu", layout)
    with pytest.raises(LayoutError, match="runs over their mesh alone"):
        tm.forward(Model(tiny_k3(), plan=staged_plan(tiny_k3(), 2)), tokens)


def test_experts_on_stages_are_not_arranged() -> None:
    model = tm.place(filled(tiny_k3(**HEADS)), Layout.make({"pp": 2}))
    with pytest.raises(ValueError, match="lies on pipeline stages, which do not generate: legal is a mesh with pp = 1"):
        arrange_experts(model, np.tile(np.arange(8), (4, 1)))


def test_layers_that_are_not_alike_are_not_stacked() -> None:
    model = filled(tiny_k3(**HEADS))
    adapted = tm.add_lora(model, tm.LoRAConfig(targets=("layers.3.attention.o",)), jax.random.key(0))
    with pytest.raises(ValueError, match="not alike, as some have adapters"):
        tm.place(adapted, Layout.make({"pp": 2}))
