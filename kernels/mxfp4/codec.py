"""MXFP4, the codec: 4-bit floats in groups of 32 that share a power-of-two scale.

    value = e2m1(nibble) * 2^(u - 127)         u = scale code (E8M0), one per 32 consecutive input columns

nibble = s e e m (sign in bit 3), magnitudes {0, .5, 1, 1.5, 2, 3, 4, 6}; nibble 8 is -0. Byte b of a row holds columns
2b (low nibble) and 2b + 1 (high nibble). Source: OCP Microscaling Formats (MX) specification v1.0, sections 5 and 6.

Two layouts of the same bytes, with any leading dims (one per expert, say):

    "nk"   packed u8 [..., N, K/2], scale u8 [..., N, K/32]      as stored in checkpoints
    "kn"   packed u8 [..., K/2, N], scale u8 [..., K/32, N]      byte transpose of it; rows 2b and 2b + 1 share a byte
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

Array = jax.Array | np.ndarray

GROUP = 32
BIAS = 127
LAYOUTS = ("nk", "kn")
CODE_MIN, CODE_MAX, CODE_NAN = 2, 252, 255  # every magnitude times the scale is a normal fp32 for CODE_MIN..CODE_MAX
CODE_OF_ZEROS = BIAS  # what `encode` writes for a group of zeros: scale 1
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def dims(packed_shape: tuple[int, ...], scale_shape: tuple[int, ...], layout: str) -> tuple[int, int]:
    """(N, K) of one matrix; ValueError when the layout is unknown or the two shapes do not belong together."""
    if layout not in LAYOUTS:
        raise ValueError(f"mxfp4: unknown layout {layout!r}; legal: {', '.join(LAYOUTS)}")
    k_axis, n_axis = (-1, -2) if layout == "nk" else (-2, -1)
    if len(packed_shape) < 2 or len(scale_shape) != len(packed_shape):
        raise ValueError(f"mxfp4: packed {packed_shape} and scale {scale_shape} must have the same two or more dims")
    k = 2 * packed_shape[k_axis]
    want = list(packed_shape)
    want[k_axis] = k // GROUP
    if k % GROUP or tuple(want) != tuple(scale_shape):
        raise ValueError(
            f"mxfp4: packed {packed_shape} in layout {layout!r} means K = {k}, which needs K % {GROUP} == 0 and scale "
            f"{tuple(want)}; got scale {scale_shape}"
        )
    return packed_shape[n_axis], k


def decode(packed: Array, scale: Array, *, layout: str = "nk", dtype: DTypeLike = jnp.float32) -> jax.Array:
    """w [..., N, K] for "nk", [..., K, N] for "kn", in `dtype` (float32, bfloat16 or float64).

    packed and scale u8 as in the module's head; scale may also be float8_e8m0fnu, the same bytes under another name.
    Exact, -0 kept, wherever the value is a normal fp32: always for codes 2..252, for 253 and 254 while it does not
    overflow (then inf), for 0 and 1 at zeros (`check` refuses the rest). Code 255 gives NaN. No table: it lowers on
    every back end and is as fast. Raises ValueError for shapes, layout or dtype, TypeError for other storage dtypes.
    """
    dims(packed.shape, scale.shape, layout)
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16, jnp.float64):
        raise ValueError(f"mxfp4: decode to float32, bfloat16 or float64, not {jnp.dtype(dtype)}: others are not exact")
    if packed.dtype != jnp.uint8:
        raise TypeError(f"mxfp4: packed must be uint8, got {packed.dtype}")
    packed, code = jnp.asarray(packed), scale_code(scale)
    k_axis = packed.ndim - (1 if layout == "nk" else 2)
    low_high = np.array([0, 4], np.uint8).reshape(2, *(1,) * (packed.ndim - k_axis - 1))
    nibble = (jnp.expand_dims(packed, k_axis + 1) >> low_high) & 15  # a stack of two is 4 x slower inside a loop on CPU
    grouped = (*packed.shape[:k_axis], packed.shape[k_axis] * 2 // GROUP, GROUP, *packed.shape[k_axis + 1 :])
    w = _e2m1(nibble.reshape(grouped)) * jnp.expand_dims(_power_of_two(code), k_axis + 1)
    return w.reshape(*grouped[:k_axis], -1, *grouped[k_axis + 2 :]).astype(dtype)


def _e2m1(nibble: jax.Array) -> jax.Array:
    """fp32 value of a nibble: twice the magnitude is m + max(m - 4, 0) + 2 max(m - 6, 0), m the low three bits."""
    n = nibble.astype(jnp.int32)
    m = n & 7
    magnitude = (m + jnp.maximum(m - 4, 0) + 2 * jnp.maximum(m - 6, 0)).astype(jnp.float32) * 0.5
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32) | ((n & 8) << 28)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _power_of_two(code: jax.Array) -> jax.Array:
    """fp32 2^(code - 127), built from its bits: the code is the exponent field, 0 is the subnormal 2^-127."""
    c = code.astype(jnp.uint32)
    bits = jnp.where(c == 0, jnp.uint32(1 << 22), jnp.where(c == CODE_NAN, jnp.uint32(0x7FC00000), c << 23))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_code(scale: Array) -> jax.Array:
    """Scale codes as uint8, whatever of the two names the bytes travel under; never converts a number."""
    if scale.dtype == jnp.uint8:
        return jnp.asarray(scale)
    if scale.dtype == jnp.float8_e8m0fnu:
        return jax.lax.bitcast_convert_type(jnp.asarray(scale), jnp.uint8)
    raise TypeError(f"mxfp4: scale must be uint8 or float8_e8m0fnu, got {scale.dtype}")


def bfloat16_bits(nibble: jax.Array, exponent: jax.Array) -> jax.Array:
    """int32: the bfloat16 pattern of an e2m1 code times 2^(exponent / 128), for kernels that decode without floats.

    nibble int32, 0..15; exponent int32, (scale code - 127) << 7. Exact for what `check` allows.
    """
    magnitude = nibble & 7
    bits = (magnitude << 6) + (126 << 7)  # 1.0 is code 2: one mantissa bit below two of exponent
    bits = jnp.where(magnitude == 1, 126 << 7, bits) + exponent  # 0.5, e2m1's only subnormal
    return jnp.where(magnitude == 0, 0, bits) | ((nibble & 8) << 12)


def encode(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(packed u8 [..., N, K/2], scale u8 [..., N, K/32]) of w [..., N, K], on the host, layout "nk".

    Per group of 32 (MX v1.0, section 6.3): scale 2^e with e = floor(log2 max|w|) - 2, then each w / 2^e rounded to the
    nearest magnitude, ties to the even code, saturating at 6. floor(log2) is read from the exponent, so it is exact,
    for subnormals too. The code e + 127 is cut to 2..252, outside of which a group may not hold anything but zeros;
    a group of zeros gets code 127. With m = max|w| of a group whose code is not cut, |w - w'| <= m / 5 where
    |w| <= 6 * 2^e and < m / 4 where it saturates (6 < |w| / 2^e < 8). Signs are kept, also of zeros.

    Raises ValueError for K not a multiple of 32 and for the first value that is not finite, with its position.
    """
    w = np.asarray(w)
    if w.ndim < 1 or w.shape[-1] % GROUP:
        raise ValueError(f"mxfp4: encode needs w [..., K] with K % {GROUP} == 0, got shape {w.shape}")
    w = w.astype(np.float64)
    if not np.isfinite(w).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(w))[0])
        raise ValueError(f"mxfp4: encode: w{list(where)} is {w[where]}, only finite values can be encoded")
    groups = w.reshape(*w.shape[:-1], -1, GROUP)
    amax = np.abs(groups).max(axis=-1)
    exponent = np.frexp(amax)[1] - 1 - 2  # frexp: amax = f * 2^p with f in [0.5, 1)
    code = np.where(amax == 0, CODE_OF_ZEROS, np.clip(exponent + BIAS, CODE_MIN, CODE_MAX))
    nibble = _nearest_code(np.ldexp(np.abs(groups), (BIAS - code)[..., None]))
    nibble = (nibble | (np.signbit(groups) << 3)).reshape(w.shape).astype(np.uint8)
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4), code.astype(np.uint8)


def _nearest_code(magnitude: np.ndarray) -> np.ndarray:
    """Index into MAGNITUDES of the nearest one, a tie to the even index, everything above 6 to 6."""
    middle = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    below, upto = np.searchsorted(middle, magnitude, "left"), np.searchsorted(middle, magnitude, "right")
    return np.where(below % 2 == 0, below, upto)  # the two differ only at a middle, by one


def to_layout(packed: Array, scale: Array, frm: str, to: str) -> tuple[Array, Array]:
    """The same (packed, scale) in layout `to`: a byte transpose of the last two dims, undone exactly by its inverse.

    Takes and returns numpy arrays (contiguous) or JAX arrays. ValueError for an unknown layout or unfitting shapes.
    """
    dims(packed.shape, scale.shape, frm)
    if to not in LAYOUTS:
        raise ValueError(f"mxfp4: unknown layout {to!r}; legal: {', '.join(LAYOUTS)}")
    if frm == to:
        return packed, scale
    return _swapped(packed), _swapped(scale)


def _swapped(a: Array) -> Array:
    turned = a.swapaxes(-1, -2)
    return np.ascontiguousarray(turned) if isinstance(turned, np.ndarray) else turned


def check(packed: np.ndarray, scale: np.ndarray, *, name: str) -> list[str]:
    """Findings about a stored pair (layout "nk", on the host); empty when it is sound.

    Each kind of fault is one line: tensor name, first row ([..., N] index), group, scale code, how many such groups:
      * code 255 (NaN);
      * code 0 or 1 in a group that holds a non-zero: 0.5 * 2^-126 is no normal fp32, and a zero code there is how a
        scale tensor that was never written looks;
      * code 253 or 254 in a group with a magnitude that overflows fp32;
      * a whole matrix [N, K/32] of zero codes (each expert is looked at by itself).
    Raises ValueError or TypeError when shapes or storage dtypes are wrong.
    """
    if packed.dtype != np.uint8:
        raise TypeError(f"mxfp4: {name}: packed must be uint8, got {packed.dtype}")
    if scale.dtype == np.dtype(ml_dtypes.float8_e8m0fnu):
        scale = scale.view(np.uint8)
    if scale.dtype != np.uint8:
        raise TypeError(f"mxfp4: {name}: scale must be uint8 or float8_e8m0fnu, got {scale.dtype}")
    dims(packed.shape, scale.shape, "nk")
    findings = [
        f"{name}: matrix {list(map(int, at))}: every scale code is 0, the scales were never written"
        for at in np.argwhere((scale == 0).all(axis=(-1, -2)))
    ]
    peak = _peak_magnitude_code(packed, scale)
    rules = (
        (scale == CODE_NAN, "is NaN"),
        ((scale < CODE_MIN) & (peak > 0), "is legal only where all 32 values are zero"),
        ((scale == 253) & (peak > 5) | (scale == 254) & (peak > 3), "overflows fp32"),
    )
    return findings + [_finding(name, scale, bad, why) for bad, why in rules if bad.any()]


def _peak_magnitude_code(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Largest low-three-bit code of the 32 nibbles, per group, for groups with an unusual scale; 0 elsewhere."""
    peak = np.zeros(scale.shape, np.uint8)
    unusual = (scale < CODE_MIN) | (scale > CODE_MAX)
    groups = packed.reshape(*scale.shape, GROUP // 2)[unusual]
    peak[unusual] = np.maximum(groups & 7, (groups >> 4) & 7).max(axis=-1)
    return peak


def _finding(name: str, scale: np.ndarray, bad: np.ndarray, why: str) -> str:
    """One line for all the groups in the mask `bad`: the first position and the count."""
    *row, group = (int(i) for i in np.argwhere(bad)[0])
    where = row[0] if len(row) == 1 else row
    code = scale[(*row, group)]
    return f"{name}: row {where}, group {group}: scale code {code} {why} ({int(bad.sum())} such groups)"
