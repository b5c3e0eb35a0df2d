"""Short depthwise causal convolution with SiLU: KDA mixes neighbouring tokens before the recurrence."""

import jax
import jax.numpy as jnp

from .reference import first_document


def short_conv(x, w, *, history=None, segments=None, history_segment=None):
    """y[t] = silu(sum_j w[:, j] x[t - W + 1 + j]) per channel, in float32 (float64 stays); (y, new_history).

    x [B,T,C]; w [C,W], w[:, W-1] is the current token's; y [B,T,C] in x.dtype.
    history [B,W-1,C]: the W-1 inputs before x (pre-conv, oldest first), zeros where there are none; None = zeros.
    new_history [B,W-1,C] in x.dtype: the same for the next call, whatever T (also T < W-1).

    segments int32 [B,T]: documents 1, 2, ...; padding (0) **only at the end of a row**: compact rows before. No tap
    crosses from one document into another, taps on history count only for tokens of history_segment (int32 [B],
    default: the segment of the row's first token). Padding gives y = 0, takes no gradient, may be NaN. new_history then
    holds inputs of the row's last document only, its part in history included; a row of only padding keeps its history.

    Raises ValueError: shapes that do not fit; history_segment without segments. TypeError: integers.
    """
    if x.ndim != 3 or w.ndim != 2:
        raise ValueError(f"short_conv: x has shape {x.shape} and w {w.shape}; want [B,T,C] and [C,W]")
    B, T, C = x.shape
    W = w.shape[-1]
    _check(x, w, history, segments, history_segment)
    history = jnp.zeros((B, W - 1, C), x.dtype) if history is None else history.astype(x.dtype)
    inputs_BXC = jnp.concatenate([history, x], axis=1)  # X = W - 1 + T; token t is at X = W - 1 + t
    dtype = jnp.result_type(jnp.float32, x)
    w_WC = w.astype(dtype).T
    if segments is None:
        return _silu_taps(inputs_BXC, w_WC, T, None, dtype).astype(x.dtype), inputs_BXC[:, T:]
    history_segment = first_document(segments) if history_segment is None else history_segment
    segments_BX = jnp.concatenate([jnp.broadcast_to(history_segment[:, None], (B, W - 1)), segments], axis=1)
    y_BTC = _silu_taps(inputs_BXC, w_WC, T, segments_BX, dtype)
    return y_BTC.astype(x.dtype), _last_inputs(inputs_BXC, segments_BX, T)


def _silu_taps(inputs_BXC, w_WC, T, segments_BX, dtype):
    W = w_WC.shape[0]
    if segments_BX is None and T == 1:  # decode: one product and one sum
        return jax.nn.silu(jnp.sum(inputs_BXC.astype(dtype) * w_WC, axis=1, keepdims=True))
    counts = None if segments_BX is None else _taps_of_one_document(segments_BX, T, W)
    total_BTC = 0
    for j in range(W):
        tap_BTC = inputs_BXC[:, j : j + T]
        if counts is not None:
            tap_BTC = jnp.where(counts[j][..., None], tap_BTC, 0)  # select, not multiply: padding may be NaN
        total_BTC = total_BTC + tap_BTC.astype(dtype) * w_WC[j]
    return jax.nn.silu(total_BTC)


def _taps_of_one_document(segments_BX, T, W):
    """W masks [B,T], by tap: the tap and every token from it to the current one are of the current, real document."""
    now_BT = segments_BX[:, W - 1 :]
    counts = [now_BT != 0]
    for j in range(W - 2, -1, -1):
        counts.insert(0, counts[0] & (segments_BX[:, j : j + T] == now_BT))
    return counts


def _last_inputs(inputs_BXC, segments_BX, T):
    """The W-1 inputs up to each row's last real token, zeros where they are of another document."""
    back = inputs_BXC.shape[1] - T
    length_B1 = jnp.sum(segments_BX[:, back:] != 0, axis=1, keepdims=True)
    index_BW = length_B1 + jnp.arange(back)
    document_BW = jnp.take_along_axis(segments_BX, index_BW, axis=1)
    same_BW = jnp.cumprod((document_BW == document_BW[:, -1:])[:, ::-1], axis=1)[:, ::-1] == 1
    return jnp.where(same_BW[..., None], jnp.take_along_axis(inputs_BXC, index_BW[..., None], axis=1), 0)


def _check(x, w, history, segments, history_segment):
    B, T, C = x.shape
    if not (jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating)):
        raise TypeError(f"short_conv: x has dtype {x.dtype} and w {w.dtype}, want floating ones")
    want = {"w": (w, (C, w.shape[-1])), "history": (history, (B, w.shape[-1] - 1, C)), "segments": (segments, (B, T))}
    want["history_segment"] = (history_segment, (B,))
    for name, (array, shape) in want.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"short_conv: {name} has shape {array.shape}, x {x.shape} and w {w.shape} want {shape}")
    if T < 1 or w.shape[-1] < 1:
        raise ValueError(f"short_conv: needs at least one token and one tap, got T={T}, W={w.shape[-1]}")
    if history_segment is not None and segments is None:
        raise ValueError("short_conv: history_segment without segments has no effect; give both or neither")
