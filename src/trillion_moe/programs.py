"""What a run that trains compiles: its model, and the steps as programs, one for all runs of a process of one shape."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from trillion_moe.balance import BalanceConfig
from trillion_moe.compiler import jitted
from trillion_moe.config import ModelConfig
from trillion_moe.distributed import current
from trillion_moe.layers.segments import plan_for
from trillion_moe.model import Model
from trillion_moe.ops import accumulator
from trillion_moe.run_config import RunConfig, RunConfigError, check_balance
from trillion_moe.sharding import Layout, LayoutError, shardings
from trillion_moe.steps import balance_step, grad_step, update_step
from trillion_moe.transforms import add_lora, quantize_experts
from trillion_moe.transforms.dropout import drop_inputs
from trillion_moe.transforms.quantize import packed_layout


def model_config(config: RunConfig) -> ModelConfig:
    """Of a run's model; RunConfigError if it does not say which."""
    if not config.model:
        raise RunConfigError("the configuration does not say model: give --set model=FOLDER, which needs no weights")
    return ModelConfig.from_file(config.model)


def blueprint(cfg: ModelConfig, config: RunConfig, platform: str, layout: Layout | None) -> Any:
    """The model as a run loads and adapts it, of Specs, its layers as a mesh needs them.

    RunConfigError for adapters that it cannot have.
    """
    model = Model(cfg, dtype=config.dtype, plan=plan_for(cfg, layout))
    if cfg.quantization is not None:
        model = quantize_experts(model, layout=packed_layout(platform))
    if config.lora is None:
        return model
    try:
        return add_lora(model, config.lora)
    except ValueError as error:
        raise RunConfigError(f"lora, on {config.model}: {error}") from None


def checked(cfg: ModelConfig, config: RunConfig, platform: str, layout: Layout | None) -> Any:
    """`blueprint`, once all is checked that can be before data or weights are read.

    RunConfigError for settings without a step, LayoutError for a model that the mesh cannot cut.
    """
    if config.lora is None and cfg.quantization is not None:
        raise RunConfigError(
            f"lora is null, but the experts of {config.model} are packed: train adapters (lora), or decode them first"
        )
    check_balance(config, cfg)
    if layout is not None and layout.size("pp") > 1 and not config.train.remat:
        raise RunConfigError(f"train.remat = false over pp = {layout.size('pp')}: legal is true, stages keep no layer")
    model = blueprint(cfg, config, platform, layout)
    if layout is not None:
        shardings(model, layout)
    return model


def check_processes(layout: Layout | None) -> None:
    """Of several processes, what would let them wait for each other for ever: LayoutError for a mesh that leaves out
    devices of some, which would have nothing to do; ProcessesError for layouts that differ, as of a machine's file that
    is not the same on every host."""
    processes = current()
    if processes.count == 1:
        return
    said = {} if layout is None else {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}
    processes.same("mesh", said | ({} if layout is None else {"mesh": dict(layout.mesh.shape)}))
    size = 1 if layout is None else layout.mesh.size
    if size != jax.device_count():
        raise LayoutError(
            f"the mesh has {size} device(s), the {processes.count} processes have {jax.device_count()}: legal is a "
            "mesh over all of them (mesh=NAME, or sizes of mesh axes)"
        )


def rows_of_a_pass(config: RunConfig, layout: Layout | None) -> int:
    return config.train.batch_size or (1 if layout is None else layout.rows)


@partial(jitted, static_argnames=("remat", "dropout", "balance"))
def gradients(
    trainable: Any,
    frozen: Any,
    batch: Any,
    key: jax.Array,
    *,
    remat: bool,
    dropout: float,
    balance: BalanceConfig | None = None,
):
    """`grad_step` under dropout, which is part of the function that is differentiated."""
    if not dropout:
        return grad_step(trainable, frozen, batch, remat=remat, balance=balance)
    dropped, back = jax.vjp(lambda t: drop_inputs(t, key, dropout), trainable)
    grads, sums = grad_step(dropped, frozen, batch, remat=remat, balance=balance)
    return back(grads)[0], sums


@partial(jax.jit, donate_argnums=0)
def add(grads: Any, sums: Any, new: Any) -> tuple[Any, Any]:
    """Gradients and sums of one pass more; gradients in float32 at least, whatever dtype their parameters have."""

    def wide(a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b if jnp.issubdtype(a.dtype, jnp.integer) else a.astype(accumulator(a.dtype)) + b

    return jax.tree.map(wide, (grads, sums), new)


balanced = jitted(balance_step, static_argnums=0)
update = jitted(update_step, static_argnums=0, donate_argnums=(1, 2))


def over_all(opt_state: Any, layout: Layout | None) -> Any:
    """Counters of the optimizer on every device; moments lie where their parameters do already."""
    if layout is None:
        return opt_state
    return jax.tree.map(lambda a: a if a.ndim else jax.device_put(a, layout.sharding()), opt_state)
