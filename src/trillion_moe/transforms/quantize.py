"""How the numbers of a model are stored: routed experts in MXFP4 and back, and the dtype of everything else."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from trillion_moe.blueprint import Spec, constant, is_spec, normal, random_bytes
from trillion_moe.kernels import mxfp4
from trillion_moe.sharding import as_placed
from trillion_moe.transforms.targets import Place, axes, dims, places
from trillion_moe.weights import MXFP4, LoRA, PackedLayout

MXFP4_GROUP = 32
_RMS_E2M1 = 2.926  # of a nibble drawn uniformly: sqrt(68.5 / 8)


def packed_layout(platform: str) -> PackedLayout:
    """How packed experts lie: as kernels read them; on CPU so that decoding runs along N (measured: 1.8x faster)."""
    return "kn" if platform == "cpu" else mxfp4.LAYOUT.get(platform, "nk")


def quantize_experts(model: Any, *, layout: PackedLayout = "nk") -> Any:
    """The model with its routed experts in MXFP4: 4.25 bits a weight.

    Arrays are encoded on the host, one expert at a time (not under `jax.jit`); an adapter stays on the packed base. In
    a blueprint the bytes are uniform and the scale constant, so that weights have about `initializer_range` as RMS.
    ValueError if K is not a multiple of 32, and if no routed expert is there or left to pack.
    """
    found, treedef = places(model)
    leaves = [_with_base(p, lambda w, p=p: _packed(w, p, model, layout)) for p in found]
    return _changed(model, treedef, [p.leaf for p in found], leaves, "unpacked")


def dequantize_experts(model: Any, dtype: DTypeLike | None = None) -> Any:
    """The model with its packed experts as arrays ``[E, K, N]`` in `dtype` (default: the model's), decoded exactly."""
    found, treedef = places(model)
    target = jnp.dtype(model.dtype if dtype is None else dtype)
    leaves = [_with_base(p, lambda w: _unpacked(w, model, target)) for p in found]
    return _changed(model, treedef, [p.leaf for p in found], leaves, "packed")


def cast(model: Any, dtype: DTypeLike) -> Any:
    """The model and its activations in `dtype`; float32 where the blueprint says so whatever the model's dtype.

    These are the router's bias and the convolutions, decay and output norm of KDA. Packed weights and adapters stay as
    they are: adapters have the dtype they were configured with.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype = {dtype!r}: legal is a float dtype, such as 'bfloat16' or 'float32'")
    name = str(jnp.dtype(dtype))
    reference = type(model)(model.config, dtype="bfloat16", plan=model.plan)
    pinned = {n for p in places(reference)[0] if p.leaf.dtype == "float32" for n in p.names}
    found, treedef = places(model)
    leaves = [_cast(p.leaf, "float32" if p.names[0] in pinned else name) for p in found]
    model = treedef.unflatten(leaves)
    model.dtype = name
    return model


def _cast(leaf: Any, dtype: str) -> Any:
    match leaf:
        case LoRA(base=base):
            return dataclasses.replace(leaf, base=_cast(base, dtype))
        case MXFP4():
            return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return dataclasses.replace(leaf, dtype=dtype) if is_spec(leaf) else leaf.astype(dtype)


def _with_base(place: Place, change) -> Any:
    """A routed-expert leaf with `change` applied below its adapter; any other leaf as it is."""
    if place.group != "routed_experts":
        return place.leaf
    if isinstance(place.leaf, LoRA):
        return dataclasses.replace(place.leaf, base=change(place.leaf.base))
    return change(place.leaf)


def _changed(model: Any, treedef: Any, before: list, after: list, what: str) -> Any:
    bases = [[w.base if isinstance(w, LoRA) else w for w in leaves] for leaves in (before, after)]
    if all(a is b for a, b in zip(*bases, strict=True)):
        raise ValueError(f"this model ({model.config.model_type}) has no {what} routed experts")
    return as_placed(treedef.unflatten(after))


# --- one leaf --------------------------------------------------------------------------------------------------------


def _packed(w: Any, place: Place, model: Any, layout: PackedLayout) -> MXFP4:
    if isinstance(w, MXFP4):
        return w
    batch, k, n = dims(w)
    if k % MXFP4_GROUP:
        raise ValueError(f"{place.names[0]} [{k}, {n}] cannot be MXFP4: K = {k} is not a multiple of {MXFP4_GROUP}")
    if is_spec(w):
        return _packed_spec(w, model.config.initializer_range, layout)
    flat = w.reshape(-1, k, n)
    packed, scale = np.empty((len(flat), n, k // 2), np.uint8), np.empty((len(flat), n, k // MXFP4_GROUP), np.uint8)
    for i in range(len(flat)):
        packed[i], scale[i] = mxfp4.encode(np.asarray(flat[i]).T)
    shaped = [a.reshape(*batch, *a.shape[1:]) for a in (packed, scale)]
    turned = mxfp4.to_layout(shaped[0], shaped[1], "nk", layout)
    return MXFP4(jnp.asarray(turned[0]), jnp.asarray(turned[1]), layout)


def _packed_spec(w: Spec, std: float, layout: PackedLayout) -> MXFP4:
    *batch, k, n = w.shape
    *names, k_axis, n_axis = w.axes
    code = constant(127.0 + round(math.log2(std / _RMS_E2M1)) if std > 0 else 0.0)

    def spec(rows: int, init) -> Any:
        if layout == "nk":
            return Spec((*batch, n, rows), "uint8", (*names, n_axis, k_axis), init)
        return Spec((*batch, rows, n), "uint8", (*names, k_axis, n_axis), init)

    return MXFP4(spec(k // 2, random_bytes), spec(k // MXFP4_GROUP, code), layout)


def _unpacked(w: Any, model: Any, dtype: jnp.dtype) -> Any:
    if not isinstance(w, MXFP4):
        return w
    return dense_spec(w, model, dtype) if is_spec(w.packed) else _decoded(w, dtype)


def dense_spec(w: MXFP4, model: Any, dtype: DTypeLike | None = None) -> Spec:
    """The Spec of a packed Spec as an array, in the model's dtype by default."""
    batch, k, n = dims(w)
    name = str(jnp.dtype(model.dtype if dtype is None else dtype))
    return Spec((*batch, k, n), name, axes(w), normal(model.config.initializer_range))


@partial(jax.jit, static_argnums=1)
def _decoded(w: MXFP4, dtype: jnp.dtype) -> jax.Array:
    """``[*b, K, N]``, one matrix at a time: what the decoder holds besides its result is one matrix too."""
    batch, k, n = dims(w)
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[-2:]), w)
    return lax.map(lambda one: matrix(one, dtype), flat).reshape(*batch, k, n)


def matrix(w: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """One ``[K, N]``, decoded if packed, in `dtype`; float32 (float64 for float64) by default."""
    if not isinstance(w, MXFP4):
        return w.astype(jnp.promote_types(w.dtype, jnp.float32) if dtype is None else dtype)
    one = mxfp4.decode(w.packed, w.scale, layout=w.layout, dtype=jnp.dtype(jnp.float32 if dtype is None else dtype))
    return one if w.layout == "kn" else one.T


def placed_like(array: Any, other: jax.Array) -> jax.Array:
    """The array on the devices and under the sharding of `other` (as it is while tracing)."""
    if isinstance(other, Tracer):
        return array
    return jax.device_put(array, other.sharding)
