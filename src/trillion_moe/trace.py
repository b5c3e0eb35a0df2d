"""Every intermediate array of a forward pass, under the names of the reference outputs it is compared with."""

import jax
import jax.numpy as jnp

from trillion_moe.layers.vision import ImageBatch
from trillion_moe.model import (
    Caches,
    Compaction,
    Model,
    at_repeat,
    embed,
    image_features,
    init_caches,
    layer_places,
    trunk,
    unembed,
)

Arrays = dict[str, jax.Array]


def trace(model: Model, tokens_BT, *, segments=None, images: ImageBatch | None = None) -> Arrays:
    """Run the model and return its arrays by name, positions in the order of the input.

    Kimi K3: ``embed``, ``layer{i}.`` attn_mix, attn_out, mlp_mix, mlp_out, prefix [B, T, D]; blocks [B*T, n, D];
    topk_idx (ascending), topk_weight [B*T, K]; moe_latent_in, moe_latent_sum [B*T, L]; moe_shared_out; ``final_mix``,
    ``final_hidden``, ``logits``; with images ``vision.`` patch_embed, block{j}, encoder_out, merged, projected.
    Kimi Linear: ``hidden.embed``, ``hidden.layer.{i}``, ``hidden.final_norm``, ``attn_out.layer.{i}``,
    ``mlp_out.layer.{i}``, ``router.layer.{i}.`` logits, indices (ascending), weights; ``cache.layer.{i}.`` kv_latent,
    k_rope or conv, recurrent (without segments); ``logits``.
    """
    rows, arrays = Compaction.of(segments), {}
    compact_BT = rows.forth(tokens_BT)
    segments_BT = None if segments is None else rows.forth(segments)
    x_BTD = embed(model, compact_BT, image_features(model, images, arrays), segments_BT)
    hidden_BTD, caches, aux, (mix_BTD, bank) = trunk(
        model, x_BTD, segments_BT, init_caches(model, *tokens_BT.shape), tracing=True
    )
    named = _Named(rows, tokens_BT.shape)
    logits = named.place(unembed(model, hidden_BTD))
    layers = [named.layer(a) for a in aux]
    hidden, x = named.place(hidden_BTD), named.place(x_BTD)
    if model.config.attn_res_block is None:
        arrays |= {"hidden.embed": x, "hidden.final_norm": hidden, "logits": logits}
        arrays |= _linear_names(layers)
        return arrays if segments is not None else arrays | _linear_caches(model, caches, layers)
    arrays |= {"embed": x, "final_mix": named.place(mix_BTD), "final_hidden": hidden, "logits": logits}
    bank = jax.vmap(named.place)(bank)
    return arrays | _k3_names(layers, bank, model.config.attn_res_block)


class _Named:
    """Puts compacted arrays back into the positions of the input."""

    def __init__(self, rows: Compaction, shape: tuple[int, int]):
        self.place, self.shape = rows.back, shape

    def flat(self, x_NX: jax.Array) -> jax.Array:
        return self.place(x_NX.reshape(*self.shape, *x_NX.shape[1:])).reshape(x_NX.shape)

    def layer(self, aux: Arrays) -> Arrays:
        flat = {"router_logits", "router_ids", "router_weights", "latent_in", "latent_sum"}
        placed = {
            k: self.flat(v) if k in flat else self.place(v)
            for k, v in aux.items()
            if k not in ("expert_counts", "dropped", "exchange")
        }
        if "router_ids" in placed:
            order = jnp.argsort(placed["router_ids"], axis=1)
            for name in ("router_ids", "router_weights"):
                placed[name] = jnp.take_along_axis(placed[name], order, axis=1)
        return placed


def _k3_names(layers: list[Arrays], bank_NBTD: jax.Array, block_size: int) -> Arrays:
    names = {
        "attn_in": "attn_mix",
        "attn_out": "attn_out",
        "ffn_in": "mlp_mix",
        "ffn_out": "mlp_out",
        "after": "prefix",
        "router_ids": "topk_idx",
        "router_weights": "topk_weight",
        "latent_in": "moe_latent_in",
        "latent_sum": "moe_latent_sum",
        "shared_out": "moe_shared_out",
    }
    arrays = {}
    for i, layer in enumerate(layers):
        arrays |= {f"layer{i}.{name}": layer[key] for key, name in names.items() if key in layer}
        blocks = bank_NBTD[: i // block_size + 1]
        arrays[f"layer{i}.blocks"] = jnp.moveaxis(blocks, 0, 2).reshape(-1, blocks.shape[0], blocks.shape[-1])
    return arrays


def _linear_names(layers: list[Arrays]) -> Arrays:
    names = {
        "attn_out": "attn_out.layer.{}",
        "ffn_out": "mlp_out.layer.{}",
        "after": "hidden.layer.{}",
        "router_logits": "router.layer.{}.logits",
        "router_ids": "router.layer.{}.indices",
        "router_weights": "router.layer.{}.weights",
    }
    return {name.format(i): layer[key] for i, layer in enumerate(layers) for key, name in names.items() if key in layer}


def _linear_caches(model: Model, caches: Caches, layers: list[Arrays]) -> Arrays:
    """The caches as transformers keeps them: the last W inputs of the fused q|k|v convolution, not W - 1 of each."""
    arrays = {}
    for i, ((s, j, repeat), layer) in enumerate(zip(layer_places(model.plan), layers, strict=True)):
        cache = at_repeat(caches.layers[s][j], repeat)
        prefix = f"cache.layer.{i}."
        if model.config.attention[i] == "kda":
            width = model.config.kda.conv_width
            inputs_BTC = jnp.concatenate([layer[f"conv_in_{name}"] for name in "qkv"], axis=-1)
            padded = jnp.pad(inputs_BTC, ((0, 0), (width, 0), (0, 0)))[:, -width:]
            arrays |= {prefix + "conv": jnp.swapaxes(padded, 1, 2), prefix + "recurrent": cache.state}
        else:
            arrays |= {prefix + "kv_latent": cache.latent, prefix + "k_rope": cache.k_pe}
    return arrays
