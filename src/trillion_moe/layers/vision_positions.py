"""What the host knows of a batch of images, in NumPy: the grids, every patch's position, the places in the prompt.

An item is an image, or a few video frames seen as one; its grid is (t, h, w): frames, rows and columns of patches. Its
patches stand frame by frame, row by row. Shape suffixes: P patches, M merged rows, W patches of a merge window.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from trillion_moe.config import VisionConfig

CHANNELS = 3
MAX_SIDE = 512  # patches, the release's limit on h and w

Grid = tuple[int, int, int]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class ImageBatch:
    """Items of any grids: patches ``[P, 3, p, p]`` one item after the other, and the grids, static under `jax.jit`.

    `grid_thw` may be given as any integer array-like ``[items, 3]``. Without items there is no batch: pass None.
    """

    patches: Any
    grid_thw: tuple[Grid, ...]

    def __init__(self, patches: Any, grid_thw: Any):
        grids = np.asarray(grid_thw)
        if grids.ndim != 2 or grids.shape[1] != 3 or not len(grids) or not np.issubdtype(grids.dtype, np.integer):
            found = f"{grids.dtype}{list(grids.shape)}"
            raise ValueError(f"grid_thw is {found}; legal: integers [items, 3], at least one item")
        for i, grid in enumerate(grids.tolist()):
            if min(grid) < 1:
                raise ValueError(f"grid_thw[{i}] = {grid}: t, h and w must be at least 1")
        rows = int(np.prod(grids, axis=1).sum())
        shape = tuple(patches.shape)
        if len(shape) != 4 or shape[1] != CHANNELS or shape[2] != shape[3]:
            raise ValueError(f"patches has shape {shape}; legal: [patches, {CHANNELS}, p, p]")
        if shape[0] != rows:
            raise ValueError(f"patches has {shape[0]} rows, but the {len(grids)} grids in grid_thw hold {rows} patches")
        object.__setattr__(self, "patches", patches)
        object.__setattr__(self, "grid_thw", tuple((t, h, w) for t, h, w in grids.tolist()))

    def check(self, cfg: VisionConfig) -> None:
        """ValueError if the tower cannot take these items, with the index of the first."""
        if self.patches.shape[-1] != cfg.patch_size:
            raise ValueError(f"patches are {self.patches.shape[-1]} pixels wide; this model takes {cfg.patch_size}")
        for i, (t, h, w) in enumerate(self.grid_thw):
            at = f"grid_thw[{i}] = {(t, h, w)}"
            if t > cfg.pos_emb_time:
                raise ValueError(f"{at}: {t} frames; an item has 1 to {cfg.pos_emb_time}")
            if h % cfg.merge[0] or w % cfg.merge[1]:
                raise ValueError(f"{at}: h and w must be multiples of the merge window {cfg.merge}")
            if max(h, w) > MAX_SIDE:
                raise ValueError(f"{at}: h and w are at most {MAX_SIDE} patches")

    def tokens_per_item(self, cfg: VisionConfig) -> tuple[int, ...]:
        """Rows an item takes in the text: h w / (merge window), whatever its frames. Checks the grids."""
        self.check(cfg)
        return tuple(h // cfg.merge[0] * (w // cfg.merge[1]) for _, h, w in self.grid_thw)

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("patches"), self.patches),), self.grid_thw

    @classmethod
    def tree_unflatten(cls, grid_thw, children):
        batch = object.__new__(cls)  # unchecked: the leaf may be a tracer, a sharding, anything
        object.__setattr__(batch, "patches", children[0])
        object.__setattr__(batch, "grid_thw", grid_thw)
        return batch


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Index and weight arrays of a batch. Working order: items sorted by length, equal ones adjacent.

    order: int32 [P], the patch of the batch that stands at each working place; `inverse` is its inverse.
    groups: (items, patches per item), by rising length.
    item, row, column: int32 [P]. frame: int32 [P], -1 throughout a still item, which gets no time term.
    corners: int32 [4, P], rows of the flattened position table; corner_weights: float32 [4, P], sum 1.
    merge: int32 [M, frames, W], working places of every merged row, in the order of the batch; merge_weights: float32
        [M, frames], 1 / t, and 0 in frames that an item lacks.
    """

    order: np.ndarray
    inverse: np.ndarray
    groups: tuple[tuple[int, int], ...]
    item: np.ndarray
    frame: np.ndarray
    row: np.ndarray
    column: np.ndarray
    corners: np.ndarray
    corner_weights: np.ndarray
    merge: np.ndarray
    merge_weights: np.ndarray


def positions(grid_thw: Sequence[Grid], cfg: VisionConfig) -> Positions:
    """The `Positions` of a batch with these grids (assumed checked)."""
    sizes = [t * h * w for t, h, w in grid_thw]
    starts = np.cumsum([0, *sizes])
    items = sorted(range(len(sizes)), key=sizes.__getitem__)
    order = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in items])
    inverse = np.argsort(order)
    frame, row, column = np.concatenate([np.indices(grid_thw[i]).reshape(3, -1) for i in items], axis=1)
    still = np.concatenate([np.full(sizes[i], grid_thw[i][0] == 1) for i in items])
    corners, weights = zip(*(_bilinear(grid_thw[i], cfg) for i in items), strict=True)
    merge, merge_weights = _merge_windows(grid_thw, cfg.merge)
    lengths, counts = np.unique(sizes, return_counts=True)
    return Positions(
        order=order.astype(np.int32),
        inverse=inverse.astype(np.int32),
        groups=tuple(zip(counts.tolist(), lengths.tolist(), strict=True)),
        item=np.repeat(items, [sizes[i] for i in items]).astype(np.int32),
        frame=np.where(still, -1, frame).astype(np.int32),
        row=row.astype(np.int32),
        column=column.astype(np.int32),
        corners=np.concatenate(corners, axis=1).astype(np.int32),
        corner_weights=np.concatenate(weights, axis=1).astype(np.float32),
        merge=inverse[merge].astype(np.int32),
        merge_weights=merge_weights.astype(np.float32),
    )


def time_table(frames: int, width: int) -> np.ndarray:
    """float32 ``[frames + 1, width]``: ``[sin(t w_i) | cos(t w_i)]``, w_i = 10000^(-2i/width); the last row is zero."""
    angles = np.arange(frames)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.concatenate([table, np.zeros((1, width))]).astype(np.float32)


def rotation_table(side: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 cos and sin ``[side, head_dim / 4]`` of coordinate times f_i, f_i = 10000^(-4i/head_dim)."""
    angles = np.arange(side)[:, None] * 10000.0 ** (-4 * np.arange(head_dim // 4) / head_dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _bilinear(grid: Grid, cfg: VisionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Table rows and weights ``[4, t h w]`` that resize the table to (h, w); one weight is 1 where the sizes agree."""
    (t, h, w), width = grid, cfg.pos_emb_width
    (top, bottom), share_h = _neighbours(h, cfg.pos_emb_height)
    (left, right), share_w = _neighbours(w, width)
    corners = [r[:, None] * width + c[None, :] for r in (top, bottom) for c in (left, right)]
    weights = [a[:, None] * b[None, :] for a in (1 - share_h, share_h) for b in (1 - share_w, share_w)]
    return np.tile(np.reshape(corners, (4, -1)), t), np.tile(np.reshape(weights, (4, -1)), t)


def _neighbours(size: int, table: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The two table entries around each of `size` cell centres, and the second one's share.

    torch's ``interpolate(mode="bilinear", align_corners=False)``: centre i lies at ``(i + 1/2) table / size - 1/2``,
    and the table's edges are repeated outward.
    """
    at = np.maximum((np.arange(size) + 0.5) * table / size - 0.5, 0)
    low = np.floor(at).astype(np.int64)
    return (low, np.minimum(low + 1, table - 1)), at - low


def _merge_windows(grid_thw: Sequence[Grid], merge: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Patches of the batch ``[M, frames, W]`` and frame weights ``[M, frames]``; windows and patches row by row."""
    (a, b), frames, start = merge, max(t for t, _, _ in grid_thw), 0
    places, weights = [], []
    for t, h, w in grid_thw:
        patches = start + np.arange(t * h * w).reshape(t, h // a, a, w // b, b)
        windows = patches.transpose(1, 3, 0, 2, 4).reshape(-1, t, a * b)
        places.append(np.pad(windows, ((0, 0), (0, frames - t), (0, 0)), mode="edge"))
        weights.append(np.tile(np.where(np.arange(frames) < t, 1 / t, 0), (len(windows), 1)))
        start += t * h * w
    return np.concatenate(places), np.concatenate(weights)


def expand_placeholders(
    tokens_BT: np.ndarray,
    segments_BT: np.ndarray | None,
    counts: Sequence[int],
    media_id: int,
    pad_id: int,
    *,
    items_per_row: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """One placeholder per item becomes a run of `counts` placeholders; -> tokens, segments of the (longer) rows.

    Items are taken in row order. If there are already as many placeholders as rows in all items, nothing is inserted;
    each item's run must then lie in one document. Rows of unequal length are padded on the right with `pad_id` in
    segment 0; segments stay None if none were given and none are needed. Placeholders inside padding do not count: with
    segments, padding holds `pad_id` afterwards.

    items_per_row: checked against each row if given. ValueError with the row, what it holds and what was expected.
    """
    tokens_BT = np.asarray(tokens_BT)
    if segments_BT is not None:
        segments_BT = np.asarray(segments_BT)
        tokens_BT = np.where(segments_BT > 0, tokens_BT, pad_id).astype(tokens_BT.dtype)
    holds_BT = tokens_BT == media_id
    if segments_BT is not None:
        holds_BT &= segments_BT > 0
    expanded = _is_expanded(holds_BT.sum(axis=1), counts, media_id, items_per_row)
    if expanded:
        _check_runs(holds_BT, segments_BT, counts)
        return tokens_BT, segments_BT
    repeats_BT = np.ones(tokens_BT.shape, np.int64)
    repeats_BT[holds_BT] = counts
    lengths_B = repeats_BT.sum(axis=1)
    if segments_BT is None and np.ptp(lengths_B) > 0:
        segments_BT = np.ones(tokens_BT.shape, np.int32)
    new_segments = None if segments_BT is None else _repeat_rows(segments_BT, repeats_BT, 0)
    return _repeat_rows(tokens_BT, repeats_BT, pad_id), new_segments


def _is_expanded(
    found_B: np.ndarray, counts: Sequence[int], media_id: int, items_per_row: Sequence[int] | None
) -> bool:
    """Whether the placeholders found per row stand for the items' rows (True) or for the items (False)."""
    found, items, expanded = int(found_B.sum()), len(counts), int(sum(counts))
    if found not in (items, expanded):
        row = int(np.argmax(np.cumsum(found_B) > items)) if found > items else len(found_B) - 1
        raise ValueError(
            f"row {row}: {found} placeholders (id {media_id}) in all, per row {found_B.tolist()}; "
            f"{items} images need {items} (one each) or {expanded} (expanded to {list(counts)})"
        )
    if items_per_row is not None:
        if len(items_per_row) != len(found_B) or sum(items_per_row) != items:
            shares = list(items_per_row)
            raise ValueError(f"items_per_row {shares} does not share {items} images among {len(found_B)} rows")
        ends = np.cumsum(items_per_row)
        for row, (end, mine) in enumerate(zip(ends.tolist(), items_per_row, strict=True)):
            tokens = int(sum(counts[end - mine : end]))
            if found_B[row] != (tokens if found == expanded else mine):
                raise ValueError(
                    f"row {row}: {found_B[row]} placeholders (id {media_id}); its {mine} images need {mine} (one each) "
                    f"or {tokens} (expanded), and all rows the same of the two"
                )
    return found == expanded


def _check_runs(holds_BT: np.ndarray, segments_BT: np.ndarray | None, counts: Sequence[int]) -> None:
    rows, columns = np.nonzero(holds_BT)
    documents = np.ones_like(rows) if segments_BT is None else segments_BT[rows, columns]
    places = np.stack([rows, documents], axis=1)
    for i, mine in enumerate(np.split(places, np.cumsum(counts)[:-1])):
        spread = np.unique(mine, axis=0).tolist()
        if len(spread) > 1:
            raise ValueError(f"row {spread[0][0]}: placeholders of image {i} spread over [row, segment] {spread}")


def _repeat_rows(x_BT: np.ndarray, repeats_BT: np.ndarray, fill: int) -> np.ndarray:
    """Each entry repeated along its row, rows padded on the right to the longest."""
    out = np.full((len(x_BT), repeats_BT.sum(axis=1).max(initial=0)), fill, x_BT.dtype)
    for row, x, repeats in zip(out, x_BT, repeats_BT, strict=True):
        row[: repeats.sum()] = np.repeat(x, repeats)
    return out
