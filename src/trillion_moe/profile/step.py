"""The training step of a run's configuration, over the devices that are there: its time, and where that goes.

Programs are those of `train`, sizes those of its longest batches; weights and tokens are drawn, so no checkpoint is
read, and routers choose as untrained ones do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from trillion_moe.blueprint import init
from trillion_moe.config import ModelConfig
from trillion_moe.model import least_tokens
from trillion_moe.optimizer import make_optimizer
from trillion_moe.profile.timing import Seconds, timed
from trillion_moe.profile.trace import Shares, instructions, shares, traced
from trillion_moe.programs import (
    add,
    balanced,
    blueprint,
    checked,
    gradients,
    model_config,
    over_all,
    rows_of_a_pass,
    update,
)
from trillion_moe.run_config import RunConfig, RunConfigError
from trillion_moe.sharding import Layout, check_batch, place, put, shardings
from trillion_moe.transforms import partition
from trillion_moe.transforms.targets import dims, places

SCHEDULE = 1000  # updates of the learning rate's schedule; no time depends on it
TRACED = 3
_UNADAPTED = ("attention.kv_b", "ffn.router.weight")  # matrices that no adapter can be put on


@dataclass(frozen=True)
class Step:
    """One update of `passes` passes over `rows` x `tokens`. seconds: of updates. tokens_per_second: of the median.

    flops: of the model's matrices in one update, see `flops`; flops_per_second: of all devices together, of the median;
    of_peak: over the bf16 peak of the devices, None where the machine's file has none. shares: of `TRACED` updates;
    None where the trace has no instruction of theirs, and `untraced` then says so.
    """

    rows: int
    tokens: int
    passes: int
    seconds: Seconds
    tokens_per_second: float
    flops: float
    flops_per_second: float
    of_peak: float | None
    shares: Shares | None
    untraced: str | None


def check(config: RunConfig, layout: Layout | None) -> ModelConfig:
    """The model's. Raises RunConfigError for settings without a step, LayoutError for a batch or a model that the mesh
    cannot cut: before anything is drawn."""
    cfg = model_config(config)
    check_batch(layout, *_shape(config, layout), least=least_tokens(cfg))
    checked(cfg, config, jax.default_backend(), layout)
    return cfg


def measure(config: RunConfig, cfg: ModelConfig, layout: Layout | None, calls: int, peak: float | None) -> Step:
    """peak: bf16 FLOP/s of one device. Raises what `check` does, which has been called with the same."""
    run, texts, flop = _update(config, cfg, layout)
    seconds = Seconds.of(timed(run, calls))
    found = shares(traced(lambda: [jax.block_until_ready(run()) for _ in range(TRACED)]), instructions(texts))
    (rows, length), passes = _shape(config, layout), config.train.accumulate
    devices = 1 if layout is None else layout.mesh.devices.size
    return Step(
        rows,
        length,
        passes,
        seconds,
        passes * rows * length / seconds.p50,
        flop,
        flop / seconds.p50,
        None if peak is None else flop / seconds.p50 / devices / peak,
        found,
        None if found else f"the trace on {jax.devices()[0].device_kind} has no instruction of the step's programs",
    )


def _update(config: RunConfig, cfg: ModelConfig, layout: Layout | None) -> tuple[Callable[[], Any], list[str], float]:
    """One update more with every call, the HLO of its programs, and its `flops`."""
    model = blueprint(cfg, config, jax.default_backend(), layout)
    model = _drawn(model if layout is None else place(model, layout), config.seed)
    trained, frozen = partition(model, trainable="all" if config.lora is None else "lora")
    optimizer = make_optimizer(config.optimizer, SCHEDULE)
    state = over_all(optimizer.init(trained), layout)
    batch, key, t = _batch(cfg, config, layout), jax.random.key(config.seed), config.train
    per_token = flops(model, trained, everything=config.lora is None)
    del model

    passed = gradients.lower(trained, frozen, batch, key, remat=t.remat, dropout=t.dropout, balance=t.balance).compile()
    grads, sums = passed(trained, frozen, batch, key)
    added = add.lower(grads, sums, (grads, sums)).compile() if t.accumulate > 1 else None
    updated = update.lower(optimizer, trained, state, grads, sums).compile()
    moved = None if t.balance is None else balanced.lower(t.balance, frozen, sums).compile()
    del grads, sums

    def run() -> Any:
        nonlocal trained, frozen, state
        grads, sums = passed(trained, frozen, batch, key)
        for _ in range(1, t.accumulate):
            assert added is not None
            grads, sums = added(grads, sums, passed(trained, frozen, batch, key))
        trained, state, metrics = updated(trained, state, grads, sums)
        if moved is not None:
            frozen = moved(frozen, metrics)
        return trained, metrics

    texts = [program.as_text() or "" for program in (passed, added, updated, moved) if program is not None]
    return run, texts, per_token * t.accumulate * batch["tokens"].size


def _drawn(model: Any, seed: int) -> Any:
    """Arrays by the blueprint's initialisers, each device its own part."""
    where = None if model.layout is None else shardings(model, model.layout)
    return jax.jit(partial(init, model), out_shardings=where)(jax.random.key(seed))


def _batch(cfg: ModelConfig, config: RunConfig, layout: Layout | None) -> dict[str, Any]:
    """Full rows of one document each, all of it supervised, as `train` hands them to its programs."""
    shape = _shape(config, layout)
    tokens = np.random.default_rng(config.seed).integers(0, cfg.vocab_size, shape).astype(np.int32)
    if cfg.media_id is not None:  # stands for a picture
        tokens[tokens == cfg.media_id] = (cfg.media_id + 1) % cfg.vocab_size
    arrays = {"tokens": tokens, "segments": np.ones(shape, np.int32), "loss_mask": np.ones(shape, bool)}

    def over(array: np.ndarray) -> jax.Array:
        return jax.numpy.asarray(array) if layout is None else put(array, layout.sharding("batch", "time"))

    return {name: over(array) for name, array in arrays.items()} | {"images": None}


def _shape(config: RunConfig, layout: Layout | None) -> tuple[int, int]:
    """Rows of a pass, tokens of a row."""
    if config.examples.max_length is None:
        raise RunConfigError("examples.max_length is null: a step needs the length of its rows")
    return rows_of_a_pass(config, layout), config.examples.max_length


def flops(model: Any, trained: Any, *, everything: bool) -> float:
    """Of the products of a token with the matrices of the text model, forward and backward: 2 a number forward, 2 for
    the gradient of what it is multiplied with, 2 for its own if it is trained; routed experts by the share that a token
    uses. Nothing is counted twice that is computed twice, and the products of attention are left out.

    trained: the adapters, unless everything is trained.
    """
    moe = model.config.moe
    used = {"routed_experts": moe.top_k / moe.num_experts} if moe is not None else {}

    def counted(tree: Any, a_number: int, size: Callable[[Any], int]) -> float:
        found = [p for p in places(tree)[0] if p.group not in (None, "vision") or p.names[0].endswith(_UNADAPTED)]
        return sum(a_number * used.get(p.group or "", 1.0) * p.share * size(p.leaf) for p in found)

    def logical(weight: Any) -> int:
        batch, k, n = dims(weight)
        return int(np.prod(batch, dtype=np.int64)) * k * n

    total = counted(model, 6 if everything else 4, logical)
    return total if everything else total + counted(trained, 6, lambda leaf: sum(a.size for a in jax.tree.leaves(leaf)))
