"""The proof of all combinations misses none, and says when one is wrong. What it computes is not computed here."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tests import mesh_tools, prove_meshes, test_pipeline, test_sharding
from tests.mesh_tools import GRADIENT_BAR, LOSS_BAR, Found
from tests.prove_meshes import FEATURES, MESHES, REFUSED, features_of, label, main

from trillion_moe.sharding import AXES, Layout, LayoutError

TWO_MESHES = ["--mesh", "dp2", "--mesh", "pp2 ep2", "--feature", "all weights", "--feature", "adapters"]


@pytest.fixture
def wrong(monkeypatch) -> dict[str, object]:
    """In place of models: what a mesh finds of them, by problem; without an entry what one device does. Expected
    refusals are made."""
    found: dict[str, object] = {}

    def gradients(name, layout, passes):
        assert passes == 2
        sizes = {axis: size for axis, size in layout.mesh.shape.items() if size > 1}
        if (name, label(sizes)) in REFUSED:
            raise LayoutError(
                "layers.1.ffn.experts.up.scale has 2 along 'expert_mlp', not a multiple of 4 (tp); legal are 1, 2"
            )
        match found.get(name):
            case Exception() as error:
                raise error
            case float() as gradient:
                return of(layout, gradient)
        return of(layout)

    def of(layout, gradient=2.0):
        sums = {"tokens": 7, "dropped": 0} | ({} if layout is None or layout.size("ep") == 1 else {"exchange": {}})
        return Found(3.0, sums, {"embed": np.array([1.0, 4.0]), "norm": np.array([1.0, gradient])})

    monkeypatch.setattr(prove_meshes, "_forget", lambda: None)
    monkeypatch.setattr(mesh_tools, "gradients", gradients)
    monkeypatch.setattr(mesh_tools, "one_device", lambda name, passes: of(None))
    return found


def test_every_mesh_and_feature_is_there() -> None:
    """Every choice of one, two and three axes, every feature, and what the tests of models over meshes have."""
    chosen = {frozenset(sizes) for sizes, _ in MESHES}
    assert chosen == {frozenset(axes) for n in (1, 2, 3) for axes in itertools.combinations(AXES, n)}
    assert len(MESHES) >= 24
    within = [sizes for sizes, options in MESHES if "rules" in options]
    assert {"ep": 4, "tp": 2} in within
    assert {"pp": 2, "ep": 2, "tp": 2} in within
    cases = [*test_sharding.QUICK, *test_sharding.SLOW, *test_pipeline.SLOW]
    assert {label(sizes) for _, sizes, _ in cases} <= {label(sizes) for sizes, _ in MESHES}
    assert {name.partition(",")[0] for name, *_ in cases} <= set(FEATURES)
    assert {features_of(sizes) for sizes, _ in MESHES if "pp" not in sizes} == {FEATURES}
    assert all(set(FEATURES) - set(features_of(sizes)) <= {"nothing recomputed"} for sizes, _ in MESHES)
    for transport in ("all_to_all", "ragged", "hierarchical", None):
        assert any(options.get("transport") == transport and "ep" in sizes for sizes, options in MESHES)


def test_all_is_written(wrong, tmp_path: Path) -> None:
    path = tmp_path / "meshes.json"
    assert main(["--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert len(report["rows"]) == sum(len(features_of(sizes)) for sizes, _ in MESHES)
    assert sum("refused" in row for row in report["rows"]) == len(REFUSED)
    assert report["stamp"]["count"] == 8
    wrong["pictures, deep"] = float("nan")
    assert main(["--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [row["mesh"] for row in rows if "error" in row] == [label(sizes) for sizes, _ in MESHES if "pp" in sizes]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (2 + 1e-8, "FAILED: differs from one device  loss 0e+00, 4e-09 of norm"),
        (float("inf"), "FAILED: differs from one device  loss 0e+00, inf of norm"),
        (LayoutError("it has 3"), "FAILED: it has 3"),
        (RuntimeError("lost"), "FAILED: RuntimeError: lost"),
    ],
)
def test_what_is_wrong_fails_and_the_others_are_tried(wrong, found, says: str, capsys) -> None:
    assert main(TWO_MESHES) == 0
    wrong["all weights"] = found
    capsys.readouterr()
    assert main(TWO_MESHES) == 1
    lines = capsys.readouterr().out.splitlines()
    assert says in lines[0]
    assert ["FAILED" in line for line in lines[1:]] == [False] * 4
    assert lines[-1].startswith("4 combinations: 1 failed, 0 refused as meant")


def test_what_was_to_be_refused_and_is_not_fails(wrong, monkeypatch, capsys) -> None:
    monkeypatch.setitem(prove_meshes.REFUSED, ("adapters", "tp4"), "something else")
    assert main(["--mesh", "tp4", "--feature", "adapters"]) == 1  # refused in other words
    monkeypatch.setattr(mesh_tools, "gradients", lambda name, layout, passes: mesh_tools.one_device(name, passes))
    assert main(["--mesh", "tp4", "--feature", "adapters"]) == 1
    assert "FAILED: was to be refused: something else" in capsys.readouterr().out


def test_a_part_is_no_proof(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--json", str(tmp_path / "x.json"), "--mesh", "dp2"])
    assert "--json is of all combinations" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--json", str(tmp_path / "none" / "x.json")])


def test_counts_that_differ_are_an_error() -> None:
    one = Found(3.0, {"tokens": 7, "dropped": 0}, {"norm": np.ones(2)})
    for changed in ({"tokens": 8}, {"dropped": 1}, {"exchange": {}}):
        with pytest.raises(AssertionError):
            mesh_tools.differences(dataclasses.replace(one, sums=one.sums | changed), one, Layout.make({"dp": 2}))
    with pytest.raises(AssertionError):
        mesh_tools.differences(dataclasses.replace(one, grads={}), one, Layout.make({"dp": 2}))


def test_what_is_committed_is_of_all_of_them() -> None:
    report = json.loads((Path(__file__).parents[1] / "docs" / "proof" / "meshes.json").read_text())
    expected = [(label(sizes), feature) for sizes, _ in MESHES for feature in features_of(sizes)]
    assert [(row["mesh"], row["feature"]) for row in report["rows"]] == expected
    assert report["failed"] == 0
    for row in report["rows"]:
        refused = (row["feature"], row["mesh"]) in REFUSED
        assert ("refused" in row) == refused
        assert refused or (row["loss"] <= LOSS_BAR and row["gradient"] <= GRADIENT_BAR)
