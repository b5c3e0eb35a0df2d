"""Cases of what mixes tokens: Kimi Delta Attention, latent attention, the vision tower's attention."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.config import ModelConfig
from trillion_moe.kernels import linear_attention
from trillion_moe.layers.mla import MLA, MLACache, Positions
from trillion_moe.layers.vision import attend, rotate, rotations
from trillion_moe.layers.vision_positions import positions
from trillion_moe.ops import accumulator
from trillion_moe.verify import references
from trillion_moe.verify.cases import Arrays, Case, Scale, matrix, normal

ROWS = 2  # of a batch
MANY = 8 * 64 + 9  # tokens: beyond a group of chunks
EQUAL_KEYS = 0.999  # beta with which one key is written over and over


# --- KDA --------------------------------------------------------------------------------------------------------------


def kda_numbers(cfg: ModelConfig, scale: Scale) -> int:
    m = cfg.kda
    return ROWS * scale.heads * m.head_dim * (6 * scale.tokens + m.head_dim + 3 * m.conv_width)


def kda(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    """With its convolutions, norms and gate as the layer has them; then the recurrence alone at its limits."""
    rng, shape = np.random.default_rng(10), (ROWS, scale.tokens + 1, scale.heads, cfg.kda.head_dim)
    yield _kda_layer(rng, cfg, shape)
    yield from _kda_limits(rng, shape, cfg.kda.gate_lower_bound or -20.0)


def _kda_layer(rng: np.random.Generator, cfg: ModelConfig, shape: tuple[int, ...]) -> Case:
    (b, t, h, k), m = shape, cfg.kda
    floats = {name: normal(rng, b, t, h * k) for name in ("q_in", "k_in", "v_in")}
    floats |= {f"{name}_conv": normal(rng, h * k, m.conv_width, std=m.conv_width**-0.5) for name in "qkv"}
    floats |= {"z": normal(rng, *shape), "a_log": np.log(rng.uniform(1, 4, h)), "beta_logits": normal(rng, b, t, h)}

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        q, k, v = (linear_attention.short_conv(floats[f"{n}_in"], floats[f"{n}_conv"])[0].reshape(shape) for n in "qkv")
        q, k = linear_attention.l2norm(q), linear_attention.l2norm(k)
        g = linear_attention.kda_gate(floats["z"], floats["a_log"], lower_bound=m.gate_lower_bound)
        q = q * jnp.asarray(m.head_dim**-0.5, q.dtype)
        out, state = linear_attention.kda(q, k, v, g, jax.nn.sigmoid(floats["beta_logits"]), impl=implementation)
        return {"out": out, "state": state}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        q, k, v = (references.short_conv(floats[f"{n}_in"], floats[f"{n}_conv"]).reshape(shape) for n in "qkv")
        g = references.log_decay(floats["z"], floats["a_log"], m.gate_lower_bound)
        beta = 1 / (1 + jnp.exp(-floats["beta_logits"]))
        q = references.unit(q) / np.sqrt(m.head_dim)
        out, state = references.kda(q, references.unit(k), v, g, beta)
        return {"out": out, "state": state}

    wide = frozenset({"q_conv", "k_conv", "v_conv", "z", "a_log", "beta_logits"})
    return Case("realistic", floats, run, reference, wide=wide)


def _kda_limits(rng: np.random.Generator, shape: tuple[int, ...], deepest: float) -> Iterator[Case]:
    """The deepest decay and none; every key the same, beta near 1, two documents and a padding of NaN. Then one head
    over more tokens than a kernel takes in one step."""
    b, t, h, k = shape
    segments = np.where(np.arange(t) < t // 3, 1, 2) * (np.arange(t) < t - t // 8)
    segments_BT = np.broadcast_to(segments, (b, t)).astype(np.int32)

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        out, state = linear_attention.kda(**floats, segments=constants["segments"], impl=implementation)
        return {"out": out, "state": state}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        out, state = references.kda(**floats, segments=jnp.asarray(segments_BT))
        return {"out": out, "state": state}

    def one_document(floats: Arrays, known: Arrays) -> Arrays:
        out, state = references.kda(**floats)
        return {"out": out, "state": state}

    for name, decay in (("adversarial: deepest decay", deepest), ("adversarial: no decay", -1e-4)):
        one_key = normal(rng, b, 1, h, k)
        floats = {
            "q": normal(rng, *shape, std=k**-0.5),
            "k": np.repeat(one_key / np.linalg.norm(one_key, axis=-1, keepdims=True), t, axis=1),
            "v": normal(rng, *shape),
            "g": np.full(shape, decay),
            "beta": np.full((b, t, h), EQUAL_KEYS),
        }
        for array in floats.values():
            array[:, segments == 0] = np.nan
        yield Case(name, floats, run, reference, {"segments": segments_BT}, wide=frozenset({"g", "beta"}))
    long = (1, MANY, 1, k)
    key = normal(rng, *long)
    floats = {
        "q": normal(rng, *long, std=k**-0.5),
        "k": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "v": normal(rng, *long),
        "g": deepest * rng.random(long, np.float32) ** 8,  # most of it remembers for a long time
        "beta": rng.random(long[:3], np.float32),
    }
    constants = {"segments": np.ones((1, MANY), np.int32)}
    yield Case("adversarial: many tokens", floats, run, one_document, constants, wide=frozenset({"g", "beta"}))


# --- MLA --------------------------------------------------------------------------------------------------------------


def mla_numbers(cfg: ModelConfig, scale: Scale) -> int:
    cfg = _with_heads(cfg, scale)
    matrices = sum(math.prod(spec.shape) for spec in _specs(cfg).values())
    m, t = cfg.mla, ROWS * scale.tokens
    return matrices + t * (2 * cfg.hidden_size + m.num_heads * (t + 2 * m.qk_head_dim + 3 * m.v_head_dim))


def mla(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    """The layer: all tokens at once, packed documents with padding, a few tokens behind a cache."""
    cfg, t = _with_heads(cfg, scale), scale.tokens
    one, at = np.ones(t, np.int32), np.arange(t)
    packed = (np.where(at < t // 3, 1, 2) * (at < t - t // 8)).astype(np.int32)
    yield _mla("realistic", np.random.default_rng(20), cfg, one, t)
    yield _mla("adversarial: large scores, masked rows", np.random.default_rng(21), cfg, packed, t, gain=4.0)
    yield _mla("adversarial: decoding", np.random.default_rng(22), cfg, one, min(4, t))


def _with_heads(cfg: ModelConfig, scale: Scale) -> ModelConfig:
    assert cfg.mla is not None
    return dataclasses.replace(cfg, mla=dataclasses.replace(cfg.mla, num_heads=scale.heads))


def _specs(cfg: ModelConfig) -> dict[str, Any]:
    return {name: spec for name, spec in vars(MLA(cfg, dtype="float32")).items() if hasattr(spec, "shape")}


def _mla(name: str, rng, cfg: ModelConfig, segments_S: np.ndarray, t: int, gain: float = 1.0) -> Case:
    """t new tokens, those before them in a cache, which has room to spare. segments_S: the documents of all."""
    b, s, m = ROWS, len(segments_S), cfg.mla
    assert m is not None
    new = np.arange(s - t, s)[:, None]
    seen_TS = (new >= np.arange(s)) & (segments_S[new] == segments_S) & (segments_S[new] > 0)
    visible, segments_BS = np.broadcast_to(seen_TS, (b, t, s)), np.broadcast_to(segments_S, (b, s))
    floats = {
        name: matrix(rng, *spec.shape) if len(spec.shape) == 2 else 1 + normal(rng, *spec.shape, std=0.1)
        for name, spec in _specs(cfg).items()
    }
    floats["q_b" if m.q_lora_rank else "q"] *= gain
    floats["x"] = normal(rng, b, t, cfg.hidden_size)
    if s > t:
        floats["latent"] = normal(rng, b, s - t, m.kv_lora_rank)
        floats["k_pe"] = normal(rng, b, s - t, m.qk_rope_head_dim)

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        layer, x = MLA(cfg, dtype=str(floats["x"].dtype)), floats["x"]
        for weight in _specs(cfg):
            setattr(layer, weight, floats[weight])
        cache, keys_BS = None, constants["segments"]
        if s > t:
            room = ((0, 0), (0, t + 3), (0, 0))
            cache = MLACache(*(jnp.pad(floats[held], room) for held in ("latent", "k_pe")))
            keys_BS = jnp.pad(keys_BS, ((0, 0), (0, 3)))
        slots_BT = jnp.broadcast_to(jnp.arange(s - t, s), (b, t))
        positions = Positions(slots_BT, constants["segments"][:, s - t :], keys_BS)
        return {"out": layer(x, positions, cfg, cache)[0]}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        nothing = (jnp.zeros((b, 0, m.kv_lora_rank)), jnp.zeros((b, 0, m.qk_rope_head_dim)))
        before = (floats["latent"], floats["k_pe"]) if s > t else nothing
        return {"out": references.mla(floats, floats["x"], before, visible, m)}

    return Case(name, floats, run, reference, {"segments": segments_BS})


# --- vision -----------------------------------------------------------------------------------------------------------


def vision_numbers(cfg: ModelConfig, scale: Scale) -> int:
    return 5 * 4 * scale.tokens * scale.heads * cfg.vision.head_dim


def vision_attention(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    grids = grids_of(cfg, scale.tokens)
    yield _vision("realistic", np.random.default_rng(30), cfg, grids, scale.heads)
    a, b = cfg.vision.merge
    many = tuple((1, a, b * n) for n in range(1, 12))  # more lengths than are attended one by one
    yield _vision(
        "adversarial: many lengths, large scores", np.random.default_rng(31), cfg, many, scale.heads, gain=2.0
    )


def grids_of(cfg: ModelConfig, tokens: int) -> references.Grids:
    """A clip if the tower takes one, two pictures of one size, a smallest one: around `tokens` patches twice over."""
    (a, b), side = cfg.vision.merge, max(1, int(tokens**0.5) // 2)
    frames = min(2, cfg.vision.pos_emb_time)
    return ((frames, a, b * 2), (1, a * side, b * side), (1, a, b), (1, a * side, b * side))


def _vision(name: str, rng, cfg: ModelConfig, grids: references.Grids, heads: int, gain: float = 1.0) -> Case:
    v = cfg.vision
    assert v is not None
    shape = (sum(t * h * w for t, h, w in grids), heads, v.head_dim)

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        at = positions(grids, v)
        turn = rotations(at, v.head_dim, accumulator(floats["q"].dtype))
        return {"out": attend(rotate(floats["q"], *turn), rotate(floats["k"], *turn), floats["v"], at)}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        return {"out": references.vision_attention(floats["q"], floats["k"], floats["v"], grids)}

    floats = {"q": gain * normal(rng, *shape), "k": gain * normal(rng, *shape), "v": normal(rng, *shape)}
    return Case(name, floats, run, reference)
