"""One model on one device and over a mesh, side by side, in float64: what is left then is summation order."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from tests.tiny import KDA, LINEAR, MLA, MOE, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.balance import BalanceConfig
from trillion_moe.config import VisionConfig
from trillion_moe.layers.segments import depth_plan
from trillion_moe.sharding import Layout
from trillion_moe.steps import grad_step
from trillion_moe.transforms.targets import places

HEADS = {"kda": dataclasses.replace(KDA, num_heads=4, a_log_shape=None), "mla": dataclasses.replace(MLA, num_heads=4)}
HEADS_LINEAR = {kind: dataclasses.replace(LINEAR[kind], num_heads=4) for kind in ("kda", "mla")}
VISION = VisionConfig(
    hidden_size=32, num_layers=1, num_heads=2, qkv_size=32, mlp_size=64, patch_size=14, text_hidden_size=64,
    pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
)  # fmt: skip
TWO = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
FOUR = {"num_layers": 4, "attention": ("kda", "mla") * 2, "mlp": ("moe",) * 4}  # one residual block of two, repeated
EIGHT = {"num_layers": 8, "attention": ("kda", "mla") * 4, "mlp": ("moe",) * 8, "attn_res_block": 3}
B, T = 8, 32
DOCUMENTS = [1] * 9 + [2] * 14 + [3] * 5 + [0] * 4  # over 2 or 4 devices some straddle, over 8 one has only padding


def problem(name: str):
    """Model, batch and options of the loss: what is trained and how differs, so that meshes meet every feature."""
    random = np.random.default_rng(0)
    tokens = random.integers(4, 300, (B, T)).astype(np.int32)
    segments = np.array([np.roll(DOCUMENTS, 4 * row) if row % 2 else DOCUMENTS for row in range(B)], np.int32)
    segments[3] = 1
    packed = {"tokens": tokens, "segments": segments}
    match name:
        case "all weights":
            return filled(tiny_k3(**TWO, **HEADS)), packed, {}
        case "stacked":
            return filled(tiny_k3(**FOUR, **HEADS), plan=depth_plan(tiny_k3(**FOUR, **HEADS), scan=True)), packed, {}
        case "five layers":
            return filled(tiny_k3(**HEADS)), packed, {}
        case "five balanced":
            balance = BalanceConfig(method="quantile", sequence_loss=0.1)
            return filled(tiny_k3(**HEADS)), packed, {"balance": balance}
        case "eight layers":  # blocks of three, which end within the groups of a stage
            return filled(tiny_k3(**EIGHT, **HEADS)), packed, {}
        case "five adapters":
            lora = tm.LoRAConfig(rank=4, targets=("attention", "shared_experts", "latent"))
            model = tm.quantize_experts(filled(tiny_k3(**HEADS, moe=dataclasses.replace(MOE, hidden_size=64))))
            return stirred(tm.add_lora(model, lora, jax.random.key(1))), packed, {}
        case "five pictures":
            tokens[0, 3:7] = tokens[5, 20:24] = 3
            images = tm.ImageBatch(random.normal(size=(32, 3, 14, 14)), ((1, 4, 4), (1, 4, 4)))
            return filled(tiny_k3(**HEADS, vision=VISION)), packed | {"images": images}, {}
        case "five linear":
            return filled(tiny_k3(**LINEAR | HEADS_LINEAR)), {"tokens": tokens}, {}
        case "adapters":
            targets = ("attention", "shared_experts", "latent", "routed_experts")
            lora = tm.LoRAConfig(rank=4, targets=targets, routed="independent")
            wide = tiny_k3(**TWO, **HEADS, moe=dataclasses.replace(MOE, hidden_size=64))  # 32 a device when cut in two
            model = tm.add_lora(tm.quantize_experts(filled(wide)), lora, jax.random.key(1))
            return stirred(model), packed | {"loss_mask": random.integers(0, 2, (B, T)).astype(bool)}, {}
        case "some experts":
            lora = tm.LoRAConfig(rank=4, targets=("routed_experts",), experts=(1, 6), routed="shared_a")
            model = tm.add_lora(filled(tiny_k3(**TWO, **HEADS)), lora, jax.random.key(1))
            return stirred(model), {"tokens": tokens}, {"remat": False}
        case "kimi linear":
            return filled(tiny_k3(**LINEAR | TWO | HEADS_LINEAR)), {"tokens": tokens}, {"remat": False}
        case "pictures":
            tokens[0, 3:7] = tokens[5, 20:24] = 3
            images = tm.ImageBatch(random.normal(size=(32, 3, 14, 14)), ((1, 4, 4), (1, 4, 4)))
            return filled(tiny_k3(**TWO, **HEADS, vision=VISION)), packed | {"images": images}, {}
    raise ValueError(name)


def by_layer(grads) -> dict[str, np.ndarray]:
    """Gradients by the name of their array, whatever the depth plan."""
    found = {}
    for p in places(grads, inside=True)[0]:
        rows = [p.leaf] if p.rows is None else [p.leaf[r] for r in p.rows]
        found |= {name: np.asarray(row) for name, row in zip(p.names, rows, strict=True)}
    return found


def stirred(model):
    """Adapters whose b is not 0, so that every a has a gradient."""
    key = jax.random.key(2)
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(key, x.shape, x.dtype) if _adapter(x) else x, model)


def _adapter(x) -> bool:
    return np.issubdtype(x.dtype, np.floating) and 4 in x.shape[-2:]


def gradients(name: str, layout: Layout | None):
    """-> loss, metrics, gradients by name, where the arrays of a trained model would lie."""
    with jax.enable_x64(True):
        model, batch, options = problem(name)
        model = jax.tree.map(lambda x: x.astype("float64") if np.issubdtype(x.dtype, np.floating) else x, model)
        model.dtype = "float64"
        model = model if layout is None else tm.place(model, layout)
        trained, frozen = tm.partition(model, trainable="lora" if name in ADAPTERS else "all")
        with mock.patch("trillion_moe.layers.moe.CHUNK", 8):  # as many chunks as are asked for, of the few rows here
            grads, sums = jax.jit(functools.partial(grad_step, **options))(trained, frozen, batch)
        for grad, array in zip(*map(jax.tree.leaves, (grads, trained)), strict=True):
            assert grad.sharding.is_equivalent_to(array.sharding, grad.ndim)
        sums = jax.device_get(sums)
        return sums.pop("loss"), sums, by_layer(grads)


ADAPTERS = ("adapters", "some experts", "five adapters")
one_device = functools.cache(lambda name: gradients(name, None))

WITHIN = {"rules": {"expert_mlp": ("tp",)}}  # experts cut inside, too


def assert_as_on_one_device(name: str, layout: Layout) -> None:
    """Loss, counts and every gradient; an error of one part in 1e9 fails."""
    loss, sums, grads = gradients(name, layout)
    one_loss, one_sums, one_grads = one_device(name)
    assert loss == pytest.approx(one_loss, rel=1e-11)
    assert sums.keys() - one_sums.keys() == ({"exchange"} if layout.size("ep") > 1 else set())
    for metric, value in one_sums.items():
        np.testing.assert_allclose(sums[metric], value, rtol=1e-11, err_msg=metric)
    assert sums["dropped"] == 0
    assert grads.keys() == one_grads.keys()
    for parameter, grad in one_grads.items():
        difference = np.linalg.norm(grads[parameter] - grad)
        assert difference <= 1e-9 * np.linalg.norm(grad), parameter
        if parameter.endswith("router.weight"):  # fault 37: through the weights of experts that are elsewhere, too
            assert np.linalg.norm(grad) > 0
