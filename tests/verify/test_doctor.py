"""`trillion-moe doctor`: what it says of versions, devices and what is missing."""

import json
import os
from importlib import metadata

import jax
import pytest

from trillion_moe.cli import main
from trillion_moe.verify import doctor
from trillion_moe.verify.doctor import Version, missing, release, versions


def test_table(capsys) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        assert f"{name:20} {metadata.version(name):14}" in out
    assert "device 0: cpu (cpu)" in out
    assert "back end: cpu" in out


def test_json(capsys) -> None:
    assert main(["doctor", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about.keys() == {"trillion-moe", "python", "versions", "devices", "backend", "plugins", "missing"}
    assert len(about["devices"]) == jax.device_count()
    found = {row["name"]: row for row in about["versions"]}
    assert found["jax"] | {"tested": "?"} == {
        "name": "jax", "installed": jax.__version__, "tested": "?", "how": ">=", "extra": None, "verdict": "ok",
    }  # fmt: skip


REQUIREMENTS = [
    "jax>=99.1",
    "numpy>=1.0; python_version >= '3.11'",
    "no-such-thing[more]>=2.4",
    'torch==0.1; extra == "parity"',
    'peft>=0.1; extra == "parity"',
    'ruff==0.17.6; extra == "dev"',
]


def test_versions_beside_what_is_required(monkeypatch) -> None:
    held = {"jax": "0.10.2", "numpy": "2.4.6", "torch": "2.13.0+cpu", "jaxlib": "0.10.2"}
    monkeypatch.setattr(doctor, "_installed", held.get)
    found = {v.name: (v.verdict, v.wrong) for v in versions(REQUIREMENTS)}
    assert found == {
        "jax": ("too old", True),
        "jaxlib": ("ok", False),
        "numpy": ("ok", False),
        "no-such-thing": ("missing", True),
        "torch": ("not the tested one", False),
        "peft": ("missing", False),
    }


@pytest.mark.parametrize("requirement", ["jax>=99.1", "no-such-thing"])
def test_what_is_required_decides_the_exit_code(monkeypatch, capsys, requirement) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: [requirement])
    assert main(["doctor"]) == 1
    name = requirement.split(">")[0]
    assert f"missing: {name} is " in capsys.readouterr().out


def test_what_is_missing_for_what(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    cpu = {"id": 0, "platform": "cpu", "kind": "cpu", "memory": None}
    held = [Version("peft", None, "0.21.2", "==", "parity"), Version("jax", "0.9", "0.10", ">=", None)]
    assert missing(held, [cpu], {"libtpu": "1"}) == [
        "jax is 0.9, too old (tested: >=0.10): pip install -e . in a clone",
        "no GPU plugin, for GPUs only: pip install -e '.[cuda13]' in a clone",
        "an NVIDIA driver is here, but JAX runs on cpu",
        "comparisons with other software need peft missing (tested: ==0.21.2): pip install -e '.[parity]' in a clone",
    ]
    gpu = cpu | {"platform": "gpu"}
    assert missing([], [gpu], {"libtpu": "1", "jax-cuda13-plugin": "1"}) == []
    assert missing([], [], {"libtpu": "1", "jax-cuda13-plugin": "1"}) == ["JAX finds no device"]


def test_a_back_end_that_does_not_start_is_told(monkeypatch, capsys) -> None:
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "back end: Unable to initialize backend 'cuda'" in out
    assert "missing: JAX finds no device" in out


def test_a_platform_without_a_plugin_is_told(monkeypatch, capsys) -> None:
    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    assert main(["doctor"]) == 1
    assert f"back end: JAX has no plugin for JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "parts"),
    [("1.20.3rc1+cu1", (1, 20, 3)), ("0.10.2.dev1", (0, 10, 2)), ("2.0", (2,)), ("odd", ())],
)
def test_release(version, parts) -> None:
    assert release(version) == parts
