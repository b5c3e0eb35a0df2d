"""The pure steps that are compiled: what is run is what is planned and verified.

Each takes and returns values only. Jit them where they are used, donating what is replaced.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Bool, Float, Integer

from trillion_moe.balance import BalanceConfig, next_by_quantile, next_by_sign
from trillion_moe.layers.balance import HISTOGRAM, LOSS
from trillion_moe.layers.segments import staged
from trillion_moe.layers.vision import Features
from trillion_moe.model import Caches, Model, embed, loss_sum, trunk, unembed
from trillion_moe.sampling import Sampler, choose
from trillion_moe.sharding import pin, pin_like
from trillion_moe.transforms import combine
from trillion_moe.transforms.targets import Place, is_bias, places

Array = jax.Array | np.ndarray


def prefill_step(
    model: Model,
    tokens_BT: Integer[Array, "B T"],
    segments_BT: Integer[Array, "B T"] | None,
    caches: Caches,
    features: Features | None = None,
) -> tuple[Float[jax.Array, "B V"], Caches]:
    """Enter prompts, or a piece of them, into the caches -> logits float32 [B, V] after each row's last token, caches.

    segments_BT: int32, 0 = padding, which stands at the end of a row; None without padding. features: of the pictures
    whose placeholders stand in these tokens (`model.image_features`).
    """
    hidden_BTD, caches, *_ = trunk(model, embed(model, tokens_BT, features, segments_BT), segments_BT, caches)
    if segments_BT is None:
        return unembed(model, hidden_BTD[:, -1]), caches
    last_B = jnp.maximum(jnp.sum(segments_BT > 0, axis=1) - 1, 0)
    hidden_BD = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)[:, 0]
    return unembed(model, hidden_BD), caches


def decode_step(
    model: Model, token_B: Integer[Array, "B"], active_B: Bool[Array, "B"], caches: Caches
) -> tuple[Float[jax.Array, "B V"], Caches]:
    """One more token per active row -> logits float32 [B, V], caches. Rows that are not active change nothing."""
    segments_B1 = jnp.where(active_B, jnp.maximum(caches.segment, 1), 0)[:, None]
    hidden_B1D, caches, *_ = trunk(model, embed(model, token_B[:, None]), segments_B1, caches)
    return unembed(model, hidden_B1D[:, 0]), caches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """Generation between two tokens, a row for each prompt.

    logits: float32 [B, V], of the next token. caches: of the tokens so far. sampler: how a row chooses.
    left: int32 [B], tokens that a row may still make; 0 = it has ended. failed: bool [B], ended by logits that are not
    finite.
    """

    logits: Any
    caches: Caches
    sampler: Sampler
    left: Any
    failed: Any


def decode_steps(model: Model, now: Decoding, eos_ids: jax.Array, steps: jax.Array | int, *, room: int):
    """Up to `steps` (at most `room`) tokens more for every row that has not ended; stops early once all have.

    A row ends with the first of `eos_ids` (int32 [n], may be empty), which is kept, and where its logits are not
    finite, without a token. -> tokens int32 [B, room] (-1 where a row made none), and the Decoding after them.
    """

    def body(carry):
        i, tokens_BN, now = carry
        finite_B = jnp.all(jnp.isfinite(now.logits), axis=-1)
        active_B = (now.left > 0) & finite_B
        failed_B = now.failed | (now.left > 0) & ~finite_B
        token_B, sampler = choose(now.logits, now.sampler)
        tokens_BN = tokens_BN.at[:, i].set(jnp.where(active_B, token_B, -1))
        ended_B = jnp.any(token_B[:, None] == eos_ids[None, :], axis=-1)
        left_B = jnp.where(active_B & ~ended_B, now.left - 1, 0)
        logits_BV, caches = lax.cond(
            jnp.any(left_B > 0),
            lambda: decode_step(model, token_B, left_B > 0, now.caches),
            lambda: (now.logits, now.caches),
        )
        return i + 1, tokens_BN, Decoding(logits_BV, caches, sampler, left_B, failed_B)

    def going(carry):
        i, _, now = carry
        return (i < jnp.minimum(steps, room)) & jnp.any(now.left > 0)

    none_BN = jnp.full((now.logits.shape[0], room), -1, jnp.int32)
    _, tokens_BN, now = lax.while_loop(going, body, (0, none_BN, now))
    return tokens_BN, now


def grad_step(
    trainable: Any, frozen: Any, batch: Any, *, remat: bool = True, balance: BalanceConfig | None = None
) -> tuple[Any, dict[str, jax.Array]]:
    """-> gradients of the *sum* of the counted cross-entropies, and the sums: ``loss`` and those of `model.loss_sum`.

    Only `trainable` is differentiated: frozen leaves have no gradient. Gradients and sums of several batches add up to
    those of all of them together, whatever their numbers of counted tokens. They lie as their parameters do.
    """

    def objective(trainable):
        return loss_sum(combine(trainable, frozen), batch, remat=remat, balance=balance)

    (total, sums), grads = jax.value_and_grad(objective, has_aux=True)(trainable)
    return pin_like(grads, combine(trainable, frozen)), sums | {"loss": total}


def update_step(optimizer: optax.GradientTransformation, trainable: Any, opt_state: Any, grads: Any, sums: Any):
    """One optimizer update from summed gradients, divided by ``sums["tokens"]`` -> trainable, opt_state, metrics.

    grads: of the dtypes of `trainable`, or wider where several passes were summed.

    metrics: ``loss`` (mean), ``accuracy``, ``tokens``, ``grad_norm`` (before clipping), ``expert_counts``,
    ``dropped``, ``sequence_loss`` (mean) and ``shortfall_histogram`` as they are in the sums. If loss or norm is not
    finite, nothing changes.
    """
    count = sums["tokens"]
    grads = jax.tree.map(lambda g, x: (g / count).astype(x.dtype), grads, trainable)
    metrics = sums | {"loss": sums["loss"] / count, "accuracy": sums["correct"] / count}
    metrics |= {LOSS: sums[LOSS] / count} if LOSS in sums else {}
    metrics["grad_norm"] = optax.tree.norm(grads)
    del metrics["correct"]
    fine = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    updates, new_state = optimizer.update(grads, opt_state, trainable)
    changed = optax.apply_updates(trainable, updates), new_state
    trainable, opt_state = jax.tree.map(lambda new, old: jnp.where(fine, new, old), changed, (trainable, opt_state))
    return trainable, opt_state, metrics


def train_step(
    optimizer: optax.GradientTransformation,
    trainable: Any,
    frozen: Any,
    opt_state: Any,
    batch: Any,
    *,
    remat: bool = True,
    balance: BalanceConfig | None = None,
):
    """`grad_step` and `update_step` of one batch -> trainable, opt_state, metrics. `balance_step` comes after it."""
    grads, sums = grad_step(trainable, frozen, batch, remat=remat, balance=balance)
    return update_step(optimizer, trainable, opt_state, grads, sums)


def balance_step(balance: BalanceConfig, frozen: Any, sums: Any) -> Any:
    """A model, or the part of it that is not trained, with the next biases of its routers.

    sums: of all passes of one update (`grad_step`), or its metrics. Biases take effect with the next update.
    """
    if balance.method is None:
        return frozen
    rate = 0.0 if balance.rate is None else balance.rate
    found, treedef = places(frozen, inside=True)
    order = sorted(i for place in found if is_bias(place.names[0]) for i in place.layers)

    def moved(bias: jax.Array, layers: tuple[int, ...]) -> jax.Array:
        rows = np.array([order.index(i) for i in layers] if bias.ndim > 1 else order.index(layers[0]))
        if balance.method == "sign":
            return next_by_sign(sums["expert_counts"][rows], bias, rate)
        return next_by_quantile(sums[HISTOGRAM][rows], bias, frozen.config.moe.top_k, balance.ema)

    def one(place: Place) -> jax.Array:
        if place.rows is None:
            return pin(frozen.layout, moved(place.leaf, place.layers), "router")
        rows = np.array(place.rows)  # of a pipeline's slots some have no layer
        bias = place.leaf.at[rows].set(moved(place.leaf[rows], place.layers))
        return pin(frozen.layout, bias, "stages" if staged(frozen.plan) else "repeats", "router")

    return treedef.unflatten([one(p) if is_bias(p.names[0]) else p.leaf for p in found])
