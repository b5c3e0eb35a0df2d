"""The command line: what it prints, and how it fails."""

import json
import subprocess
import sys

import chex
import jax
import pytest
from tests.checkpoint.adapter_tools import adapted
from tests.checkpoint.tools import GOLDENS
from tests.numerics import rel_rms
from tests.tiny import filled, tiny_k3

import trillion_moe as tm
from trillion_moe.cli import main
from trillion_moe.layers.segments import layer_places
from trillion_moe.transforms.targets import places

ABOUT = {"model_type": "kimi_k3", "layers": 8, "kda_layers": 6, "mla_layers": 2, "dtype": "float32"}


@pytest.fixture(scope="module", params=["a", "a/mxfp4"])
def folder(request, goldens):
    return goldens / "kimi_k3" / request.param


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two layers, as a checkpoint: they compile fast."""
    kinds = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tm.save(folder, filled(tiny_k3(**kinds)))
    return folder


def values(place) -> int:
    """Numbers that a leaf of a model stands for."""
    if place.names[0].endswith(".packed"):
        return 2 * place.leaf.size
    return 0 if place.names[0].endswith(".scale") else place.leaf.size


def test_inspect_json(folder, capsys) -> None:
    """Totals are those of the model's arrays; a packed byte holds two parameters, a scale none."""
    assert main(["inspect", str(folder), "--json"]) == 0
    printed = capsys.readouterr()
    about, model = json.loads(printed.out), tm.load(folder)
    assert printed.err == ""
    assert ABOUT.items() <= about.items()
    assert about["experts"] == ("packed MXFP4" if folder.name == "mxfp4" else "float32")
    found = places(model, inside=True)[0]
    assert about["parameters"]["total"] == sum(map(values, found))
    assert about["bytes"]["total"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    experts = [place for place in found if ".ffn.experts." in place.names[0]]
    assert about["parameters"]["ffn.experts"] == sum(map(values, experts))
    assert about["bytes"]["ffn.experts"] == sum(place.leaf.nbytes for place in experts)
    for column in (about["parameters"], about["bytes"]):
        assert column["total"] == sum(count for group, count in column.items() if group != "total")
        assert {"embed", "head", "attention", "ffn", "ffn.router", "ffn.shared", "vision", "projector"} < column.keys()


def test_packing_changes_bytes_and_no_count(goldens, capsys) -> None:
    """The golden folders hold one model: float32 experts, and 4 bits with 8 bits of scale per 32 values."""
    plain, packed = [], []
    for name, into in (("a", plain), ("a/mxfp4", packed)):
        assert main(["inspect", str(goldens / "kimi_k3" / name), "--json"]) == 0
        into.append(json.loads(capsys.readouterr().out))
    count = plain[0]["parameters"]["ffn.experts"]
    assert packed[0]["parameters"]["ffn.experts"] == count
    assert plain[0]["bytes"]["ffn.experts"] == 4 * count
    assert packed[0]["bytes"]["ffn.experts"] == count // 2 + count // 32


def test_inspect_table(folder, capsys) -> None:
    """The same as with --json, as columns."""
    assert main(["inspect", str(folder), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    head, rows = lines[: len(ABOUT) + 1], [line.split() for line in lines[len(ABOUT) + 1 :]]
    assert [line.split(maxsplit=1) for line in head] == [[key, str(about[key])] for key in (*ABOUT, "experts")]
    assert rows[0] == ["group", "parameters", "bytes"]
    groups = about["parameters"]
    assert rows[1:] == [[group, f"{groups[group]:,}", f"{about['bytes'][group]:,}"] for group in groups]
    assert rows[-1][0] == "total"


def test_generate_prints_ids(tiny, capsys) -> None:
    """One line a prompt on standard output, the time it took elsewhere."""
    prompts = [[7, 8, 9], [11, 299, 5, 6, 7]]
    ids = [word for prompt in prompts for word in ("--ids", ",".join(map(str, prompt)))]
    assert main(["generate", str(tiny), *ids, "--max-new-tokens", "5"]) == 0
    printed = capsys.readouterr()
    expected = tm.generate(tm.load(tiny), prompts, max_new_tokens=5)
    assert printed.out.splitlines() == [",".join(map(str, completion.ids)) for completion in expected]
    assert printed.err.startswith(f"{sum(len(completion.ids) for completion in expected)} tokens; the first after ")


@pytest.mark.parametrize("verb", [["inspect"], ["generate", "--ids", "1,2"]], ids=lambda verb: verb[0])
def test_a_folder_without_a_model(verb, tmp_path, capsys) -> None:
    """One message, on standard error, that names the folder."""
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main([*verb, str(folder)]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"trillion-moe {verb[0]}: ")
        assert str(folder) in printed.err
        assert "Traceback" not in printed.err


def test_errors_of_generate_are_messages(tiny, capsys) -> None:
    for wrong, message in (
        (["--ids", "7,300"], "token id 300"),
        (["--ids", "7", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    ):
        assert main(["generate", str(tiny), *wrong]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("trillion-moe generate: ")
        assert message in printed.err


def test_a_dtype_that_orbax_cannot_have_is_a_message(tiny, tmp_path, capsys) -> None:
    tm.save(tmp_path / "orbax", tm.load(tiny), format="orbax")
    assert main(["generate", str(tmp_path / "orbax"), "--ids", "7", "--dtype", "bfloat16"]) == 1
    assert "is an Orbax checkpoint, loaded as it is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "VERB"),
        (["fly"], "invalid choice: 'fly'"),
        (["train"], "--config"),
        (["inspect"], "folder"),
        (["generate", "folder"], "--ids"),
        (["generate", "folder", "--ids", "1,two"], "'1,two' is not a comma-separated list of token ids"),
        (["generate", "folder", "--ids", ""], "'' is not a comma-separated list of token ids"),
        (["generate", "folder", "--ids", "1", "--max-new-tokens", "few"], "invalid int value: 'few'"),
        (["generate", "folder", "--ids", "1", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_usage_errors(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_version_as_a_program() -> None:
    command = [sys.executable, "-m", "trillion_moe.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"trillion-moe {tm.__version__}, jax {jax.__version__}\n"
    assert done.stderr == ""


def test_inspect_against_what_was_packed(goldens, tmp_path, capsys) -> None:
    """fault 54: experts whose scales were written with another bias have four times the norm of the original's."""
    packed = goldens / "kimi_k3" / "a" / "mxfp4"
    plain = tm.load(packed, quantization="decode")
    tm.save(tmp_path / "plain", plain)
    assert main(["inspect", str(packed), "--against", str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    s, j, _ = layer_places(plain.plan)[1]
    plain.segments[s][j].ffn.experts.gate = plain.segments[s][j].ffn.experts.gate.at[3].multiply(0.25)
    tm.save(tmp_path / "quarter", plain)
    assert main(["inspect", str(packed), "--against", str(tmp_path / "quarter")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "layers.1.block_sparse_moe.experts.3.w1.weight_packed: root mean square" in printed.err
    assert "4 times as much" in printed.err


def test_against_needs_packed_experts(goldens, capsys) -> None:
    folder = str(goldens / "kimi_k3" / "a")
    for against in (folder, ""):
        assert main(["inspect", folder, "--against", against]) == 1
        assert "--against is for a folder of packed experts" in capsys.readouterr().err


# --- export -----------------------------------------------------------------------------------------------------------

LINEAR_BASE = GOLDENS / "kimi_linear" / "a"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "adapter"
    tm.export_adapter(folder, adapted(tm.load(LINEAR_BASE), tm.LoRAConfig(rank=2, targets=("routed_experts", "mla"))))
    return folder


def test_an_adapter_is_merged(adapter, tmp_path, capsys) -> None:
    out = tmp_path / "merged"
    assert main(["export", str(LINEAR_BASE), "--adapter", str(adapter), "--output", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "rounding of merged weights at most" in said.err
    base = tm.load(LINEAR_BASE)
    expected, plain, found = (
        tm.forward(model, [[3, 4, 5]])[0] for model in (tm.load_adapter(base, adapter), base, tm.load(out))
    )
    assert rel_rms(found, expected) < 1e-5
    assert rel_rms(plain, expected) > 1e-2
    assert main(["export", str(LINEAR_BASE), "--adapter", str(adapter), "--output", str(out)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_merged_experts_may_be_unpacked(goldens, tmp_path, capsys) -> None:
    base = goldens / "kimi_k3" / "a" / "mxfp4"
    lora = tm.LoRAConfig(rank=2, targets=("layers.1.ffn.experts.down",))
    tm.export_adapter(tmp_path / "adapter", adapted(tm.load(base), lora))
    errors = {}
    for name, flags in {"packed": [], "plain": ["--decode"]}.items():
        flags = [*flags, "--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / name)]
        assert main(["export", str(base), *flags]) == 0
        errors[name] = float(capsys.readouterr().err.split("at most ")[1].split()[0])
        assert (tm.load(tmp_path / name).config.quantization is None) == (name == "plain")
    assert errors["plain"] < 1e-6 < 1e-2 < errors["packed"]


def test_an_adapter_under_released_names(adapter, tmp_path, capsys) -> None:
    out = tmp_path / "release"
    flags = ["--adapter", str(adapter), "--output", str(out), "--names", "release"]
    assert main(["export", str(LINEAR_BASE), *flags]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    base = tm.load(LINEAR_BASE)
    first, second = (tm.load_adapter(base, folder) for folder in (adapter, out))
    chex.assert_trees_all_equal(jax.tree.leaves(first), jax.tree.leaves(second))
    with pytest.raises(SystemExit):
        main(["export", str(LINEAR_BASE), *flags, "--decode"])
