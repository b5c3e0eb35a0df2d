"""Cases of the grouped products: matrices as they are and in MXFP4, plain and gated, everyday and hostile groups."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from trillion_moe.config import ModelConfig
from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import gated_grouped_matmul, grouped_matmul
from trillion_moe.kernels.grouped_matmul.cases import all_to_one, zipf
from trillion_moe.layers.mlp import activation_of
from trillion_moe.verify import references
from trillion_moe.verify.cases import LEAST, Arrays, Case, Scale, matrix, normal, uniform

LONG = 8192  # products in one sum: an accumulator of few bits goes astray, and a TPU kernel holds it in one step
THIN = 512  # columns of cases that are about groups; the whole width is tried in others
UNEVEN = 1.4  # what the sum comes to: near a power of two, bfloat16 might add each part by a lucky whole step
GATED = ("gate", "up")


def widths(cfg: ModelConfig) -> tuple[int, int]:
    """(what the routed experts read and write, their hidden width)."""
    return cfg.moe.latent_size or cfg.hidden_size, cfg.moe.hidden_size


def rows(cfg: ModelConfig, scale: Scale) -> int:
    """Each token takes its experts; of many, only four, as a case has few experts."""
    return scale.tokens * min(cfg.moe.top_k, 4)


def numbers(cfg: ModelConfig, scale: Scale) -> int:
    (width, hidden), r = widths(cfg), rows(cfg, scale)
    return 2 * scale.experts * width * hidden + r * (width + 2 * hidden)


@dataclasses.dataclass(frozen=True)
class Form:
    """Banks by name, what is verified, and what it means: of rows, banks and sizes."""

    banks: tuple[str, ...]
    run: Callable[[str, Arrays, Arrays], Arrays]
    means: Callable[..., Any]
    transposed: bool = False


def _plain(transposed: bool = False) -> Form:
    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        x, w, sizes = floats["x"], floats["w"], constants["group_sizes"]
        return {"y": grouped_matmul(x, w, sizes, transpose_w=transposed, impl=implementation)}

    def means(x: Any, w: Any, sizes: np.ndarray) -> Any:
        return references.grouped(x, w.swapaxes(1, 2) if transposed else w, sizes)

    return Form(("w",), run, means, transposed)


def _glu(cfg: ModelConfig) -> Form:
    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        x, gate, up, sizes = floats["x"], floats["gate"], floats["up"], constants["group_sizes"]
        return {"y": gated_grouped_matmul(x, gate, up, sizes, activation_of(cfg), impl=implementation)}

    return Form(GATED, run, partial(references.gated, activate=references.activation(cfg)))


def dense(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    (width, hidden), r, e = widths(cfg), rows(cfg, scale), max(scale.experts, LEAST.experts)
    plain, glu, live, make = _plain(), _glu(cfg), r - r // 8, partial(_dense, np.random.default_rng(0))
    yield make("realistic: gate and up", glu, zipf(live, e), r, (width, hidden))
    yield make("realistic: down", plain, zipf(live, e), r, (hidden, width))
    yield make("adversarial: gate and up", glu, skewed(live, e), r, (width, hidden))
    yield make("adversarial: down", plain, skewed(live, e), r, (hidden, width))
    yield make("adversarial: transposed", _plain(transposed=True), skewed(r, e), r, (width, min(hidden, THIN)))
    yield make("adversarial: one group", plain, all_to_one(live, e, e - 1), r, (hidden, min(width, THIN)))
    for name, r, shape in LONG_SUMS:
        yield make(f"adversarial: {name}", plain, np.array([0, r - 1, 1]), r, shape, positive=True)
    name, r, shape = LONG_SUMS[0]
    yield make(f"adversarial: gated, {name}", glu, np.array([0, r - 1, 1]), r, shape, positive=True)


def skewed(live: int, experts: int) -> np.ndarray:
    """An empty group, one of a row, one of nearly all, then empty ones and ones of a row in turn, a row in the last."""
    sizes = np.array([0, 1, live, *[0, 1] * experts])[:experts]
    sizes[-1] = max(sizes[-1], 1)
    sizes[2] -= sizes.sum() - live
    return sizes


# name, rows, (K, N): one long sum in the product, in the rows' gradient, in the matrices' gradient.
LONG_SUMS = (
    ("long contraction", 32, (LONG, 32)),
    ("long output", 32, (32, LONG)),
    ("long group", LONG, (32, 32)),
)


def parts(sizes: np.ndarray, r: int) -> list[slice]:
    """The rows of each group, and those of none."""
    ends = [0, *np.cumsum(sizes).tolist(), r]
    return [slice(a, b) for a, b in pairwise(ends)]


def _rows(rng: np.random.Generator, sizes: np.ndarray, r: int, k: int, positive: bool) -> np.ndarray:
    x = np.array(uniform(rng, r, k) if positive else normal(rng, r, k))
    x[sizes.sum() :] = np.nan
    return x


def _bank(rng: np.random.Generator, *shape: int, positive: bool = False) -> np.ndarray:
    return uniform(rng, *shape) * np.float32(UNEVEN / shape[-2]) if positive else matrix(rng, *shape)


def _dense(rng, name: str, form: Form, sizes: np.ndarray, r: int, shape: tuple[int, int], *, positive=False) -> Case:
    banks = {bank: _bank(rng, len(sizes), *shape, positive=positive) for bank in form.banks}
    if form.transposed:
        banks = {bank: w.swapaxes(1, 2).copy() for bank, w in banks.items()}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        return {"y": form.means(floats["x"], *(floats[bank] for bank in form.banks), sizes)}

    by_row, by_expert = parts(sizes, r), [slice(e, e + 1) for e in range(len(sizes))]
    return Case(
        name=name,
        floats={"x": _rows(rng, sizes, r, shape[0], positive)} | banks,
        constants={"group_sizes": sizes.astype(np.int32)},
        run=form.run,
        reference=reference,
        parts={"x": by_row, "y": by_row} | dict.fromkeys(banks, by_expert),
        dead=int(sizes.sum()),
        positive=positive,
    )


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def packed(cfg: ModelConfig, scale: Scale) -> Iterator[Case]:
    (width, hidden), r, e = widths(cfg), rows(cfg, scale), max(scale.experts, LEAST.experts)
    live, make, gated = r - r // 8, partial(_packed, np.random.default_rng(4)), partial(_packed, gated_by=cfg)
    everyday, hostile = zipf(live, e), skewed(live, e)
    yield gated(np.random.default_rng(5), "realistic: gate and up", everyday, r, (width, hidden))
    yield make("realistic: down", everyday, r, (hidden, width))
    yield gated(np.random.default_rng(6), "adversarial: gate and up", hostile, r, (width, hidden), layout="nk")
    yield make("adversarial: down", hostile, r, (hidden, width), layout="nk")
    for name, long_rows, shape in LONG_SUMS[:2]:  # codes have no gradient
        yield make(f"adversarial: {name}", np.array([0, long_rows - 1, 1]), long_rows, shape, positive=True)
    sizes = np.array([0, 31, 1])
    yield gated(np.random.default_rng(7), "adversarial: gated, long contraction", sizes, 32, (LONG, 32), positive=True)
    yield _ends(np.random.default_rng(8), hostile, r, (width, hidden))


def _packed(
    rng: np.random.Generator,
    name: str,
    sizes: np.ndarray,
    r: int,
    shape: tuple[int, int],
    *,
    layout: str = "kn",
    positive: bool = False,
    gated_by: ModelConfig | None = None,
) -> Case:
    """layout: how an implementation that reads both is given the bank."""
    banks = {
        bank: _codes(rng, len(sizes), *shape, positive=positive) for bank in (("w",) if gated_by is None else GATED)
    }

    def run(implementation: str, floats: Arrays, constants: Arrays) -> Arrays:
        return {"y": _multiply(implementation, floats["x"], constants, layout, gated_by)}

    def reference(floats: Arrays, known: Arrays) -> Arrays:
        if gated_by is None:
            return {"y": references.grouped(floats["x"], known["w"], sizes)}
        return {"y": references.gated(floats["x"], known["gate"], known["up"], sizes, references.activation(gated_by))}

    by_row = parts(sizes, r)
    return Case(
        name=name,
        floats={"x": _rows(rng, sizes, r, shape[0], positive)},
        constants={"group_sizes": sizes.astype(np.int32)} | banks,
        prepare=partial(_laid_out, layout),
        known=lambda floats: _decoded(banks),
        run=run,
        reference=reference,
        parts={"x": by_row, "y": by_row},
        dead=int(sizes.sum()),
        positive=positive,
    )


def _multiply(implementation: str, x: Any, constants: Arrays, layout: str, gated_by: ModelConfig | None) -> Any:
    sizes, layout = constants["group_sizes"], mxfp4.LAYOUT.get(implementation, layout)
    if gated_by is None:
        codes, scale = constants["w"]
        return mxfp4.grouped_matmul_mxfp4(x, codes, scale, sizes, layout=layout, impl=implementation)
    gate, up, activation = constants["gate"], constants["up"], activation_of(gated_by)
    return mxfp4.gated_grouped_matmul_mxfp4(x, gate, up, sizes, activation, layout=layout, impl=implementation)


def _decoded(banks: Arrays) -> Arrays:
    return {name: references.decode(codes, scale) for name, (codes, scale) in banks.items()}


def _laid_out(layout: str, implementation: str, constants: Arrays) -> Arrays:
    to = mxfp4.LAYOUT.get(implementation, layout)
    return {
        name: mxfp4.to_layout(held[0], held[1], "nk", to) if isinstance(held, tuple) else held
        for name, held in constants.items()
    }


def _codes(rng: np.random.Generator, e: int, k: int, n: int, *, positive: bool) -> tuple[np.ndarray, np.ndarray]:
    """Any nibbles under scales around ``K**-1/2``; positive: those of 1/2 to 6 under one scale around 1/K."""
    typical = 127 + round(np.log2(1 / k if positive else k**-0.5)) - 1
    if positive:
        low, high = (rng.integers(1, 8, (e, n, k // 2), np.uint8) for _ in range(2))
        return low | high << 4, np.full((e, n, k // 32), typical, np.uint8)
    scale = rng.integers(typical - 2, typical + 2, (e, n, k // 32)).astype(np.uint8)
    return rng.integers(0, 256, (e, n, k // 2), np.uint8), scale


def _ends(rng: np.random.Generator, sizes: np.ndarray, r: int, shape: tuple[int, int]) -> Case:
    """Scales of 2^-125 and 2^125 side by side, rows that bring the products back to 1; values only, gradients would
    leave float32."""
    case = _packed(rng, "adversarial: smallest and largest scales", sizes, r, shape, layout="nk")
    (codes, scale), x = case.constants["w"], np.array(case.floats["x"])
    exponent = np.where(np.arange(shape[0] // 32) % 2, 125, -125)
    scale = np.broadcast_to(127 + exponent, scale.shape).astype(np.uint8)
    x = np.sign(x) * np.ldexp(1 + np.minimum(np.abs(x), 0.75), np.repeat(np.where(exponent > 0, -123, 125), 32))
    constants = {"group_sizes": case.constants["group_sizes"], "w": (codes, scale)}
    known = {"w": (codes, scale)}
    return dataclasses.replace(
        case,
        floats={"x": x.astype(np.float32)},
        constants=constants,
        known=lambda floats: _decoded(known),
        gradients=False,
    )
