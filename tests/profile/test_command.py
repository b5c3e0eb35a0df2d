"""`trillion-moe profile`: what it prints and writes, a step that is really trained, and flags that are not legal."""

import argparse
import dataclasses
import itertools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.mesh_tools import FOUR
from tests.tiny import MLA, MOE, tiny_k3

import trillion_moe as tm
from trillion_moe.blueprint import abstract
from trillion_moe.cli import main
from trillion_moe.config import ModelConfig
from trillion_moe.distributed import Place, Processes, ProcessesError
from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model
from trillion_moe.profile import step, timing
from trillion_moe.profile.command import KEY, run
from trillion_moe.stamp import Stamp

ONE = {
    "num_layers": 1, "attention": ("mla",), "mlp": ("moe",), "kda": None, "vocab_size": 320, "quantization": "mxfp4",
    "mla": dataclasses.replace(MLA, num_heads=4),
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """A folder with a config alone: no weights are read."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_k3(**ONE).to_json()))
    return tmp_path / "model"


@pytest.fixture
def of_step(model):
    changes = {"model": str(model), "examples.max_length": 16, "lora.targets": '["layers.0.attention.o"]'}
    changes |= {"train.accumulate": 2, "train.dropout": 0.25, "train.remat": "false"}
    return ["--config", "kimi_k3_lora", *(x for k, v in changes.items() for x in ("--set", f"{k}={v}"))]


def test_collectives_of_a_machine(tmp_path, capsys) -> None:
    """By name: beside what its file says."""
    out = tmp_path / "found.json"
    assert main(["profile", "--mesh", "cpu_8", "--sizes", "1024", "--repeats", "3", "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"{out}\n"
    lines = printed.out.splitlines()
    assert lines[0] == "on 8 x cpu (cpu)"
    assert lines[1].startswith("a call that sends nothing: ")
    assert lines[-1].startswith("tp by cpu_8: memory, 10 GB/s, 1.0 us; a message of 1,024 bytes takes ")
    assert sum(line.startswith("all_to_all ") for line in lines) == 3
    assert any(line.startswith("ragged_all_to_all  not here: UNIMPLEMENTED: ") for line in lines)
    data = json.loads(out.read_text())
    assert next(iter(data)) == KEY
    assert data["stamp"] == dataclasses.asdict(Stamp.here())
    assert (data["mesh"], data["axes"]) == ("cpu_8", {"fsdp": 2, "ep": 2, "tp": 2})
    assert data["facts"]["ep"] == {"name": "memory", "span": 8, "bandwidth": 10e9, "latency": 1e-6}
    assert {(row["collective"], row["axis"]) for row in data["collectives"]} == {
        (name, axis)
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute")
        for axis in ("fsdp", "ep", "tp")
    }
    for row in data["collectives"]:
        assert row["seconds"]["calls"] == 3
        assert 0 < row["seconds"]["p50"] <= row["seconds"]["p95"] <= row["seconds"]["p99"] <= row["seconds"]["max"]
        assert row["of_fact"] == pytest.approx(row["bus_bandwidth"] / 10e9)
        if row["collective"] == "ppermute":
            seconds = row["seconds"]["p50"]
            expected = {"bytes": 1024, "seconds": seconds, "of_fact": pytest.approx(seconds / 1e-6)}
            assert data["latencies"][row["axis"]] == expected
    assert [row["collective"] for row in data["unavailable"]] == ["ragged_all_to_all"]
    assert data["step"] is None


def test_a_step(of_step, tmp_path, monkeypatch, capsys) -> None:
    """Of the configuration, over sizes of axes: experts that are packed, two passes, adapters with dropout. Every call
    that is timed is one more update, from the arrays that the last one left."""
    out, losses, adapters, made = tmp_path / "found.json", [], [], step._update

    def seen(*args):
        run, texts, flops = made(*args)

        def again():
            trained, metrics = run()
            adapters.append([np.asarray(a) for a in jax.tree.leaves(trained)])
            losses.append(float(metrics["loss"]))
            assert metrics["tokens"] == 2 * 2 * 15
            return trained, metrics

        assert len(texts) == 3
        return again, texts, flops

    monkeypatch.setattr(step, "_update", seen)
    flags = ["--mesh", "ep=2", "--sizes", "64", "--repeats", "2", "--json", str(out)]
    assert main(["profile", *of_step, *flags]) == 0
    printed = capsys.readouterr().out
    assert "2 x 2 rows of 16 tokens: " in printed
    assert "exchange of tokens with experts " in printed
    data = json.loads(out.read_text())
    assert (data["mesh"], data["facts"], data["latencies"], data["config"]) == (None, {}, {}, "kimi_k3_lora")
    assert data["collectives"][0]["of_fact"] is None
    found = data["step"]
    assert (found["rows"], found["tokens"], found["passes"], found["seconds"]["calls"]) == (2, 16, 2, 2)
    assert found["tokens_per_second"] == pytest.approx(64 / found["seconds"]["p50"])
    assert found["flops_per_second"] == pytest.approx(found["flops"] / found["seconds"]["p50"])
    assert found["of_peak"] is None
    shares = found["shares"]
    assert (shares["devices"], found["untraced"]) == (2, None)
    assert 0 < shares["exchange"] <= shares["collectives"] <= shares["busy"] <= 1
    assert shares["by_kind"]["all-to-all"] > 0
    assert len(losses) == timing.WARM_UP + 2 + step.TRACED
    assert losses[-1] < losses[1] < losses[0]
    assert all(np.any(b != a) for pair in itertools.pairwise(adapters) for a, b in zip(*pair, strict=True))


def test_a_trace_that_says_nothing_is_no_zero(of_step, monkeypatch, capsys) -> None:
    """Another program than the step is traced."""
    monkeypatch.setattr(step, "_update", lambda *_: (lambda: jnp.sin(1.0), ["HloModule jit_gradients\n"], 1e6))
    assert main(["profile", *of_step, "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert (
        "exchange and utilisation are not known: the trace on cpu has no instruction of the step's programs" in printed
    )
    assert "%" not in printed


def test_flops() -> None:
    """Of a matrix 2 a number forward and 4 backward; 4 in all under an adapter; experts by the share used."""
    model = Model(tiny_k3(**ONE | {"quantization": None}))
    mla = model.config.mla
    h, head = mla.num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    attention = 64 * 16 + 16 * h * head + 64 * 36 + 32 * h * (8 + 8) + 2 * 64 * h * 8
    moe = 64 * MOE.num_experts + 2 * 64 * 32 + 3 * 64 * MOE.hidden_size + MOE.top_k * 3 * 32 * MOE.hidden_size
    expected = attention + moe + 64 * 320
    assert step.flops(model, None, everything=True) == 6 * expected
    lora = tm.LoRAConfig(rank=2, targets=("layers.0.attention.o", "layers.0.ffn.experts.down"), routed="independent")
    adapted = abstract(tm.add_lora(model, lora))
    adapters = 2 * (h * 8 + 64) + MOE.top_k * 2 * (MOE.hidden_size + 32)
    assert step.flops(adapted, tm.partition(adapted)[0], everything=False) == 4 * expected + 6 * adapters


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "nothing to measure: give --mesh, --config, or both"),
        (["--config", "kimi_k3_lora", "--sizes", "1024"], "--sizes is legal with --mesh"),
        (["--mesh", "ep=2", "--set", "seed=1"], "--set is legal with --config"),
        (["--mesh", "ep=2", "--repeats", "0"], "--repeats 0: legal is at least 1"),
        (["--mesh", "ep=2", "--sizes", "1k"], "--sizes 1k: legal are whole numbers of bytes with commas between"),
        (["--mesh", "ep=2", "--sizes", "12"], "--sizes 12: legal are multiples of 8 bytes, float32 cut over ep 2"),
        (["--mesh", "ep=two"], "--mesh ep=two: 'ep=two' is not legal"),
        (["--mesh", "ep=2,ep=4"], "--mesh ep=2,ep=4: 'ep=4' is not legal, each axis is named once as in ep=4,tp=2"),
        (["--mesh", "x=2"], "no mesh axis 'x': legal are pp, dp, fsdp, ep, cp, tp"),
        (["--mesh", "ep=16"], "ep 16 = 16 devices, but there are 8"),
        (["--mesh", "ep=1"], "--mesh has one device, and nothing to send"),
        (["--mesh", "h300"], "no machine 'h300': legal are FILE.py and"),
        (["--config", "lora"], "the configuration does not say model: give --set model=FOLDER"),
    ],
)
def test_flags_that_are_not_legal(flags: list[str], says: str, capsys) -> None:
    assert main(["profile", *flags]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("trillion-moe profile: ")
    assert says in printed.err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["examples.max_length=null"], "examples.max_length is null: a step needs the length of its rows"),
        (["lora=null", "train.dropout=0"], "lora is null, but the experts of"),
        (
            ["train.batch_size=3", 'mesh={"dp": 2}'],
            "3 rows cannot be cut over dp 2: legal are multiples",
        ),
        (['mesh={"tp": 8}'], "has 4 along 'heads', not a multiple of 8 (tp); legal are 1, 2, 4"),
        (['lora.targets=["kda"]'], "lora, on"),
    ],
)
def test_steps_that_cannot_be(of_step, changes: list[str], says: str, monkeypatch, capsys) -> None:
    """Found before anything is drawn."""
    monkeypatch.setattr(step, "_drawn", None)
    assert main(["profile", *of_step, *(x for change in changes for x in ("--set", change))]) == 1
    assert says in capsys.readouterr().err


def test_only_a_report_is_replaced(tmp_path, capsys) -> None:
    out = tmp_path / "found.json"
    flags = ["profile", "--mesh", "ep=2", "--sizes", "8", "--repeats", "1", "--json", str(out)]
    out.write_text('{"trillion_moe verify": 1}')
    assert main(flags) == 1
    assert "is there and is no report, only a report is replaced" in capsys.readouterr().err
    assert out.read_text() == '{"trillion_moe verify": 1}'
    out.unlink()
    assert main(flags) == main(flags) == 0
    assert os.listdir(tmp_path) == ["found.json"]


def test_processes_that_would_measure_something_else() -> None:
    """They would wait for each other: in a call that one makes and the others do not."""

    class Two(Processes):
        def gather(self, what, value=None):
            return {0: value, 1: value | other.get(what, {})}

    with Two(Place(0, 2, "a:9")) as processes:
        processes.hosts = ("a", "b")
        args = argparse.Namespace(json=None, mesh="ep=8", sizes="1024", repeats=5, config=None, set=[])
        other = {"flags": {"--repeats": 9}}
        with pytest.raises(ProcessesError, match=r"flags .*: --repeats is 9 in process 1 \(host b\), 5 in process 0"):
            run(args)
        other = {"configuration": {"seed": 0}}
        with pytest.raises(ProcessesError, match=r"configuration .*: seed is 0 in process 1 .*not there in process 0"):
            run(args)
        other, args.mesh = {}, "ep=4"
        with pytest.raises(tm.LayoutError, match=r"the mesh has 4 device\(s\), the 2 processes have 8"):
            run(args)


def test_the_config_is_enough(model) -> None:
    assert ModelConfig.from_file(model).quantization == "mxfp4"
    assert [f.name for f in model.iterdir()] == ["config.json"]


def test_adapters_of_stacked_layers_are_counted() -> None:
    """As those of single ones, though what is trained has no base to ask for its shape."""
    cfg, found = tiny_k3(**FOUR), []
    for scan in (False, True):
        model = abstract(
            tm.add_lora(Model(cfg, plan=depth_plan(cfg, scan=scan)), tm.LoRAConfig(rank=2, targets=("attention",)))
        )
        found.append(step.flops(model, tm.partition(model)[0], everything=False))
        assert found[-1] > step.flops(model, None, everything=True) * 4 / 6
    assert found[0] == found[1]
