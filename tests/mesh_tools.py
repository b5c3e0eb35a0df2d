"""One model on one device and over a mesh, side by side, in float64: what is left then is summation order."""

import dataclasses
import functools
import math
from typing import Any
from unittest import mock

import jax
import numpy as np
from tests.tiny import KDA, LINEAR, MLA, MOE, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.balance import BalanceConfig
from trillion_moe.config import VisionConfig
from trillion_moe.layers.segments import depth_plan
from trillion_moe.programs import add
from trillion_moe.programs import gradients as grads_of
from trillion_moe.sharding import Layout
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
DEEP = {"num_layers": 8, "attention": ("kda", "mla") * 4, "mlp": ("dense",) + ("moe",) * 7}
DEPTHS = {"": TWO, "five": {}, "eight": EIGHT, "deep": DEEP}
"""By what stands behind a problem's name. Stages need more than two layers: of five, three of a kind lie on the first;
of eight, residual blocks of three end within groups; deep ones are four groups of two, behind a layer before all stages
and with an empty slot at the end."""
B, T = 8, 32
DOCUMENTS = [1] * 9 + [2] * 14 + [3] * 5 + [0] * 4  # over 2 or 4 devices some straddle, over 8 one has only padding


def problem(name: str):
    """Model, batch and options of the loss: what is trained and how differs, so that meshes meet every feature.

    name: a feature, or a feature and one of `DEPTHS`, as in "pictures, five".
    """
    feature, _, depth = name.partition(", ")
    layers, random = DEPTHS[depth], np.random.default_rng(0)
    tokens = random.integers(4, 300, (B, T)).astype(np.int32)
    segments = np.array([np.roll(DOCUMENTS, 4 * row) if row % 2 else DOCUMENTS for row in range(B)], np.int32)
    segments[3] = 1
    packed = {"tokens": tokens, "segments": segments}
    match feature:
        case "all weights":
            return filled(tiny_k3(**layers, **HEADS)), packed, {}
        case "nothing recomputed":
            return filled(tiny_k3(**layers, **HEADS)), packed, {"remat": False}
        case "balanced":
            balance = BalanceConfig(method="quantile", sequence_loss=0.1)
            return filled(tiny_k3(**layers, **HEADS)), packed, {"balance": balance}
        case "stacked":
            cfg = tiny_k3(**layers if depth else FOUR, **HEADS)
            return filled(cfg, plan=depth_plan(cfg, scan=True)), packed, {}
        case "adapters":
            targets = ("attention", "shared_experts", "latent")
            targets += () if depth == "five" else ("routed_experts",)  # these take two thirds more to compile
            lora = tm.LoRAConfig(rank=4, targets=targets, routed="independent")
            wide = tiny_k3(**layers, **HEADS, moe=dataclasses.replace(MOE, hidden_size=64))  # 32 a device, cut in two
            model = tm.add_lora(tm.quantize_experts(filled(wide)), lora, jax.random.key(1))
            return stirred(model), packed | {"loss_mask": random.integers(0, 2, (B, T)).astype(bool)}, {}
        case "some experts":
            lora = tm.LoRAConfig(rank=4, targets=("routed_experts",), experts=(1, 6), routed="shared_a")
            model = tm.add_lora(filled(tiny_k3(**layers, **HEADS)), lora, jax.random.key(1))
            return stirred(model), {"tokens": tokens}, {"remat": False}
        case "kimi linear":
            return filled(tiny_k3(**LINEAR | layers | HEADS_LINEAR)), {"tokens": tokens}, {"remat": False}
        case "pictures":
            tokens[0, 3:7] = tokens[5, 20:24] = MEDIA
            images = tm.ImageBatch(random.normal(size=(32, 3, 14, 14)), ((1, 4, 4), (1, 4, 4)))
            return filled(tiny_k3(**layers, **HEADS, vision=VISION)), packed | {"images": images}, {}
    raise ValueError(name)


MEDIA = tiny_k3().media_id


def another(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of the same shape with other tokens, and, where there are documents, a row less."""
    tokens = batch["tokens"]
    changed = {"tokens": np.where(tokens == MEDIA, tokens, 4 + (tokens + 3) % 296)}
    if "segments" in batch:
        changed["segments"] = np.where(np.arange(B)[:, None] == 2, 0, batch["segments"])
    return batch | changed


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


@dataclasses.dataclass(frozen=True)
class Found:
    """Sums of the loss and its metrics, and gradients by name."""

    loss: float
    sums: dict[str, Any]
    grads: dict[str, np.ndarray]


@functools.cache
def _in_float64(name: str):
    model, batch, options = problem(name)
    with jax.enable_x64(True):
        model = jax.tree.map(lambda x: x.astype("float64") if np.issubdtype(x.dtype, np.floating) else x, model)
    model.dtype = "float64"
    return model, batch, options


def gradients(name: str, layout: Layout | None, *, passes: int) -> Found:
    """Of one batch, or of two added up as the trainer does; arrays lie where those of a trained model would."""
    with jax.enable_x64(True):
        model, batch, options = _in_float64(name)
        model = model if layout is None else tm.place(model, layout)
        trained, frozen = tm.partition(model, trainable="lora" if name.split(",")[0] in ADAPTERS else "all")
        step = functools.partial(grads_of, key=jax.random.key(0), dropout=0.0, **{"remat": True} | options)
        with mock.patch("trillion_moe.layers.moe.CHUNK", 8):  # as many chunks as are asked for, of the few rows here
            grads, sums = step(trained, frozen, batch)
            if passes == 2:
                grads, sums = add(grads, sums, step(trained, frozen, another(batch)))
        for grad, array in zip(*map(jax.tree.leaves, (grads, trained)), strict=True):
            assert grad.sharding.is_equivalent_to(array.sharding, grad.ndim)
        sums = jax.device_get(sums)
        return Found(float(sums.pop("loss")), sums, by_layer(grads))


ADAPTERS = ("adapters", "some experts")
TWO_PASSES = ("stacked", "adapters", "balanced", "pictures")  # of the tests
one_device = functools.cache(functools.partial(gradients, layout=None))

WITHIN = {"rules": {"expert_mlp": ("tp",)}}  # experts cut inside, too
LOSS_BAR, GRADIENT_BAR = 1e-11, 1e-9


@dataclasses.dataclass(frozen=True)
class Differences:
    """Relative ones, of the loss and of the gradient, named, whose own is greatest."""

    loss: float
    gradient: float
    parameter: str

    @property
    def small(self) -> bool:
        return self.loss <= LOSS_BAR and self.gradient <= GRADIENT_BAR


def differences(found: Found, expected: Found, layout: Layout) -> Differences:
    """AssertionError for counts that are not the same, or gradients that are not there."""
    assert found.sums.keys() - expected.sums.keys() == ({"exchange"} if layout.size("ep") > 1 else set())
    for metric, value in expected.sums.items():
        np.testing.assert_allclose(found.sums[metric], value, rtol=LOSS_BAR, err_msg=metric)
    assert found.sums["dropped"] == 0
    assert found.grads.keys() == expected.grads.keys()
    apart = {}
    for parameter, grad in expected.grads.items():
        norm, difference = (float(np.linalg.norm(x)) for x in (grad, found.grads[parameter] - grad))
        apart[parameter] = difference / norm if norm else math.inf if difference else 0.0
        if parameter.endswith("router.weight"):  # fault 37: through the weights of experts that are elsewhere, too
            assert norm > 0
    at = int(np.argmax(list(apart.values())))  # of NaN, too
    return Differences(abs(found.loss / expected.loss - 1), list(apart.values())[at], list(apart)[at])


def assert_as_on_one_device(name: str, layout: Layout) -> None:
    """Loss, counts and every gradient; an error of one part in 1e9 fails."""
    passes = 1 + (name.split(",")[0] in TWO_PASSES)
    found = differences(gradients(name, layout, passes=passes), one_device(name, passes=passes), layout)
    assert found.small, found
