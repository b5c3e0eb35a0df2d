"""The file of `trillion-moe verify --json`: when `generate` and `train` take it, and that they then hold to it."""

import dataclasses
import json

import jax
import pytest
from tests.tiny import filled, tiny_k3

import trillion_moe as tm
from trillion_moe import cli, ops
from trillion_moe.cli import main
from trillion_moe.config import ModelConfig
from trillion_moe.kernels import grouped_matmul
from trillion_moe.verify import Report
from trillion_moe.verify.report import Stamp, load, read


@pytest.fixture
def written(plain, passed, tmp_path):
    """Writes a report, by default one in which ragged_dot passed -> its path."""

    def written(report: Report | None = None):
        path = tmp_path / "operators.json"
        (passed(plain, "ragged_dot", "xla") if report is None else report).write(path)
        return path

    return written


def changed(path, change) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_round_trip(plain, passed, written) -> None:
    report = passed(plain, "xla")
    assert read(written(report)) == report
    infinite = dataclasses.replace(report, operators=[dataclasses.replace(report.operators[0], error="inf")])
    assert read(written(infinite)) == infinite


def test_the_first_that_passed_is_taken(plain, cfg, passed, written) -> None:
    assert load(written(), plain, "float32") == {"grouped_matmul": "ragged_dot", "kda": "xla"}
    decoded = {"grouped_matmul": "xla", "kda": "xla"}
    assert load(written(passed(cfg, "xla")), cfg, "float32") == decoded | {"grouped_matmul_mxfp4": "xla"}
    assert load(written(passed(cfg, "xla")), plain, "float32") == decoded


@pytest.mark.parametrize("folder", ["kimi_k3/a/mxfp4", "kimi_linear/a"])
def test_what_a_folder_s_config_says_holds_for_the_model_in_it(folder, goldens, passed, tmp_path) -> None:
    """How a tensor is stored is known only once it is loaded, and is no other model."""
    folder, path = goldens / folder, tmp_path / "operators.json"
    passed(ModelConfig.from_file(folder), "xla").write(path)
    with tm.using_verified(path, tm.load(folder)):
        pass


def test_a_person_may_choose_among_what_passed(plain, passed, written) -> None:
    path = written()
    changed(path, lambda data: data["fallback"]["grouped_matmul"]["float32"].reverse())
    assert load(path, plain, "float32") == {"grouped_matmul": "xla", "kda": "xla"}
    changed(path, lambda data: data["fallback"]["grouped_matmul"]["float32"].insert(0, "tpu"))
    with pytest.raises(tm.VerifyError, match="holds 'tpu', which did not pass: legal are xla, ragged_dot"):
        load(path, plain, "float32")


def test_a_row_that_contradicts_itself_is_refused(plain, written) -> None:
    path = written()

    def worse(data):
        for row in data["operators"]:
            row["error"] = row["error"] and 0.5

    changed(path, worse)
    with pytest.raises(tm.VerifyError, match=r"contradicts itself: pass, error 0\.5, tolerance 1e-05"):
        load(path, plain, "float32")


def test_another_machine_or_version_is_refused(plain, passed, written) -> None:
    """Every difference is named, in both values."""
    path, here = written(), Stamp.here()

    def elsewhere(data):
        data["stamp"] |= {"device": "NVIDIA H200", "platform": "gpu", "count": 3}
        data["stamp"]["versions"]["jax"] = "0.9.0"

    changed(path, elsewhere)
    with pytest.raises(tm.VerifyError) as error:
        load(path, plain, "float32")
    for line in (
        f"{path}: 4 problem(s); run `trillion-moe verify` again",
        f"stamp.device was 'NVIDIA H200', is {here.device!r}",
        "stamp.platform was 'gpu', is 'cpu'",
        f"stamp.count was 3, is {jax.device_count()}",
        f"stamp.versions.jax was '0.9.0', is {jax.__version__!r}",
    ):
        assert line in str(error.value)


def test_what_the_model_needs_must_be_there(plain, cfg, passed, written) -> None:
    for report, model, dtype, message in (
        (passed(plain, "xla"), cfg, "float32", "no row of grouped_matmul_mxfp4 in float32, which the model has"),
        (passed(plain, "xla", leave_out=("kda",)), plain, "float32", "no row of kda in float32, which the model has"),
        (passed(plain, "xla"), plain, "bfloat16", "no row of router in bfloat16, which the model has (only float32)"),
        (passed(plain), plain, "float32", "fallback.grouped_matmul.float32: no implementation passed (xla: no such"),
        (passed(plain, "xla"), dataclasses.replace(plain, vocab_size=400), "float32", "vocab_size was 300, is 400"),
    ):
        with pytest.raises(tm.VerifyError) as error:
            load(written(report), model, dtype)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("trillion_moe verify"), "is no file of `trillion-moe verify --json`"),
        (lambda data: data.update({"trillion_moe verify": 2}), "is no file of `trillion-moe verify --json`"),
        (lambda data: data.pop("stamp"), "stamp: Field required"),
        (lambda data: data["operators"][0].update(verdict="maybe"), "operators.0.verdict"),
        (lambda data: data["operators"][0].update(tolerance="1"), "operators.0.tolerance"),
        (lambda data: data.update(more=1), "more"),
    ],
)
def test_a_file_that_is_none(written, change, message) -> None:
    path = written()
    changed(path, change)
    with pytest.raises(tm.VerifyError) as error:
        read(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_half_a_file_is_never_read(plain, passed, written, monkeypatch) -> None:
    """Writing that fails leaves what was there; a file cut short is refused."""
    path = written()
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        passed(plain, "xla").write(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(tm.VerifyError, match="is not JSON with distinct keys"):
        load(path, plain, "float32")


# --- generate and train -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("operators") / "tiny"
    tm.save(path, filled(tiny_k3(num_layers=1, attention=("mla",), mlp=("moe",))))
    return path


@pytest.fixture
def file(folder, passed, written):
    return written(passed(tm.ModelConfig.from_file(folder), "ragged_dot", "xla"))


def test_generate_runs_what_the_file_says(folder, file, monkeypatch, capsys) -> None:
    """ragged_dot, which nothing chooses on a CPU by itself, and the ids are the same."""
    command = ["generate", str(folder), "--ids", "7,8,9", "--max-new-tokens", "4"]
    assert main(command) == 0
    expected, called = capsys.readouterr().out, []
    right = grouped_matmul.GATED["ragged_dot"]
    monkeypatch.setitem(grouped_matmul.GATED, "ragged_dot", lambda *given: called.append(1) or right(*given))
    assert main(command) == 0
    assert not called
    assert capsys.readouterr().out == expected
    assert main([*command, "--operators", str(file)]) == 0
    assert called
    assert capsys.readouterr().out == expected


def test_generate_refuses(folder, file, capsys) -> None:
    changed(file, lambda data: data["stamp"].update(device="TPU v9"))
    for given, message in ((str(file), "stamp.device was 'TPU v9', is 'cpu'"), ("nowhere.json", "nowhere.json")):
        assert main(["generate", str(folder), "--ids", "7", "--operators", given]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("trillion-moe generate: ")
        assert message in printed.err


def test_train_runs_what_the_file_says(folder, file, tmp_path, monkeypatch, capsys) -> None:
    ran = []

    def run(args, load) -> int:
        ran.append(ops.implementation("grouped_matmul", "float32"))
        return 0

    monkeypatch.setattr(cli.train_command, "run", run)
    run_config = tmp_path / "run.json"
    run_config.write_text(json.dumps({"model": str(folder), "data": "rows.jsonl", "output": str(tmp_path / "out")}))
    command = ["train", "--config", str(run_config)]
    assert main(command) == 0
    assert main([*command, "--operators", str(file)]) == 0
    assert ran == ["xla", "ragged_dot"]
    assert main([*command, "--operators", str(file), "--set", "dtype=bfloat16"]) == 1
    assert "no row of mla in bfloat16, which the model has (only float32)" in capsys.readouterr().err
    assert len(ran) == 2


def test_in_python(folder, file) -> None:
    model = tm.load(folder)
    with tm.using_verified(file, model):
        assert ops.implementation("grouped_matmul", "float32") == "ragged_dot"
    assert ops.implementation("grouped_matmul", "float32") == "xla"
