"""`tm.verify`: what is in the table, what passes here, and that planted faults do not."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.tiny import LINEAR, tiny_k3

import trillion_moe as tm
from trillion_moe.cli import main
from trillion_moe.kernels import grouped_matmul, mxfp4
from trillion_moe.ops import IMPLEMENTATIONS
from trillion_moe.verify import operators_of, rowwise
from trillion_moe.verify.cases import LEAST, Scale, fitted
from trillion_moe.verify.measure import Problem, error, measure, tolerance

TOKENS = 16
PRESENT = ("xla", "ragged_dot")


@pytest.fixture(scope="module")
def report(plain):
    """Of everything but the packed product, in float32."""
    return tm.verify(plain, dtypes=["float32"], tokens=TOKENS)


def test_every_operator_passes_here(report, plain) -> None:
    names = [operator.name for operator in operators_of(plain)]
    assert names == [
        "grouped_matmul", "router", "kda", "mla", "attn_res", "situ", "rms_norm", "vision_attention",
        "patch_embedding", "cross_entropy",
    ]  # fmt: skip
    assert list(report.fallback) == names
    for row in report.operators:
        if row.implementation in PRESENT:
            assert row.verdict == "pass", row
            assert isinstance(row.error, float)
            assert 0 < row.error <= row.tolerance
            assert row.time is not None
            assert row.time > 0
    assert report.failed == []


def test_what_cannot_run_is_unavailable_with_its_reason(report) -> None:
    rows = [row for row in report.operators if row.implementation in ("tpu", "gpu")]
    assert {row.operator for row in rows} == {"grouped_matmul", "kda"}
    for row in rows:
        assert (row.verdict, row.error, row.time) == ("unavailable", None, None)
        assert row.reason is not None
        assert row.reason == f"a kernel for {row.implementation.upper()}s; JAX runs on cpu"


def test_fallback_holds_what_passed_fastest_first(report) -> None:
    times = {row.implementation: row.time for row in report.operators if row.operator == "grouped_matmul"}
    found = report.fallback["grouped_matmul"]["float32"]
    assert sorted(found) == sorted(PRESENT)
    assert [times[name] for name in found] == sorted(times[name] for name in found)


def test_the_scale_is_stated(report) -> None:
    (row,) = [row for row in report.operators if row.operator == "mla"]
    assert row.shape.startswith("16 tokens, 3 of 3 heads, ")


def test_scale_falls_until_it_fits(plain) -> None:
    """Halves, to the least; then nothing fits, and that is said."""
    (operator,) = [operator for operator in operators_of(plain) if operator.name == "grouped_matmul"]
    whole = fitted(operator, plain, 64, 1 << 30)
    assert whole == Scale(tokens=64, experts=8)
    least = Scale(tokens=LEAST.tokens, experts=LEAST.experts)
    assert fitted(operator, plain, 64, 16 * operator.numbers(plain, least)) == least
    assert fitted(operator, plain, 64, 16 * operator.numbers(plain, least) - 1) is None
    with pytest.raises(tm.VerifyError, match="memory is 1,000 bytes: too little for one case of grouped_matmul"):
        tm.verify(plain, memory=1000)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"operators": ["kda", "moe"]}, "no operator 'moe' in this config: legal are grouped_matmul, router, "),
        ({"dtypes": ["float16"]}, "dtypes hold 'float16': legal are float32, bfloat16"),
        ({"tokens": 7}, "tokens is 7; it must be at least 8"),
    ],
)
def test_arguments_that_are_not_legal(plain, given, message) -> None:
    with pytest.raises(tm.VerifyError, match=message):
        tm.verify(plain, **given)


def test_only_what_a_config_has(plain) -> None:
    names = [operator.name for operator in operators_of(tiny_k3(**LINEAR))]
    assert names == ["grouped_matmul", "router", "kda", "mla", "silu", "rms_norm", "cross_entropy"]


def test_without_a_cpu_there_is_no_truth(plain, monkeypatch) -> None:
    def local_devices(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(tm.VerifyError, match="the truth is computed on the CPU, which JAX was told not to use"):
        tm.verify(plain)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_families_whole(cfg, dtype) -> None:
    for config in (cfg, tiny_k3(**LINEAR)):
        found = tm.verify(config, dtypes=[dtype], tokens=TOKENS)
        assert found.failed == [], [row for row in found.operators if row.verdict != "pass"]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_error() -> None:
    truth = np.array([3.0, 4.0])
    assert error(truth, truth) == 0
    assert error(truth * 1.1, truth) == pytest.approx(0.1)
    assert error(np.array([3.0, np.nan]), truth) == np.inf
    assert error(np.zeros(2), np.zeros(2)) == 0
    assert error(np.array([0, 1e-30]), np.zeros(2)) == np.inf, "a row of no group must be exactly 0"
    assert error(np.array([1e38, 3e38]), np.array([1e38, 3e38])) == 0
    assert error(np.zeros(0), np.zeros(0)) == 0


# --- planted faults ---------------------------------------------------------------------------------------------------


def shifted_tile(x, w, group_sizes, transpose_w):
    """Eight rows of the product stand one row too low."""
    y = grouped_matmul.IMPLS["ragged_dot"](x, w, group_sizes, transpose_w)
    return y.at[8:16].set(jnp.roll(y[8:16], 1, axis=0))


def dropped_last_group(x, w, group_sizes, transpose_w):
    return grouped_matmul.IMPLS["ragged_dot"](x, w, group_sizes.at[-1].set(0), transpose_w)


def bfloat16_accumulator(x, w, group_sizes, transpose_w, block: int = 128):
    """Right, but for sums of 128 products that are added in bfloat16."""
    dtype, x, w = x.dtype, x.astype(jnp.float32), (w.swapaxes(1, 2) if transpose_w else w).astype(jnp.float32)
    r, k = x.shape
    block = min(block, k)
    blocks = (
        jnp.moveaxis(x.reshape(r, k // block, block), 1, 0),
        jnp.moveaxis(w.reshape(len(w), k // block, block, -1), 1, 0),
    )

    def add(sums, operands):
        product = grouped_matmul.IMPLS["ragged_dot"](*operands, group_sizes, False)
        return (sums + product.astype(jnp.bfloat16)).astype(jnp.bfloat16), None

    return lax.scan(add, jnp.zeros((r, w.shape[2]), jnp.bfloat16), blocks)[0].astype(dtype)


def rubbish_in_the_tail(x, w, group_sizes, transpose_w):
    """Rows of no group are left as the memory was."""
    y = grouped_matmul.IMPLS["ragged_dot"](x, w, group_sizes, transpose_w)
    return jnp.where((jnp.arange(len(x)) < jnp.sum(group_sizes))[:, None], y, 1e-30)


def found(cfg, name: str, dtype: str, cases: str) -> str | None:
    """Where an implementation "xla" of an operator is first out of tolerance, None if nowhere."""
    (operator,) = [operator for operator in operators_of(cfg) if operator.name == name]
    for case in operator.cases(cfg, fitted(operator, cfg, TOKENS, 1 << 30)):
        if cases in case.name:
            result = measure(Problem.of(case, dtype), "xla")
            assert result.reason is None, result.reason
            if result.error > tolerance(operator, dtype):
                return result.where
    return None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (shifted_tile, "adversarial: one group"),
        (dropped_last_group, "adversarial: down"),
        (bfloat16_accumulator, "adversarial: long contraction"),
        (rubbish_in_the_tail, "adversarial: one group"),
    ],
)
def test_a_planted_fault_is_found(plain, monkeypatch, fault, case, dtype) -> None:
    monkeypatch.setitem(grouped_matmul.IMPLS, "xla", fault)
    where = found(plain, "grouped_matmul", dtype, case)
    assert where is not None
    assert where.startswith(case)


@pytest.mark.parametrize("case", ["adversarial: one group", "adversarial: down", "adversarial: long contraction"])
def test_without_a_fault_nothing_is_found(plain, case) -> None:
    assert found(plain, "grouped_matmul", "bfloat16", case) is None


def test_a_fault_of_the_gated_product_alone_is_found(plain, monkeypatch) -> None:
    def up_and_gate(activation, x, gate, up, added, group_sizes, last):
        return grouped_matmul.GATED["ragged_dot"](activation, x, up, gate, added, group_sizes, last)

    monkeypatch.setitem(grouped_matmul.GATED, "xla", up_and_gate)
    assert found(plain, "grouped_matmul", "float32", "gate and up")


def swapped_nibbles(right, x, packed, scale, group_sizes, layout):
    return right(x, packed >> 4 | packed << 4, scale, group_sizes, layout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swapped_nibbles_are_found(cfg, monkeypatch, dtype) -> None:
    assert found(cfg, "grouped_matmul_mxfp4", dtype, "realistic: down") is None
    fault = partial(swapped_nibbles, mxfp4.IMPLS["xla"])
    monkeypatch.setitem(mxfp4.IMPLS, "xla", fault)
    assert found(cfg, "grouped_matmul_mxfp4", dtype, "realistic: down")


def test_smallest_and_largest_scales(cfg) -> None:
    assert found(cfg, "grouped_matmul_mxfp4", "float32", "smallest and largest") is None


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(plain, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(plain.to_json()))
    return file


def test_command(config_file, tmp_path, capsys) -> None:
    """The table on standard output, the file with the same rows, exit code 0."""
    out = tmp_path / "found.json"
    flags = ["--dtype", "float32", "--tokens", "16", "--operator", "rms_norm", "--operator", "situ"]
    assert main(["verify", str(config_file), *flags, "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    head, *rows, where, counts = printed.out.splitlines()
    assert head.split()[:7] == ["operator", "implementation", "dtype", "error", "tolerance", "verdict", "time"]
    assert counts == "2 pass, 0 fail, 0 unavailable"
    assert [row.split()[:3] for row in rows] == [["rms_norm", "xla", "float32"], ["situ", "xla", "float32"]]
    assert where == f"on {jax.device_count()} x cpu (cpu), jax {jax.__version__}"
    data = json.loads(out.read_text())
    assert data.keys() == {"trillion_moe verify", "stamp", "config", "operators", "fallback"}
    assert {"operator", "implementation", "dtype", "error", "tolerance", "verdict", "time"} <= data["operators"][
        0
    ].keys()
    assert data["fallback"] == {"rms_norm": {"float32": ["xla"]}, "situ": {"float32": ["xla"]}}
    assert data["stamp"]["versions"]["jax"] == jax.__version__
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_nothing_but_a_report_is_replaced(config_file, tmp_path, capsys) -> None:
    """The model's own files least of all; and what cannot be written is found before anything is measured."""
    before, loop = config_file.read_bytes(), tmp_path / "loop"
    loop.symlink_to(loop)
    for target in (config_file, tmp_path / "missing" / "x.json", loop, tmp_path / ("n" * 250), config_file / "x.json"):
        assert main(["verify", str(config_file), "--operator", "rms_norm", "--json", str(target)]) == 1
        printed = capsys.readouterr()
        assert "--json: " in printed.err
        assert "rms_norm" not in printed.out
    assert config_file.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "loop"]


def test_command_fails_without_a_passing_implementation(config_file, tmp_path, capsys, monkeypatch) -> None:
    """The file is written all the same, to be looked at; what failed is named."""
    monkeypatch.setattr(rowwise, "rms_norm", lambda x, weight, eps: x * weight)
    out = tmp_path / "found.json"
    flags = ["--dtype", "float32", "--tokens", "16", "--operator", "rms_norm", "--json", str(out)]
    assert main(["verify", str(config_file), *flags]) == 1
    printed = capsys.readouterr()
    assert printed.err == "trillion-moe verify: no implementation of rms_norm in float32 passed\n"
    assert " fail " in printed.out
    assert json.loads(out.read_text())["fallback"] == {"rms_norm": {"float32": []}}


def test_command_errors_are_messages(config_file, tmp_path, capsys) -> None:
    for wrong, message in (
        ([str(tmp_path / "nowhere")], "nowhere"),
        ([str(config_file), "--operator", "fly"], "no operator 'fly'"),
        ([str(config_file), "--json", str(tmp_path / "no" / "file")], "is no folder that is there"),
        ([str(config_file), "--json", str(tmp_path)], "is there and is no file"),
        ([str(config_file), "--memory", "0"], "memory is 0 bytes"),
    ):
        assert main(["verify", *wrong]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("trillion-moe verify: ")
        assert message in printed.err


def test_operators_with_a_choice_are_all_verified(cfg) -> None:
    assert IMPLEMENTATIONS.keys() <= {operator.name for operator in operators_of(cfg)}
