"""A run over a mesh: the updates of one device, and it goes on over another mesh."""

import dataclasses
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.train.test_trainer import arrays, at, lines, stop

import trillion_moe as tm
from trillion_moe.blueprint import init
from trillion_moe.model import Model
from trillion_moe.sharding import shardings
from trillion_moe.transforms.segments import restack

RUN = {"train": {"steps": 4, "eval_every": 2, "save_every": 2}, "seed": 3}


def over(adapted, sizes):
    return tm.place(adapted, tm.Layout.make(sizes, transport="ragged"))


@pytest.mark.slow
def test_a_run_goes_on_over_another_mesh(trainer, adapted, config, rows, tmp_path, monkeypatch) -> None:
    """Two updates over experts and sequence, stopped, two more over another mesh: as on one device throughout."""
    one = config(**RUN, output=str(tmp_path / "one"))
    held_out = rows(3, first=10)
    expected = trainer(one, held_out=held_out).run(quiet=True)
    cut = config(**RUN, output=str(tmp_path / "cut"), mesh={"ep": 2, "cp": 2})
    with monkeypatch.context() as patch:
        at(2, stop(), patch)
        first = trainer(cut, held_out=held_out, model=over(adapted, cut.mesh)).run(quiet=True)
    assert (first.signal, first.step) == (signal.SIGTERM, 2)
    again = dataclasses.replace(cut, mesh={"fsdp": 2, "cp": 4})
    model = over(adapted, again.mesh)
    trained = trainer(again, held_out=held_out, model=model)
    assert trained.step == 2
    moments = trained.opt_state[1][0]
    for part in (moments.mu, moments.nu):
        for moment, parameter in zip(*map(jax.tree.leaves, (part, trained.trainable)), strict=True):
            assert moment.sharding.is_equivalent_to(parameter.sharding, moment.ndim)
    result = trained.run(quiet=True)
    for line, was in zip(lines(cut), lines(one), strict=True):
        assert line.keys() == was.keys()
        for name, value in was.items():
            np.testing.assert_allclose(line[name], value, rtol=1e-4) if name != "kind" else None
    for array, where in zip(*map(jax.tree.leaves, (result.model, shardings(result.model, model.layout))), strict=True):
        assert array.sharding.is_equivalent_to(where, array.ndim)
    for name, array in arrays(expected.model).items():
        np.testing.assert_allclose(arrays(result.model)[name], array, rtol=2e-3, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_run_goes_on_over_other_stages(trainer, adapted, config, tmp_path, monkeypatch) -> None:
    """Two updates over pipeline stages, two more without any: layers and moments are stacked otherwise on the way."""
    deep = {"num_layers": 4, "attention": ("mla",) * 4, "mlp": ("dense", "moe", "moe", "moe")}
    plain = init(Model(dataclasses.replace(adapted.config, **deep)), jax.random.key(0))
    model = tm.add_lora(plain, tm.LoRAConfig(rank=4), jax.random.key(1))
    undropped = RUN | {"train": RUN["train"] | {"dropout": 0.0}}  # what is dropped is drawn by stack
    one = config(**undropped, output=str(tmp_path / "one"))
    expected = trainer(one, model=model).run(quiet=True)
    cut = config(**undropped, output=str(tmp_path / "cut"), mesh={"pp": 2})
    with monkeypatch.context() as patch:
        at(2, stop(), patch)
        stopped = trainer(cut, model=over(model, cut.mesh)).run(quiet=True).model
    again = dataclasses.replace(cut, mesh={"ep": 2})
    trained = trainer(again, model=over(model, again.mesh))
    assert trained.step == 2
    result = trained.run(quiet=True)
    for line, was in zip(lines(cut), lines(one), strict=True):
        np.testing.assert_allclose(line["loss"], was["loss"], rtol=1e-4)
    for name, array in arrays(expected.model).items():
        difference = np.linalg.norm(arrays(result.model)[name] - array)
        assert difference <= 1e-3 * np.linalg.norm(array), name
    trained.best_step = 2  # the best update is one that ran over stages
    best = trained._best()
    assert best.step == 2
    for name, array in arrays(restack(stopped, best.model.plan)).items():
        np.testing.assert_array_equal(arrays(best.model)[name], array, err_msg=name)


def test_a_batch_that_no_mesh_can_cut(trainer, adapted, config) -> None:
    with pytest.raises(tm.LayoutError, match=r"2 rows cannot be cut over fsdp 4: .* multiples of 4"):
        trainer(config(), model=over(adapted, {"fsdp": 4}))


def test_evaluation_is_checked_before_the_first_update(trainer, adapted, config, rows, monkeypatch) -> None:
    """fault 125: batches of held-out rows, which are longer here, with those of training."""
    checked = []
    monkeypatch.setattr(
        "trillion_moe.train.trainer.check_batch", lambda layout, rows, tokens, least: checked.append((rows, tokens))
    )
    long = [{"prompt": "a" * 90 + "=", "completion": "b"}]
    started = trainer(config(train={"batch_size": 4}), held_out=long, model=over(adapted, {"fsdp": 4}))
    assert started.step == 0
    assert {*checked} == {(4, 64), (4, 128)}


def test_a_run_says_what_its_capacity_drops(trainer, adapted, config, rows) -> None:
    layout = tm.Layout.make({"ep": 2}, transport="all_to_all", capacity=0.02)  # of 64 tokens
    run = config(train={"steps": 1, "eval_every": 1})
    trainer(run, held_out=rows(3, first=10), model=tm.place(adapted, layout)).run(quiet=True)
    assert [line["kind"] for line in lines(run)] == ["train", "eval"]
    assert all(line["dropped_assignments"] > 0 for line in lines(run))


@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_loaded_over_a_mesh(folder, tmp_path: Path, form: str) -> None:
    """The same bytes, each device with its part; what is saved from a mesh is what was loaded."""
    model, path = tm.load(folder), tmp_path / "one"
    tm.save(path, model, format=form)
    cut = tm.load(path, mesh={"ep": 4, "fsdp": 2})
    assert cut.layout == tm.Layout.make({"ep": 4, "fsdp": 2})
    for array, where in zip(jax.tree.leaves(cut), jax.tree.leaves(shardings(cut, cut.layout)), strict=True):
        assert array.sharding == where
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(cut), jax.tree.leaves(model))
    tm.save(tmp_path / "two", cut, format=form)
    again = tm.load(tmp_path / "two")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(model))


def test_adapters_over_a_mesh(folder, tmp_path: Path) -> None:
    """Drawn alike, put where their matrices are, exported and loaded again."""
    lora = tm.LoRAConfig(rank=2, targets=("attention", "routed_experts"), routed="independent")
    one = tm.add_lora(tm.load(folder), lora, jax.random.key(1))
    cut = tm.add_lora(tm.load(folder, mesh={"ep": 2, "cp": 2}), lora, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(cut), jax.tree.leaves(one))
    for array, where in zip(jax.tree.leaves(cut), jax.tree.leaves(shardings(cut, cut.layout)), strict=True):
        assert array.sharding.is_equivalent_to(where, array.ndim)
    stirred = jax.tree.map(lambda x: x + 1 if 2 in x.shape[-2:] else x, cut)
    tm.export_adapter(tmp_path / "adapter", stirred)
    loaded = tm.load_adapter(tm.load(folder, mesh={"ep": 2, "cp": 2}), tmp_path / "adapter")
    for found, was in zip(jax.tree.leaves(loaded), jax.tree.leaves(stirred), strict=True):
        np.testing.assert_array_equal(found, was)
        assert found.sharding.is_equivalent_to(was.sharding, was.ndim)


def test_answers_over_a_mesh(folder) -> None:
    """Prompts of unequal lengths: the same tokens as on one device."""
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    expected = tm.generate(tm.load(folder), prompts, max_new_tokens=6)
    for sizes in ({"ep": 2}, {"dp": 2}):
        found = tm.generate(tm.load(folder, mesh=sizes), prompts, max_new_tokens=6)
        assert [c.ids for c in found] == [c.ids for c in expected]


def test_meshes_that_are_not_there(folder, tmp_path: Path) -> None:
    with pytest.raises(tm.LayoutError, match=r"no machine 'h300x8': legal are FILE\.py and .*h200x16"):
        tm.load(folder, mesh="h300x8")
    with pytest.raises(tm.LayoutError, match="= 16 devices, but there are 8"):
        tm.load(folder, mesh="h200x16")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from trillion_moe.meshes.machine import MEMORY, Machine\n"
        'MESH = Machine("mine", "cpu", {"ep": 4}, (MEMORY.switched(4),), transport="ragged")\n'
    )
    assert tm.load(folder, mesh=str(mine)).layout == tm.Layout.make({"ep": 4}, transport="ragged")
    mine.write_text("raise SystemExit(0)\n")
    with pytest.raises(tm.LayoutError, match=r"mine\.py: SystemExit: 0"):
        tm.load(folder, mesh=str(mine))
    mine.write_text("MESH = 3\n")
    with pytest.raises(tm.LayoutError, match=r"mine\.py must define MESH = Machine\(\.\.\.\), not int"):
        tm.load(folder, mesh=str(mine))
    with pytest.raises(tm.LayoutError, match=r"517 along 'vocab', not a multiple of 2 \(tp\); legal are 1, 11,"):
        tm.load(folder, mesh={"tp": 2})
