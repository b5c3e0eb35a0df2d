"""What every operator means, in float64: from the papers' equations, written apart from the layers, one step a line.

Sizes of groups and grids are plain numbers. Differentiated by JAX. Rows past the last group are never read: they may
hold NaN.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.config import MLAConfig, ModelConfig, MoEConfig, VisionConfig
from trillion_moe.kernels.linear_attention.reference import kda as recurrence

Activate = Callable[[jax.Array, jax.Array], jax.Array]


# --- products ---------------------------------------------------------------------------------------------------------


def grouped(x_RK: jax.Array, w_EKN: Any, sizes_E: np.ndarray) -> jax.Array:
    """One product a group of rows, zeros below the last."""
    ends, rows = np.cumsum(sizes_E), len(x_RK)
    products = [x_RK[end - size : end] @ w_EKN[e] for e, (size, end) in enumerate(zip(sizes_E, ends, strict=True))]
    return jnp.concatenate([*products, jnp.zeros((rows - ends[-1], products[0].shape[1]))])


def gated(x_RK: jax.Array, gate_EKF: Any, up_EKF: Any, sizes_E: np.ndarray, activate: Activate) -> jax.Array:
    return activate(grouped(x_RK, gate_EKF, sizes_E), grouped(x_RK, up_EKF, sizes_E))


def decode(packed_ENB: np.ndarray, scale_ENG: np.ndarray) -> np.ndarray:
    """float64 ``[E, K, N]`` of MXFP4 codes as checkpoints store them: low nibble first, 32 columns a scale."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack([packed_ENB & 15, packed_ENB >> 4], axis=-1).reshape(*packed_ENB.shape[:-1], -1)
    values = np.where(nibbles & 8, -1.0, 1.0) * magnitudes[nibbles & 7]
    return (values * np.exp2(np.repeat(scale_ENG.astype(np.float64), 32, axis=-1) - 127)).swapaxes(1, 2)


def activation(cfg: ModelConfig) -> Activate:
    """SiTU-GLU ``b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)``, or SwiGLU ``g sigmoid(g) u``."""
    b1, b2 = 1.0 if cfg.situ_beta is None else cfg.situ_beta, cfg.situ_linear_beta

    def situ(g, u):
        return b1 * jnp.tanh(g / b1) / (1 + jnp.exp(-g)) * (u if b2 is None else b2 * jnp.tanh(u / b2))

    return situ if cfg.activation == "situ" else lambda g, u: g / (1 + jnp.exp(-g)) * u


# --- rows -------------------------------------------------------------------------------------------------------------


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def router(x_ND, weight_DE, chosen_NE: Any, moe: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """-> mixture weights ``[N, E]``, 0 where an expert was not chosen, and logits. DeepSeek-V3, eqs. 12 to 16."""
    logits_NE = x_ND @ weight_DE
    picked_NE = chosen_NE / (1 + jnp.exp(-logits_NE))
    total_N1 = picked_NE.sum(axis=1, keepdims=True) if moe.renormalize else 1.0
    return moe.scaling_factor * picked_NE / total_N1, logits_NE


def chosen(choice_NE: np.ndarray, moe: MoEConfig) -> np.ndarray:
    """bool ``[N, E]``: the top_k of each token, among its best groups of experts."""
    n, e = choice_NE.shape
    choice_NE = choice_NE.copy()
    if moe.num_groups > 1:
        by_group = choice_NE.reshape(n, moe.num_groups, -1)
        best_two = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
        left_out = np.argsort(-best_two, axis=1)[:, moe.topk_groups :]
        for token, groups in enumerate(left_out):
            by_group[token, groups] = -np.inf
        choice_NE = by_group.reshape(n, e)
    found = np.zeros((n, e), bool)
    np.put_along_axis(found, np.argsort(-choice_NE, axis=1)[:, : moe.top_k], True, axis=1)
    return found


def attn_res(sources_NBTD: jax.Array, norm_D: jax.Array, query_D: jax.Array, eps: float) -> jax.Array:
    """Softmax over the sources of ``query . rms_norm(source)``, applied to the sources themselves (Kimi K3 report)."""
    scores_NBT = rms_norm(sources_NBTD, norm_D, eps) @ query_D
    shares_NBT = jnp.exp(scores_NBT - scores_NBT.max(axis=0))
    return jnp.einsum("nbt,nbtd->btd", shares_NBT / shares_NBT.sum(axis=0), sources_NBTD)


def cross_entropy(hidden_ND: jax.Array, head_DV: jax.Array, targets_N: np.ndarray, counted_N: np.ndarray) -> jax.Array:
    """Sum of ``-log softmax(hidden @ head)[target]`` over the counted rows."""
    logits_NV = hidden_ND @ head_DV
    top_N1 = logits_NV.max(axis=1, keepdims=True)
    log_z_N = jnp.log(jnp.exp(logits_NV - top_N1).sum(axis=1)) + top_N1[:, 0]
    nll_N = log_z_N - logits_NV[np.arange(len(targets_N)), targets_N]
    return jnp.where(counted_N, nll_N, 0).sum()


# --- sequences --------------------------------------------------------------------------------------------------------


def short_conv(x_BTC: jax.Array, taps_CW: jax.Array) -> jax.Array:
    """Causal, one filter a channel, the last tap the current token's; then ``z sigmoid(z)``."""
    t, width = x_BTC.shape[1], taps_CW.shape[1]
    z_BTC = jnp.zeros_like(x_BTC)
    for back in range(min(width, t)):
        z_BTC = z_BTC.at[:, back:].add(x_BTC[:, : t - back] * taps_CW[:, width - 1 - back])
    return z_BTC / (1 + jnp.exp(-z_BTC))


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)


def log_decay(z_BTHK: jax.Array, a_log_H: jax.Array, bound: float | None) -> jax.Array:
    scale_H1 = jnp.exp(a_log_H)[:, None]
    if bound is None:
        return -scale_H1 * jnp.logaddexp(z_BTHK, 0)
    return bound / (1 + jnp.exp(-scale_H1 * z_BTHK))


def kda(q, k, v, g, beta, segments: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The recurrence, token by token -> outputs, final state."""
    return recurrence(q, k, v, g, beta, state=None, segments=segments, state_segment=None, chunk=1)


def softmax(scores: jax.Array, visible: Any) -> jax.Array:
    """Over the visible keys; zeros where there are none."""
    scores = jnp.where(visible, scores, -1e30)
    shares = jnp.where(visible, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = shares.sum(axis=-1, keepdims=True)
    return shares / jnp.where(total > 0, total, 1)


def mla(w: dict[str, Any], x_BTD, before: tuple[Any, Any], visible_BTS: np.ndarray, m: MLAConfig) -> jax.Array:
    """DeepSeek-V2, section 2.1, without positions; output gate of Kimi K3.

    w: the layer's matrices by name. before: latents and shared key parts of earlier tokens, ``[B, P, ...]``.
    """
    heads = (*x_BTD.shape[:2], m.num_heads, -1)
    q = x_BTD @ w["q"] if "q" in w else rms_norm(x_BTD @ w["q_a"], w["q_norm"], m.lora_norm_eps) @ w["q_b"]
    kv_a = x_BTD @ w["kv_a"]
    latent = rms_norm(kv_a[..., : m.kv_lora_rank], w["kv_norm"], m.lora_norm_eps)
    latent = jnp.concatenate([before[0], latent], axis=1)
    shared = jnp.concatenate([before[1], kv_a[..., m.kv_lora_rank :]], axis=1)
    kv = (latent @ w["kv_b"]).reshape(*latent.shape[:2], m.num_heads, -1)
    q, nope = q.reshape(heads), m.qk_nope_head_dim
    scores = jnp.einsum("bthk,bshk->bhts", q[..., :nope], kv[..., :nope])
    scores = (scores + jnp.einsum("bthk,bsk->bhts", q[..., nope:], shared)) / np.sqrt(m.qk_head_dim)
    out = jnp.einsum("bhts,bshv->bthv", softmax(scores, visible_BTS[:, None]), kv[..., nope:])
    out = out.reshape(*x_BTD.shape[:2], -1)
    return (out / (1 + jnp.exp(-(x_BTD @ w["gate"]))) if "gate" in w else out) @ w["o"]


# --- pictures ---------------------------------------------------------------------------------------------------------

Grids = Sequence[tuple[int, int, int]]


def by_length(grids: Grids) -> list[int]:
    """Items in the order in which the tower works: by patches, equal ones as they came."""
    return sorted(range(len(grids)), key=lambda i: (math.prod(grids[i]), i))


def vision_attention(q_PHK, k_PHK, v_PHK, grids: Grids) -> jax.Array:
    """Attention within each item under 2D rotary positions; rows in working order."""
    sizes = [(i, *grids[i]) for i in by_length(grids)]
    item, place, width = (
        np.concatenate([np.broadcast_to(what(i, t, h, w), t * h * w) for i, t, h, w in sizes])
        for what in (
            lambda i, t, h, w: i,
            lambda i, t, h, w: np.arange(t * h * w) % (h * w),
            lambda i, t, h, w: w,
        )
    )
    q, k = (rotated(x_PHK, place // width, place % width) for x_PHK in (q_PHK, k_PHK))
    scores_HPS = jnp.einsum("phk,shk->hps", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("hps,shk->phk", softmax(scores_HPS, item[:, None] == item), v_PHK)


def rotated(x_PHK: jax.Array, row_P: np.ndarray, column_P: np.ndarray) -> jax.Array:
    """Channels 2c and 2c + 1 turned by ``10000^(-4i/K)`` (i = c // 2) times the column if c is even, else the row."""
    pair, dim = np.arange(x_PHK.shape[-1] // 2), x_PHK.shape[-1]
    along_PC = np.where(pair % 2, row_P[:, None], column_P[:, None])
    angle_P1C = (along_PC * 10000.0 ** (-4 * (pair // 2) / dim))[:, None]
    a, b = x_PHK[..., 0::2], x_PHK[..., 1::2]
    turned = [a * np.cos(angle_P1C) - b * np.sin(angle_P1C), a * np.sin(angle_P1C) + b * np.cos(angle_P1C)]
    return jnp.stack(turned, axis=-1).reshape(x_PHK.shape)


def patch_embedding(patches, weight, table_HWD: jax.Array, grids: Grids, v: VisionConfig) -> jax.Array:
    """Patches times the convolution's matrix, the position table resized to each grid, time in items of frames; rows
    in working order."""
    starts, outs = np.cumsum([0, *(t * h * w for t, h, w in grids)]), []
    for i in by_length(grids):
        t, h, w = grids[i]
        x = patches[starts[i] : starts[i + 1]].reshape(t * h * w, -1) @ weight
        place = jnp.einsum("ha,wb,abd->hwd", _resize(h, v.pos_emb_height), _resize(w, v.pos_emb_width), table_HWD)
        outs.append(x + jnp.tile(place.reshape(h * w, -1), (t, 1)))
        if t > 1:
            outs[-1] += np.repeat(_time(t, v.hidden_size), h * w, axis=0)
    return jnp.concatenate(outs)


def _resize(size: int, table: int) -> np.ndarray:
    """``[size, table]``: bilinear shares of the table's entries at the centres of `size` cells, edges repeated."""
    at = np.clip((np.arange(size) + 0.5) * table / size - 0.5, 0, table - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(table)))


def _time(frames: int, width: int) -> np.ndarray:
    angle = np.arange(frames)[:, None] / 10000.0 ** (2 * np.arange(width // 2) / width)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
