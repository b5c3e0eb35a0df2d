"""Small Kimi K3s whose depth repeats, with the structure of the real one."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillion_moe.config import ModelConfig
from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model, forward
from trillion_moe.transforms import LoRAConfig, add_lora
from trillion_moe.weights import LoRA

# Compiles three times faster, and keeps two programs with the same products bit-equal: at the default level the code of
# element-wise loops, and with it the last bit of an exp, depends on what they are fused with; so it does without fusion
# emitters.
_QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": True}


def _deepened(cfg: Any, layers: int) -> ModelConfig:
    kinds = {"attention": ("kda", "mla") * (layers // 2), "mlp": ("dense", *("moe",) * (layers - 1))}
    moe = dataclasses.replace(cfg.moe, num_experts=5, top_k=2)
    return dataclasses.replace(cfg, num_layers=layers, attn_res_block=2, moe=moe, **kinds)


@pytest.fixture(scope="session")
def quick() -> Callable[[Callable], Callable]:
    """`jax.jit` for tests of whole layers."""
    return lambda function: jax.jit(function, compiler_options=_QUICK)


@pytest.fixture(scope="session")
def deepened() -> Callable[[ModelConfig, int], ModelConfig]:
    """The same model with another number of layers."""
    return _deepened


@pytest.fixture(scope="session")
def config(goldens: Path) -> ModelConfig:
    return _deepened(ModelConfig.from_file(goldens / "config" / "kimi_k3_a.json"), 8)


@pytest.fixture(scope="session")
def linear_config(goldens: Path) -> ModelConfig:
    return ModelConfig.from_file(goldens / "config" / "kimi_linear_a.json")


@pytest.fixture(scope="session")
def scanned(config: ModelConfig) -> Model:
    """Blueprint: layers 0-1 (KDA and dense, MLA and MoE), then 2-7 as three repeats of two (KDA, MLA, both MoE)."""
    return Model(config, plan=depth_plan(config, scan=True))


@pytest.fixture(scope="session")
def unrolled(config: ModelConfig) -> Model:
    return Model(config, plan=depth_plan(config, scan=False))


@pytest.fixture(scope="session")
def model(scanned: Model) -> Model:
    return _filled(scanned)


@pytest.fixture
def small(config: ModelConfig) -> Iterator[Model]:
    """A model to run: layers 0 (KDA, dense), 1-2 as two repeats of one (KDA, MoE), 3 (MLA, MoE).

    In float64, so that two ways to the same logits can be told from two results: in float32 a thousandfold of the
    rounding error of the weights is in the logits.
    """
    depth = {"attention": ("kda", "kda", "kda", "mla"), "mlp": ("dense", "moe", "moe", "moe")}
    cfg = dataclasses.replace(config, num_layers=4, attn_res_block=1, **depth)
    with jax.enable_x64(True):
        model = _filled(Model(cfg, plan=depth_plan(cfg, scan=True)), "float64")
        model.dtype = "float64"
        yield model


@pytest.fixture(scope="session")
def two_layers(config: ModelConfig) -> Model:
    """A model to differentiate, as it compiles fast: one layer (KDA, MoE), twice."""
    cfg = dataclasses.replace(config, num_layers=2, attn_res_block=1, attention=("kda", "kda"), mlp=("moe", "moe"))
    return _filled(Model(cfg, plan=depth_plan(cfg, scan=True)))


def _filled(blueprint: Any, dtype: str | None = None) -> Any:
    """Specs to arrays without compiling a generator for each: matrices N(0, 0.1^2), vectors 1 + N(0, 0.1^2)."""
    rng = np.random.default_rng(0)

    def one(spec):
        vector = len(spec.shape) - ("repeats" in spec.axes) == 1
        return jnp.asarray(vector + 0.1 * rng.normal(size=spec.shape), dtype or spec.dtype)

    return jax.tree.map(one, blueprint)


@pytest.fixture(scope="session")
def adapted(quick: Callable) -> Callable[[Any, LoRAConfig], Any]:
    """A model of arrays with fresh adapters, drawn in one program and not in one per shape."""
    return lambda model, cfg: quick(lambda model, key: add_lora(model, cfg, key))(model, jax.random.key(0))


@pytest.fixture(scope="session")
def moved() -> Callable[[Any], Any]:
    """The same model with every b drawn: adapters that have been trained."""

    def move(model: Any) -> Any:
        rng = np.random.default_rng(1)

        def one(w):
            if not isinstance(w, LoRA):
                return w
            return dataclasses.replace(w, b=jnp.asarray(0.1 * rng.normal(size=w.b.shape), w.b.dtype))

        return jax.tree.map(one, model, is_leaf=lambda w: isinstance(w, LoRA))

    return move


@pytest.fixture(scope="session")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(0, 400, (2, 7)), jnp.int32)


@pytest.fixture(scope="session")
def logits(tokens: jax.Array, quick: Callable) -> Callable[[Any], jax.Array]:
    return quick(lambda model: forward(model, tokens)[0])
