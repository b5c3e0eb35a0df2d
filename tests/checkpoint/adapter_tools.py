"""Adapters that a test can take apart, spoil and write again, and models to put them on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.checkpoint.tools import GOLDENS, Tensor, read_tensors, write_tensors
from tests.tiny import LINEAR, MOE, SHORT, tiny_k3

from trillion_moe.checkpoint import CheckpointError
from trillion_moe.checkpoint.adapters import read_adapter
from trillion_moe.checkpoint.names import tree_leaves
from trillion_moe.config import VisionConfig
from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model
from trillion_moe.transforms import LoRAConfig, add_lora
from trillion_moe.transforms.adapters import with_lora
from trillion_moe.transforms.targets import places
from trillion_moe.weights import LoRA

SHARED, EXPERTS = GOLDENS / "lora" / "attn_shared", GOLDENS / "lora" / "attn_shared_experts"
PEFT = "base_model.model."
FILE = "adapter_model.safetensors"


@dataclasses.dataclass
class Adapter:
    """Tensors and config of an adapter, to be changed in place."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Adapter":
        return cls(read_tensors(folder / FILE), json.loads((folder / "adapter_config.json").read_text()))

    @classmethod
    def of(cls, rank: int, alpha: float, **config: Any) -> "Adapter":
        plain = {"peft_type": "LORA", "peft_version": "0.21.2", "r": rank, "lora_alpha": alpha, "target_modules": []}
        return cls({}, plain | config)

    def put(self, module: str, a: Any, b: Any, dtype: str = "F32") -> None:
        for factor, array in (("A", a), ("B", b)):
            self.put_factor(f"{PEFT}{module}.lora_{factor}.weight", array, dtype)

    def put_factor(self, name: str, array: Any, dtype: str = "F32") -> None:
        self.tensors[name] = Tensor.of(dtype, array)

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        write_tensors(folder / FILE, self.tensors)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        return folder


def load_adapter(model: Any, folder: Path, **options: Any) -> Any:
    """What `tm.load_adapter` does."""
    return with_lora(model, read_adapter(folder, model, **options))


def refused(model: Any, folder: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load_adapter(model, folder, **options)
    return caught.value.findings


def adapters(model: Any) -> dict[str, LoRA]:
    """The adapters of a model, layer by layer, in numpy arrays and without their bases."""
    found = {}
    for place in places(model)[0]:
        if isinstance(place.leaf, LoRA):
            for r, name in enumerate(place.names):
                row = (r,) if len(place.names) > 1 else ()
                a, b, slots = (None if x is None else np.asarray(x)[row] for x in parts(place.leaf))
                found[name] = LoRA(None, a, b, slots, place.leaf.scaling)
    return found


def parts(lora: LoRA) -> tuple[Any, Any, Any]:
    return lora.a, lora.b, lora.slots


def assert_same(found: dict[str, LoRA], expected: dict[str, LoRA]) -> None:
    """Names, scaling, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, lora in expected.items():
        assert found[name].scaling == lora.scaling, name
        for mine, theirs in zip(parts(found[name]), parts(lora), strict=True):
            assert (mine is None) == (theirs is None), name
            if theirs is not None:
                assert mine.dtype == theirs.dtype, name
                np.testing.assert_array_equal(mine, theirs, err_msg=name)


def adapted(model: Any, *configs: LoRAConfig) -> Any:
    """The model with adapters as `add_lora` lays them out, every a and b drawn; what is drawn compiles nothing."""
    blueprint = Model(model.config, plan=model.plan)
    for cfg in configs:
        blueprint = add_lora(blueprint, cfg)
    bases, (leaves, treedef) = dict(tree_leaves(model)[0]), tree_leaves(blueprint)
    rng = np.random.default_rng(1)

    def one(spec: Any) -> Any:
        if spec is None or spec.dtype == "int32":
            return spec and spec.init(jax.random.key(0), spec.shape, spec.dtype)
        return jnp.asarray(0.1 * rng.normal(size=spec.shape), spec.dtype)

    def leaf(path: str, w: Any) -> Any:
        return LoRA(bases[path], *map(one, parts(w)), w.scaling) if isinstance(w, LoRA) else bases[path]

    return treedef.unflatten([leaf(path, w) for path, w in leaves])


TOWER = VisionConfig(
    hidden_size=32, num_layers=2, num_heads=2, qkv_size=32, mlp_size=48, patch_size=14, text_hidden_size=64,
    pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
)  # fmt: skip
THREE = dataclasses.replace(MOE, num_experts=3, hidden_size=24, latent_size=None, latent_norm=False)


def linear(seed: int = 0) -> Model:
    """A Kimi Linear: KDA with a dense MLP, MLA and KDA with 3 experts of 24 on a width of 64."""
    return filled(Model(tiny_k3(**{**LINEAR, **SHORT, "moe": THREE})), seed)


def repeating() -> Model:
    """A Kimi Linear whose layers 1 to 3 are one segment that repeats."""
    kinds = {"num_layers": 4, "attention": ("kda",) * 4, "mlp": ("dense", "moe", "moe", "moe")}
    cfg = tiny_k3(**LINEAR | kinds | {"moe": THREE})
    return filled(Model(cfg, plan=depth_plan(cfg, scan=True)))


def k3(**changes: Any) -> Model:
    """A Kimi K3 of three layers: 8 experts of 32 on a latent of 32."""
    return filled(Model(tiny_k3(**SHORT | changes)))


def filled(blueprint: Model, seed: int = 0) -> Model:
    """Specs to arrays without compiling a generator for each shape."""
    rng = np.random.default_rng(seed)

    def one(spec: Any) -> jax.Array:
        vector = len(spec.shape) - ("repeats" in spec.axes) == 1
        return jnp.asarray(vector + 0.1 * rng.normal(size=spec.shape), spec.dtype)

    return jax.tree.map(one, blueprint)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)
