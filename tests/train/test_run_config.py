"""A run's configuration: recipes, JSON and --set, and what is wrong with them by name."""

import dataclasses
import json
import math

import pytest

from trillion_moe.data.examples import DataConfig
from trillion_moe.run_config import (
    OptimizerConfig,
    RunConfig,
    RunConfigError,
    TrainConfig,
    from_json,
    load_run_config,
    to_json,
)
from trillion_moe.transforms import LoRAConfig

PLAIN = RunConfig(model="m", data="rows.jsonl")
FULL = RunConfig(
    model="m",
    data="größe.jsonl",
    eval_data="eval.jsonl",
    output="out",
    seed=2**32 - 1,
    dtype="bfloat16",
    lora=LoRAConfig(rank=4, targets=("routed_experts", "head"), experts=((1, (0, 2)), (3, (1, 5)))),
    examples=DataConfig(supervise="last", max_length=2, too_long="truncate", effort=None),
    optimizer=OptimizerConfig(lr=0.1, clip=None),
    train=TrainConfig(steps=7, dropout=0.5, patience=1),
)


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe -> its path."""

    def recipe(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return recipe


def changed(*assignments: str, of: RunConfig = PLAIN, tmp) -> RunConfig:
    path = tmp / "of.json"
    path.write_text(to_json(of))
    return load_run_config(str(path), assignments)


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PLAIN, FULL, dataclasses.replace(PLAIN, lora=None)])
def test_json_there_and_back(config) -> None:
    """Tuples are tuples again, also nested ones."""
    text = to_json(config)
    assert from_json(text, "x") == config
    assert hash(from_json(text.encode(), "x")) == hash(config)


def test_defaults() -> None:
    """Those that the documentation names."""
    assert (PLAIN.lora.rank, PLAIN.lora.alpha, PLAIN.optimizer.lr) == (8, 16.0, 2e-4)
    assert json.loads(to_json(PLAIN)).keys() == {field.name for field in dataclasses.fields(RunConfig)}


def test_left_out_fields_have_their_defaults() -> None:
    given = {"model": "m", "data": "d", "train": {"epochs": 2}, "lora": {"rank": 3}}
    expected = RunConfig("m", "d", train=TrainConfig(epochs=2), lora=LoRAConfig(rank=3))
    assert from_json(json.dumps(given), "x") == expected


# --- where a configuration comes from ---------------------------------------------------------------------------------

RECIPE = """
from trillion_moe.run_config import RunConfig
def config():
    return RunConfig(model="m", data="rows.jsonl", seed=3)
"""
SPOILT = (
    RECIPE.replace("return", "made =")
    + """
    object.__setattr__(made, "dtype", {})
    return made
"""
)


def test_sources(recipe, tmp_path) -> None:
    """A name of ours, a Python file, a JSON file."""
    assert load_run_config("lora") == RunConfig(model="", data="")
    assert load_run_config(recipe(RECIPE)) == dataclasses.replace(PLAIN, seed=3)
    assert load_run_config(recipe(to_json(FULL), "full.json")) == FULL


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", r"mine.py must define config\(\) -> trillion_moe.RunConfig, not NoneType"),
        ("config = 3", r"mine.py must define config\(\) -> trillion_moe.RunConfig, not NoneType"),
        ("def config(): return {}", r"mine.py must define config\(\) -> trillion_moe.RunConfig, not dict"),
        ("def config(:", "mine.py: SyntaxError: "),
        ("import no_such_module", "mine.py: ModuleNotFoundError: No module named 'no_such_module'"),
        (RECIPE.replace("seed=3", "sead=3"), "mine.py: TypeError: .*'sead'"),
        (RECIPE.replace("seed=3", "seed=-3"), r"mine.py: ValueError: seed = -3: legal is 0 to 2\*\*32 - 1"),
        (SPOILT.format("'int8'"), r"mine.py: 1 problem\(s\)\n  - dtype: Input should be 'float32', "),
        (SPOILT.format("float"), "mine.py: Object of type type is not JSON serializable; legal are plain values"),
    ],
)
def test_recipes_that_are_none(recipe, text, what) -> None:
    with pytest.raises(RunConfigError, match=what):
        load_run_config(recipe(text))


def test_files_that_are_none(recipe, tmp_path) -> None:
    unknown = r"no configuration 'lara': legal are FILE.py, FILE.json, or one of ours: .*\blora\b"
    for source, what in (
        ("lara", unknown),
        (str(tmp_path / "no.py"), "no configuration '.*no.py': legal are FILE.py"),
        (str(tmp_path / "no.json"), "no.json: .*No such file"),
        (recipe("{", "a.json"), "a.json: Expecting property name"),
        (recipe("[]", "b.json"), "b.json holds list, not an object"),
        (recipe('{"model": "a", "model": "b"}', "c.json"), "c.json: 'model' is there twice"),
    ):
        with pytest.raises(RunConfigError, match=what):
            load_run_config(source)


def test_a_recipe_of_another_kind_is_refused() -> None:
    """`configs/` holds models too."""
    with pytest.raises(RunConfigError, match=r"quickstart.py must define config\(\) -> .*, not ModelConfig"):
        load_run_config("quickstart")


# --- --set ------------------------------------------------------------------------------------------------------------


def test_assignments(tmp_path) -> None:
    """A value is JSON where it can be, else the text; the last one counts."""
    for assignment, expected in (
        ("seed=5", {"seed": 5}),
        ("output=runs/a=b", {"output": "runs/a=b"}),
        ("eval_data=e.jsonl", {"eval_data": "e.jsonl"}),
        ('output="5"', {"output": "5"}),
        ("lora=null", {"lora": None}),
        ("dtype=float16", {"dtype": "float16"}),
        ("train.epochs=3", {"train": TrainConfig(epochs=3)}),
        ("train.remat=false", {"train": TrainConfig(remat=False)}),
        ("optimizer.lr=3e-4", {"optimizer": OptimizerConfig(lr=3e-4)}),
        ("optimizer.lr=1", {"optimizer": OptimizerConfig(lr=1.0)}),
        ("optimizer.clip=null", {"optimizer": OptimizerConfig(clip=None)}),
        ("examples.effort=null", {"examples": DataConfig(effort=None)}),
        ('lora.targets=["mla", "head"]', {"lora": LoRAConfig(targets=("mla", "head"))}),
        ("lora.experts=[0,2]", {"lora": LoRAConfig(experts=(0, 2))}),
        ("lora.experts=[[1,[0,2]],[2,[1]]]", {"lora": LoRAConfig(experts=((1, (0, 2)), (2, (1,))))}),
        ('train={"steps": 4}', {"train": TrainConfig(steps=4)}),
    ):
        assert changed(assignment, tmp=tmp_path) == dataclasses.replace(PLAIN, **expected), assignment
    assert changed("seed=1", "seed=2", tmp=tmp_path).seed == 2
    without = dataclasses.replace(PLAIN, lora=None)
    assert changed("lora.rank=2", of=without, tmp=tmp_path).lora == LoRAConfig(rank=2)


@pytest.mark.parametrize("assignment", ["seed", "=3", ""])
def test_what_is_no_assignment(assignment, tmp_path) -> None:
    with pytest.raises(RunConfigError, match=f"--set {assignment}: legal is field.field=value"):
        changed(assignment, tmp=tmp_path)


def test_a_field_within_a_value(tmp_path) -> None:
    with pytest.raises(RunConfigError, match=r"--set seed.x: seed is 0, which has no fields"):
        changed("seed.x=1", tmp=tmp_path)


def test_assignments_are_named_in_errors(tmp_path) -> None:
    with pytest.raises(RunConfigError, match=r"of.json with --set seed=1, sead=2: 1 problem\(s\)"):
        changed("seed=1", "sead=2", tmp=tmp_path)


# --- what is not legal ------------------------------------------------------------------------------------------------

RUN = "no such field; legal here: model, data, eval_data, eval_rows, output, mesh, seed, dtype, lora, examples, "
WRONG = [
    ("foo=1", f"foo: {RUN}"),
    ("foo.bar=1", f"foo: {RUN}"),
    ("train.lr=1", "train.lr: no such field; legal here: epochs, steps, batch_size, accumulate, remat, pack, "),
    ("lora.r=1", "lora.r: no such field; legal here: rank, alpha, targets, rslora, routed, experts, dtype"),
    ("optimizer.beta=1", "optimizer.beta: no such field; legal here: lr, warmup, final, b1, b2, eps, weight_decay, "),
    ("examples.max=1", "examples.max: no such field; legal here: supervise, max_length, too_long, on_bad, raw, "),
    ("model=5", "model: Input should be a valid string (given: 5)"),
    ("seed=1.5", "seed: Input should be a valid integer (given: 1.5)"),
    ("seed=true", "seed: Input should be a valid integer (given: True)"),
    ('lora.rank="2"', "lora.rank: Input should be a valid integer (given: '2')"),
    ("lora.alpha=nan", "lora.alpha: Input should be a valid number (given: 'nan')"),
    ("lora.alpha=NaN", "lora.alpha: Input should be a finite number (given: nan)"),
    ("optimizer.lr=1e400", "optimizer.lr: Input should be a finite number (given: inf)"),
    ("optimizer.lr=true", "optimizer.lr: Input should be a valid number (given: True)"),
    ("train.remat=1", "train.remat: Input should be a valid boolean (given: 1)"),
    ("train.steps=2.0", "train.steps: Input should be a valid integer (given: 2.0)"),
    ("train=[]", "train: Input should be an object"),
    ("lora.targets=mla", "lora.targets: Input should be a valid array (given: 'mla')"),
    ("lora.experts=3", "lora.experts: Input should be a valid array (given: 3)"),
    ("dtype=int8", "dtype: Input should be 'float32', 'bfloat16' or 'float16' (given: 'int8')"),
    ("lora.routed=no", "lora.routed: Input should be 'independent', 'shared_a' or 'shared' (given: 'no')"),
    ("lora.rank=0", "lora: rank = 0: legal is an integer >= 1"),
    ('lora.targets=["all"]', "lora: target 'all' is no group; legal: attention, kda, mla, "),
    ("lora.dtype=int8", "lora: dtype = 'int8': legal is float32, bfloat16, float16, float64"),
    ("examples.supervise=all", "supervise = 'all': legal is one of ('assistant', 'last', 'answers')"),
    ("examples.max_length=1", "max_length = 1: legal is None or an integer of at least 2"),
    ("examples.too_long=drop", "too_long = 'drop' has no effect while max_length is None"),
    ("seed=-1", "seed = -1: legal is 0 to 2**32 - 1"),
    ("seed=4294967296", "seed = 4294967296: legal is 0 to 2**32 - 1"),
    ("eval_rows=-1", "eval_rows = -1: legal is at least 0"),
    *((f"train.{name}=0", f"train: {name} = 0: legal is at least 1") for name in (
        "epochs", "steps", "batch_size", "accumulate", "keep", "patience")),
    *((f"train.{name}=-1", f"train: {name} = -1: legal is at least 0") for name in ("eval_every", "save_every")),
    ("train.dropout=1", "train: dropout = 1.0: legal is at least 0 and below 1"),
    *((f"optimizer.{name}=-1", f"optimizer: {name} = -1.0: legal is at least 0") for name in ("lr", "weight_decay")),
    *((f"optimizer.{name}=1.5", f"optimizer: {name} = 1.5: legal is 0 to 1") for name in ("warmup", "final")),
    *((f"optimizer.{name}=1", f"optimizer: {name} = 1.0: legal is at least 0 and below 1") for name in ("b1", "b2")),
    ("optimizer.eps=0", "optimizer: eps = 0.0: legal is above 0"),
    ("optimizer.clip=0", "optimizer: clip = 0.0: legal is above 0, or null for off"),
]  # fmt: skip


@pytest.mark.parametrize(("assignment", "what"), WRONG, ids=[assignment for assignment, _ in WRONG])
def test_a_wrong_field_is_named(assignment, what, tmp_path) -> None:
    with pytest.raises(RunConfigError) as raised:
        changed(assignment, tmp=tmp_path)
    head, *found = str(raised.value).splitlines()
    assert head.endswith(f"of.json with --set {assignment}: 1 problem(s)")
    assert what in found[-1]


@pytest.mark.parametrize(
    ("assignments", "what"),
    [
        (["eval_data=e", "eval_rows=3"], "eval_data and eval_rows are both given: legal is one of them"),
        (["lora=null", "train.dropout=0.5"], "train.dropout = 0.5 without lora: legal is 0"),
        (["train.patience=2"], "train.patience = 2 has no effect without evaluations: give eval_data or eval_rows"),
        (["train.patience=2", "eval_rows=3", "train.eval_every=0"], "train.patience = 2 has no effect"),
    ],
)
def test_fields_that_do_not_fit_together(assignments, what, tmp_path) -> None:
    with pytest.raises(RunConfigError, match=what):
        changed(*assignments, tmp=tmp_path)


def test_all_problems_come_at_once(tmp_path) -> None:
    assignments = ["foo=1", "train.lr=1", "seed=x", "optimizer.lr=-1", "optimizer.b1=1"]
    with pytest.raises(RunConfigError) as raised:
        changed(*assignments, tmp=tmp_path)
    message = str(raised.value)
    assert ": 4 problem(s)\n" in message
    for what in ("foo: ", "train.lr: ", "seed: ", "optimizer: lr = -1.0: legal is at least 0; b1 = 1.0: legal is "):
        assert f"\n  - {what}" in message


def test_what_is_missing() -> None:
    with pytest.raises(RunConfigError) as raised:
        from_json("{}", "mine")
    head, *found = str(raised.value).splitlines()
    assert head == "mine: 2 problem(s)"
    assert [line.split(":")[0] for line in found] == ["  - model", "  - data"]
    assert all("equired" in line for line in found)


def test_values_that_are_no_numbers_are_refused_in_python() -> None:
    with pytest.raises(ValueError, match="lr = nan: legal is at least 0"):
        OptimizerConfig(lr=math.nan)


def test_a_field_without_its_part_is_told_where_it_belongs() -> None:
    with pytest.raises(RunConfigError, match=r"lr: no such field; legal here: model, .* \(or optimizer.lr\?\)"):
        load_run_config("lora", ["lr=3e-4"])


def test_a_recipe_that_ends_the_program(tmp_path) -> None:
    (tmp_path / "recipe.py").write_text("raise SystemExit(0)")
    with pytest.raises(RunConfigError, match=r"recipe\.py: SystemExit: 0"):
        load_run_config(str(tmp_path / "recipe.py"))
