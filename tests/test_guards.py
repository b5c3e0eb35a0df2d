"""Rules of the house that no type checker knows: who imports whom, who tells leaf types apart, sizes, the wheel."""

import ast
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "trillion_moe"
CODE_FOLDERS = ("src", "kernels", "configs", "meshes", "tests")

# A unit is a module or a folder directly under src/trillion_moe. It may import the units named here and what those may
# import in turn, and nothing else of ours.
NAMED = {
    "config_codecs": "",
    "config_json": "config_codecs",
    "config": "config_json",
    "kernels": "",
    "weights": "",
    "ops": "weights kernels",
    "balance": "",
    "blueprint": "weights",
    "sharding": "weights blueprint",
    "transforms": "weights blueprint sharding config kernels",
    "layers": "ops blueprint sharding config balance",
    "model": "layers",
    "trace": "model",
    "inputs": "layers",
    "distributed": "",
    "checkpoint": "weights blueprint sharding config kernels distributed",
    "data": "config",
    "sampling": "inputs",
    "steps": "model trace inputs sampling transforms",
    # What a person runs: steps and anything before it, never each other.
    "run_config": "transforms data balance",
    "optimizer": "run_config",
    "compiler": "",
    "hlo": "",
    "programs": "steps run_config compiler distributed",
    "stamp": "",
    "train": "programs checkpoint data run_config optimizer meshes compiler",
    "generate": "steps checkpoint data compiler",
    "aot": "meshes",
    "plan": "programs checkpoint data run_config optimizer aot meshes compiler hlo stamp",
    "verify": "steps checkpoint data aot stamp",
    "bench": "steps checkpoint data",
    "profile": "programs checkpoint data run_config optimizer meshes stamp hlo",
    "meshes": "config sharding",
    "configs": "config api cli run_config",
    "quickstart": "configs api",
    "api": "train generate plan verify bench meshes",
    "cli": "api profile",
    "__init__": "api",
    "__main__": "cli",
}
LEAF_UNITS = {"ops", "weights", "transforms", "checkpoint"}
HUGGING_FACE = {"transformers", "huggingface_hub", "tokenizers", "peft", "torch"}
HUGGING_FACE_UNITS = {"checkpoint", "data", "bench"}


def may_import(unit: str) -> set[str]:
    """The units that `unit` may import: those named for it and, in turn, theirs."""
    named = set(NAMED[unit].split())
    return named.union(*map(may_import, named)) if named else named


def source_files() -> list[tuple[Path, str]]:
    """Every file of the package with its dotted name, through the symlinked folders too."""
    tops = sorted(p for p in SOURCE.iterdir() if p.name != "__pycache__")
    files = [f for top in tops for f in ([top] if top.suffix == ".py" else sorted(top.rglob("*.py")))]
    return [(f, ".".join(["trillion_moe", *f.relative_to(SOURCE).with_suffix("").parts])) for f in files]


def imported(tree: ast.AST, name: str, lazy: bool = False) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, whether inside a function or for types only) of each import below `tree`."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno, lazy) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = name.split(".")[:-level] if level else []
                stem = ".".join([*base, *([module] if module else [])])
                yield from ((f"{stem}.{alias.name}", node.lineno, lazy) for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from imported(node, name, True)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imported(node, name, True)
            case _:
                yield from imported(node, name, lazy)


def import_direction(tree: ast.Module, name: str) -> Iterator[str]:
    unit = name.split(".")[1]
    if unit not in NAMED:
        yield f"{name}: the unit {unit!r} has no place in the import order; give it one in {Path(__file__).name}"
        return
    found = {(line, owner(target)) for target, line, _ in imported(tree, name)}
    for line, other in sorted((n, o) for n, o in found if o and o != unit and o not in may_import(unit)):
        yield f"{name}:{line}: {unit} must not import {other}; it may import {sorted(may_import(unit))}"


def owner(target: str) -> str | None:
    """The unit that an imported name belongs to; None when it is not ours or binds nobody."""
    parts = target.split(".")
    if parts[0] != "trillion_moe" or target == "trillion_moe.__version__":
        return None
    # A name that is no module of ours is one of the API: `import trillion_moe`, `from trillion_moe import load`.
    return parts[1] if len(parts) > 2 or parts[-1] in NAMED else "api"


def pallas_only_in_kernels(tree: ast.Module, name: str) -> Iterator[str]:
    for target, line, _ in imported(tree, name):
        if target.startswith("jax.experimental.pallas") and name.split(".")[1] != "kernels":
            yield f"{name}:{line}: Pallas is imported only under kernels"


def hugging_face_is_lazy(tree: ast.Module, name: str) -> Iterator[str]:
    for target, line, lazy in imported(tree, name):
        library = target.split(".")[0]
        if library in HUGGING_FACE and not (lazy and name.split(".")[1] in HUGGING_FACE_UNITS):
            yield f"{name}:{line}: {library} is imported only inside functions, under {sorted(HUGGING_FACE_UNITS)}"


@functools.cache
def leaf_types() -> set[str]:
    """The classes of weights.py in the union `Weight`."""
    tree = ast.parse((SOURCE / "weights.py").read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    aliases = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and "Weight" in _names(node)]
    assert aliases, "weights.py defines no union `Weight`"
    return classes & _names(*aliases)


def _names(*trees: ast.AST) -> set[str]:
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def leaves_told_apart_in_few_places(tree: ast.Module, name: str) -> Iterator[str]:
    if name.split(".")[1] in LEAF_UNITS:
        return
    for node in ast.walk(tree):
        match node:
            case ast.MatchClass(cls=tested):
                line = node.lineno
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, tested], lineno=line):
                pass
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[tested], lineno=line):
                pass
            case _:
                continue
        for leaf in sorted(_names(tested) & (leaf_types() | {"Weight"})):
            yield f"{name}:{line}: only {sorted(LEAF_UNITS)} tell {leaf} from other weights"


Rule = Callable[[ast.Module, str], Iterator[str]]
RULES: list[Rule] = [import_direction, pallas_only_in_kernels, hugging_face_is_lazy, leaves_told_apart_in_few_places]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps(rule: Rule) -> None:
    files = source_files()
    assert any("kernels" in name for _, name in files)
    broken = [line for path, name in files for line in rule(ast.parse(path.read_text()), name)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (import_direction, "trillion_moe.weights", "from trillion_moe.ops import dot"),
        (import_direction, "trillion_moe.kernels.mxfp4.xla", "def f():\n    import trillion_moe.config"),
        (import_direction, "trillion_moe.kernels.mxfp4.xla", "from ...weights import MXFP4"),
        (import_direction, "trillion_moe.layers.norm", "from .. import model"),
        (import_direction, "trillion_moe.layers.norm", "import trillion_moe as tm"),
        (import_direction, "trillion_moe.data.chat", "from trillion_moe import weights"),
        (import_direction, "trillion_moe.train.loop", "from trillion_moe.generate import sample"),
        (import_direction, "trillion_moe.helpers", ""),
        (pallas_only_in_kernels, "trillion_moe.layers.kda", "from jax.experimental import pallas as pl"),
        (pallas_only_in_kernels, "trillion_moe.layers.kda", "import jax.experimental.pallas.tpu as pltpu"),
        (hugging_face_is_lazy, "trillion_moe.checkpoint.names", "import transformers"),
        (hugging_face_is_lazy, "trillion_moe.model", "def f():\n    from torch import nn"),
        (leaves_told_apart_in_few_places, "trillion_moe.model", "match w:\n    case weights.LoRA(base=b): pass"),
        (leaves_told_apart_in_few_places, "trillion_moe.layers.moe", "isinstance(w, (int, MXFP4))"),
        (leaves_told_apart_in_few_places, "trillion_moe.layers.moe", "type(w) is LoRA"),
    ],
)
def test_rule_finds_a_planted_violation(rule: Rule, name: str, text: str) -> None:
    assert len(list(rule(ast.parse(text), name))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trillion_moe.kernels.grouped_matmul", "from .reference import grouped_matmul"),
        ("trillion_moe.kernels.grouped_matmul.xla", "from trillion_moe.kernels.mxfp4 import decode"),
        ("trillion_moe.bench", "from trillion_moe import __version__, config, steps"),
        ("trillion_moe.bench.peer", "def f():\n    import torch, transformers"),
        ("trillion_moe.checkpoint.peft", "match w:\n    case LoRA(base=MXFP4()): pass"),
        ("trillion_moe.layers.moe", "from trillion_moe.weights import MXFP4\nw = MXFP4(1, 2)"),
    ],
)
def test_rules_let_pass(name: str, text: str) -> None:
    assert not [line for rule in RULES for line in rule(ast.parse(text), name)]


def test_no_file_is_over_500_lines() -> None:
    files = [f for folder in CODE_FOLDERS for f in (ROOT / folder).rglob("*.py")]
    long = {str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text().splitlines())) > 500}
    assert not long


def test_nothing_is_left_for_later() -> None:
    word = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
    folders = [ROOT / folder for folder in (*CODE_FOLDERS, "docs", "notebooks", ".ci", "constraints")]
    files = [f for folder in folders for f in folder.rglob("*")] + list(ROOT.iterdir())
    text = {"", ".cfg", ".ipynb", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
    found = [f for f in files if f.is_file() and f.suffix in text and word.search(f.read_text(errors="ignore"))]
    assert not found


def python(code: str, cwd: Path, **env: str) -> str:
    """What a fresh interpreter prints when it runs `code` in `cwd`."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout.strip()


def test_the_root_has_no_import_package_named_kernels() -> None:
    """`kernels` is a distribution of Hugging Face's, which transformers probes."""
    here = importlib.util.find_spec("kernels")
    at_root = python("import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)", cwd=ROOT)
    for origin in (str(here.origin if here else None), at_root):
        assert origin == "None" or not Path(origin).is_relative_to(ROOT) or ".venv" in origin


@pytest.mark.slow
def test_built_wheel_holds_every_file_and_imports_elsewhere(tmp_path: Path) -> None:
    tree, site = tmp_path / "tree", tmp_path / "site"
    unwanted = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("src", "kernels", "configs", "meshes"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), "."], cwd=tree, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)

    held = {str(f.relative_to(site)) for f in site.rglob("*.py")}
    assert held == {name.replace(".", "/") + ".py" for _, name in source_files()}
    assert (site / "trillion_moe" / "py.typed").exists()
    assert (site / "trillion_moe" / "configs" / "kimi_k3" / "config.json").exists()

    operators = sorted(f.parent.name for f in (ROOT / "kernels").glob("*/__init__.py"))
    assert operators
    for operator in operators:
        code = f"import trillion_moe.kernels.{operator} as module; print(module.__file__)"
        printed = python(code, cwd=tmp_path, PYTHONPATH=str(site))
        assert Path(printed).is_relative_to(site)
