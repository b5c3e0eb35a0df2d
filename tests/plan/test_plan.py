"""A small model's whole training step, compiled for machines that are not here."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tests.tiny import KDA, MLA, MOE, SIX, tiny_k3

from trillion_moe.cli import main
from trillion_moe.meshes.machine import machine
from trillion_moe.plan.collectives import collectives
from trillion_moe.sharding import Layout

MODEL = {
    "vocab_size": 320,
    "quantization": "mxfp4",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "kda": dataclasses.replace(KDA, num_heads=4, head_dim=16, a_log_shape=None),
    # Widths are powers of two: a GPU's compiler finds no tiles for a narrow product of 96 rows.
    "mla": dataclasses.replace(MLA, num_heads=16, qk_nope_head_dim=12, v_head_dim=4),
    "moe": dataclasses.replace(MOE, num_experts=512, top_k=4, latent_size=128, hidden_size=128),
}
PROOF = Path(__file__).parents[2] / "docs" / "proof"
SETTINGS = ["--set", "examples.max_length=256", "--compile"]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_k3(**SIX, **MODEL).to_json()))
    return ["plan", "--config", "kimi_k3_lora", "--set", f"model={tmp_path}", *SETTINGS]


@pytest.mark.aot
@pytest.mark.parametrize(("name", "rows"), [("h200x16", 16), ("v5p_32", 64)])
def test_figures_of_a_step(settings, tmp_path, capsys, name: str, rows: int) -> None:
    file = tmp_path / "plan.json"
    assert main([*settings, "--mesh", name, "--json", str(file)]) == 0
    plan = json.loads(file.read_text())
    step = plan["compiled"]
    assert (step["rows"], step["tokens"]) == (rows, 256)
    assert plan["hbm_bytes"] == machine(name).facts.hbm_bytes
    assert 0 < step["argument_bytes"] < step["peak_bytes"]
    assert step["host_bytes"] == 0
    assert step["pipeline"]["bubble"] == 0.2
    (exchange,) = [row for row in step["collectives"] if row["kind"] == "ragged-all-to-all"]
    assert exchange["axes"] == "ep"
    assert exchange["bytes"] > 0
    # All but the first and last of a layer's chunks are underway while experts work: 8 of 9 each way. (v5p_32 at K3's
    # widths: 60 %, half of the rows that come back are asked for after the last product, see docs/decisions/0009.)
    assert exchange["asynchronous"] >= 0.95 * exchange["count"]
    assert exchange["overlapped"] >= 0.85 * exchange["count"]
    if name == "v5p_32":  # what products wait for is not made once more for their gradients
        assert exchange["count"] == 1296
    assert no_bank_is_gathered(step, parts(name) * 512 * 128 * 128 // 2)
    assert "ragged-all-to-all" in capsys.readouterr().out


@pytest.mark.aot
def test_devices_that_are_not_here_come_without_a_word() -> None:
    code = "from trillion_moe import aot; from trillion_moe.meshes.chips import CHIPS; aot.devices(CHIPS['v5p'])"
    asked = {"JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"}
    environment = {name: value for name, value in os.environ.items() if name not in asked}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stderr == ""


@pytest.mark.aot
def test_what_a_tpu_cannot_hold_is_refused_in_a_sentence(settings, capsys) -> None:
    big = ["--set", "train.batch_size=64000", "--set", "examples.max_length=16384"]
    assert main([*settings, "--mesh", "v5p_32", *big]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("compiling ")
    assert said[1].startswith("trillion-moe plan: the compiler of v5p_32 refuses this step: ")


@pytest.mark.parametrize("name", ["h200x16", "v5p_32"])
def test_figures_of_kimi_k3(name: str) -> None:
    """Those of `make proof`: it fits, and no bank of experts is gathered."""
    plan = json.loads((PROOF / f"plan_{name}.json").read_text())
    assert plan["hbm_bytes"] == machine(name).facts.hbm_bytes
    assert plan["compiled"]["tokens"] == 4096
    assert plan["compiled"]["peak_bytes"] <= 0.9 * plan["hbm_bytes"]
    assert no_bank_is_gathered(plan["compiled"], parts(name) * 896 * 3584 * 3072 // 2)


def parts(name: str) -> float:
    """The least share of a bank that a gather over one axis could give: on h200x16 tp cuts experts inside, and a gather
    over it gives the experts of one device of ep."""
    return {"h200x16": 1 / 4, "v5p_32": 1}[name]


def no_bank_is_gathered(step, least: float) -> bool:
    """least: bytes, of one packed matrix of a layer's experts as far as it could be gathered."""
    return max(row["largest"] for row in step["collectives"] if row["kind"] == "all-gather") < least


@pytest.mark.parametrize(
    ("sizes", "axes", "kept", "share"),
    [
        ({"ep": 8}, "ep", (None, None, None), 1),
        ({"ep": 4, "tp": 2}, "tp", ("expert", None, None), 1 / 4),
        ({"ep": 4, "tp": 2}, "ep", (None, None, "expert_mlp"), 1 / 2),
    ],
)
def test_a_gathered_bank_would_be_seen(sizes, axes: str, kept, share: float) -> None:
    layout = Layout.make(sizes, rules={"expert_mlp": ("tp",)})
    bank = jax.ShapeDtypeStruct((64, 128, 64), jnp.uint8, sharding=layout.sharding("expert", None, "expert_mlp"))
    program = jax.jit(lambda bank: layout.pin(bank, *kept)).lower(bank).compile()
    (found,) = collectives([program.as_text() or ""], layout.mesh)
    assert (found.kind, found.axes, found.largest) == ("all-gather", axes, share * 64 * 128 * 128 // 2)
    assert not no_bank_is_gathered({"collectives": [dataclasses.asdict(found)]}, share * 64 * 128 * 128 // 2)


def test_errors(settings, tmp_path, capsys) -> None:
    assert main([*settings, "--mesh", "h200x15"]) == 1
    assert "no machine 'h200x15': legal are FILE.py and" in capsys.readouterr().err
    assert main([*settings, "--mesh", "ascend_910c_384"]) == 1
    assert "nothing can be compiled ahead of time for ascend_910c" in capsys.readouterr().err
    (tmp_path / "there.json").write_text("{}")
    assert main([*settings, "--mesh", "h200x16", "--json", str(tmp_path / "there.json")]) == 1
    assert "is there and is no report, only a report is replaced" in capsys.readouterr().err
    assert main([*settings, "--mesh", "h200x16", "--json", str(tmp_path / ("n" * 300))]) == 1  # seen before it compiles
    assert "cannot be written: File name too long" in capsys.readouterr().err
    assert main([*settings, "--mesh", "h200x16", "--set", 'mesh={"ep": 2}']) == 1
    assert "mesh = {'ep': 2}, but what is planned for is --mesh h200x16: legal is null" in capsys.readouterr().err
    assert main([*settings, "--mesh", "h200x16", "--set", "model="]) == 1
    assert "the configuration does not say model: give --set model=FOLDER" in capsys.readouterr().err
    assert main([*settings, "--mesh", "h200x16", "--set", "train.accumulate=4"]) == 1
    assert "train.accumulate = 4, train.dropout = 0.0: legal are 1 and 0" in capsys.readouterr().err
    assert main([*settings, "--mesh", "h200x16", "--set", "lora=null"]) == 1
    assert "are packed: train adapters (lora), or decode them first" in capsys.readouterr().err
