"""Cases of what works row by row: router, mixing of residuals, activation, norm, patch embedding, cross-entropy."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from trillion_moe.config import ModelConfig
from trillion_moe.layers import vocabulary
from trillion_moe.layers.mlp import activation_of
from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.residual import AttnRes
from trillion_moe.layers.router import Router
from trillion_moe.layers.vision import VisionTower
from trillion_moe.layers.vision_positions import positions
from trillion_moe.ops import activate
from trillion_moe.verify import references
from trillion_moe.verify.cases import Arrays, Case, Scale, matrix, normal
from trillion_moe.verify.sequences import ROWS, grids_of

HUGE = 1e8  # of a row: its square and its inverse's cube are still normal numbers of float32


# --- router -----------------------------------------------------------------------------------------------------------


def router_numbers(cfg: ModelConfig, scale: Scale) -> int:
    e, d = cfg.moe.num_experts, cfg.hidden_size
    return e * d + scale.tokens * (4 * d + 3 * e)


def router(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    """All of its experts: how many there are is what makes the choice hard."""
    e = cfg.moe.num_experts
    yield _router("realistic", np.random.default_rng(40), cfg, scale, np.zeros(e))
    bias = np.linspace(-0.5, 0.5, e)  # which makes a choice of its own
    yield _router("adversarial: large logits and bias", np.random.default_rng(41), cfg, scale, bias, gain=4.0)


def _router(name, rng, cfg: ModelConfig, scale: Scale, bias, gain: float = 1.0) -> Case:
    moe = cfg.moe
    assert moe is not None
    weight = matrix(rng, cfg.hidden_size, moe.num_experts, gain=gain)
    bias = bias.astype(np.float32)
    x = _decided(normal(rng, 8 * scale.tokens, cfg.hidden_size), weight, bias, cfg, scale.tokens)

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        layer = Router(cfg, dtype=str(floats["x"].dtype))
        layer.weight, layer.bias = floats["weight"], constants["bias"]
        ids, weights, logits = layer(floats["x"], cfg)
        token = jnp.arange(len(ids))[:, None]
        return {"weights": jnp.zeros(logits.shape, weights.dtype).at[token, ids].add(weights), "logits": logits}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        weights, logits = references.router(floats["x"], floats["weight"], known["chosen"], moe)
        return {"weights": weights, "logits": logits}

    def known(floats: dict[str, np.ndarray]) -> Arrays:
        return {"chosen": _choice(floats["x"], floats["weight"], bias, cfg)[0]}

    return Case(name, {"x": x, "weight": weight}, run, reference, {"bias": bias}, known=known)


def _choice(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, cfg: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """-> the experts of each row, bool ``[N, E]``, and by how much the last of them is ahead of the next."""
    moe = cfg.moe
    assert moe is not None
    choice = 1 / (1 + np.exp(-x @ weight)) + bias
    chosen = references.chosen(choice, moe)
    if chosen.all() or moe.num_groups > 1:
        return chosen, np.full(len(x), np.inf)
    return chosen, np.where(chosen, choice, np.inf).min(axis=1) - np.where(chosen, -np.inf, choice).max(axis=1)


def _decided(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, cfg: ModelConfig, tokens: int) -> np.ndarray:
    """Those `tokens` rows of x whose choice is clearest in every dtype, so that no rounding changes it."""
    gaps = []
    for dtype in ("float32", "bfloat16"):
        rows, matrix_DE = (a.astype(jnp.dtype(dtype)).astype(np.float64) for a in (x, weight))
        gaps.append(_choice(rows, matrix_DE, bias, cfg)[1])
    return x[np.argsort(-np.minimum(*gaps), kind="stable")[:tokens]]


# --- attention residuals ----------------------------------------------------------------------------------------------


def _sources(cfg: ModelConfig) -> int:
    """Rows of the bank: the embedding and the blocks before the last."""
    assert cfg.attn_res_block is not None
    return 1 + -(-cfg.num_layers // cfg.attn_res_block)


def attn_res_numbers(cfg: ModelConfig, scale: Scale) -> int:
    return (_sources(cfg) + 2) * ROWS * scale.tokens * cfg.hidden_size


def attn_res(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    n, shape = _sources(cfg), (ROWS, scale.tokens, cfg.hidden_size)
    yield _attn_res("realistic", np.random.default_rng(50), cfg, normal(np.random.default_rng(51), n, *shape), n - 1)
    bank = normal(np.random.default_rng(52), n + 1, *shape)
    bank[0] *= 100
    bank[1] /= 100
    bank[n] = 1e4  # of no block yet: finite, and without effect
    yield _attn_res("adversarial: unequal sources, traced", np.random.default_rng(53), cfg, bank, n - 1, traced=True)


def _attn_res(name, rng, cfg: ModelConfig, bank: np.ndarray, last: int, traced: bool = False) -> Case:
    d, eps = cfg.hidden_size, cfg.rms_norm_eps
    floats = {"bank": bank, "norm": 1 + normal(rng, d, std=0.1), "query": normal(rng, d, std=d**-0.5)}
    if not traced:
        floats["prefix"] = normal(rng, *bank.shape[1:])

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        mix = AttnRes(cfg, dtype=str(floats["norm"].dtype))
        mix.norm, mix.query = floats["norm"], floats["query"]
        return {"out": mix(floats["bank"], constants["last"] if traced else last, floats.get("prefix"), eps)}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        sources = floats["bank"][: last + 1]
        if "prefix" in floats:
            sources = jnp.concatenate([sources, floats["prefix"][None]])
        return {"out": references.attn_res(sources, floats["norm"], floats["query"], eps)}

    by_source = {"bank": [slice(i, i + 1) for i in range(len(bank))]}
    return Case(name, floats, run, reference, {"last": np.int32(last)} if traced else {}, parts=by_source)


# --- activation and norm ----------------------------------------------------------------------------------------------


def _hidden(cfg: ModelConfig) -> int:
    return cfg.dense_hidden_size if cfg.moe is None else cfg.moe.hidden_size


def activation_numbers(cfg: ModelConfig, scale: Scale) -> int:
    return 3 * ROWS * scale.tokens * _hidden(cfg)


def activation(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    rng, shape = np.random.default_rng(60), (ROWS * scale.tokens, _hidden(cfg))

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        return {"y": activate(activation_of(cfg), floats["gate"], floats["up"])}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        return {"y": references.activation(cfg)(floats["gate"], floats["up"])}

    plain = {"gate": normal(rng, *shape), "up": normal(rng, *shape)}
    yield Case("realistic", plain, run, reference)
    reach = np.array([1e-3, 1.0, 30.0, 80.0], np.float32)[np.arange(shape[0]) % 4, None]
    saturated = {"gate": normal(rng, *shape) * reach, "up": normal(rng, *shape) * reach[::-1]}
    yield Case("adversarial: saturated", saturated, run, reference)


def norm_numbers(cfg: ModelConfig, scale: Scale) -> int:
    return 2 * ROWS * scale.tokens * cfg.hidden_size


def norm(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    rng, (n, d) = np.random.default_rng(70), (ROWS * scale.tokens, cfg.hidden_size)

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        return {"y": rms_norm(floats["x"], floats["weight"], cfg.rms_norm_eps)}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        return {"y": references.rms_norm(floats["x"], floats["weight"], cfg.rms_norm_eps)}

    floats = {"x": normal(rng, n, d), "weight": 1 + normal(rng, d, std=0.1)}
    yield Case("realistic", floats, run, reference)
    quarters = [slice(n * i // 4, n * (i + 1) // 4) for i in range(4)]
    x = normal(rng, n, d)
    for rows, size in zip(quarters, (HUGE, 1 / HUGE, 0.0, 1.0), strict=True):
        x[rows] *= np.float32(size)
    parts = {"x": quarters, "y": quarters}
    yield Case("adversarial: huge, tiny and zero rows", floats | {"x": x}, run, reference, parts=parts)


# --- patches ----------------------------------------------------------------------------------------------------------


def patch_numbers(cfg: ModelConfig, scale: Scale) -> int:
    v = cfg.vision
    pixels = 3 * v.patch_size**2
    return (pixels + v.pos_emb_height * v.pos_emb_width + 8 * scale.tokens) * v.hidden_size + 8 * scale.tokens * pixels


def patch_embedding(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    v, (a, b) = cfg.vision, cfg.vision.merge
    yield _patches("realistic", np.random.default_rng(80), cfg, grids_of(cfg, scale.tokens))
    wide = b * max(1, scale.tokens // (a * b))
    grids = ((v.pos_emb_time, a, b), (1, a, wide), (1, a, b))
    yield _patches("adversarial: long strip, all frames", np.random.default_rng(81), cfg, grids, size=100.0)


def _patches(name, rng, cfg: ModelConfig, grids: references.Grids, size: float = 1.0) -> Case:
    v = cfg.vision
    assert v is not None
    count = sum(t * h * w for t, h, w in grids)

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        tower = VisionTower(cfg, dtype=str(floats["table"].dtype))
        tower.patch_embed, tower.pos_emb = floats["weight"], floats["table"]
        return {"y": tower._embed(floats["patches"], positions(grids, v), v)}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        return {"y": references.patch_embedding(floats["patches"], floats["weight"], floats["table"], grids, v)}

    floats = {
        "patches": size * normal(rng, count, 3, v.patch_size, v.patch_size),
        "weight": matrix(rng, 3 * v.patch_size**2, v.hidden_size),
        "table": normal(rng, v.pos_emb_height, v.pos_emb_width, v.hidden_size),
    }
    return Case(name, floats, run, reference)


# --- cross-entropy ----------------------------------------------------------------------------------------------------


def cross_entropy_numbers(cfg: ModelConfig, scale: Scale) -> int:
    return (scale.vocab + ROWS * scale.tokens) * cfg.hidden_size + 2 * ROWS * scale.tokens * scale.vocab


def cross_entropy(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    yield _cross_entropy("realistic", np.random.default_rng(90), cfg, scale, 1.0)
    yield _cross_entropy("adversarial: large logits", np.random.default_rng(91), cfg, scale, 20.0)


def _cross_entropy(name, rng, cfg: ModelConfig, scale: Scale, size: float) -> Case:
    """Targets anywhere, some of them not counted, in rows that no chunk divides evenly."""
    shape, v = (ROWS, scale.tokens + 1), scale.vocab
    targets = rng.integers(0, v, shape).astype(np.int32)
    counted = rng.random(shape) < 0.7

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        arrays = floats["head"], floats["hidden"], constants["targets"], constants["counted"]
        return dict(zip(("total", "correct"), vocabulary.cross_entropy(*arrays), strict=True))

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        flat = floats["hidden"].reshape(-1, cfg.hidden_size)
        hits = (jnp.argmax(flat @ floats["head"], axis=1) == targets.ravel()) & counted.ravel()
        total = references.cross_entropy(flat, floats["head"], targets.ravel(), counted.ravel())
        return {"total": total, "correct": jnp.sum(hits).astype(total.dtype)}

    floats = {"hidden": normal(rng, *shape, cfg.hidden_size), "head": matrix(rng, cfg.hidden_size, v, gain=size)}
    return Case(name, floats, run, reference, {"targets": targets, "counted": counted})
