"""Batches of fixed shape from examples, on Grain: order, shards, and going on where a run stopped.

A pack is what stands in one row of a batch: an example, or several. An epoch is every pack once, in an order that
follows from (seed, epoch) alone. Batches are cut from that order before they are shared among processes, so that they
are the same for any number of these.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from trillion_moe.data.examples import Examples
from trillion_moe.data.images import Grid
from trillion_moe.data.rows import DataError

AHEAD = 2  # batches that are made before they are asked for


class Batch(TypedDict):
    """What one process gets of a batch, B rows of T tokens.

    tokens int32, segments int32 (0 = padding; 1, 2, ... = the examples of the row), loss_mask bool, each [B, T]; every
    true of the mask is one target of the loss.
    patches float32 [N, 3, p, p] of all pictures, row by row, and their grids; None and () without. `grids` is static
    for the compiler: every new tuple of them compiles anew. rows: per row, the lines of the file that it holds.
    """

    tokens: np.ndarray
    segments: np.ndarray
    loss_mask: np.ndarray
    patches: np.ndarray | None
    grids: tuple[Grid, ...]
    rows: tuple[tuple[int, ...], ...]


class Loader:
    """Iterating gives `Batches`, from the beginning.

    batch_size: rows of a batch over all processes. lengths: legal T, rising; a batch has the least that holds its
    longest row, in every process the same. The last batch of an epoch is filled up with rows of padding (segments 0).
    seed: of the order of each epoch; None = the order of the file. epochs: None = without end. pack: several examples
    in a row: once, in the order of the file, each goes into the first pack with room; epochs then order these packs.
    shard: (number of this process, processes). threads: for pictures; 0 = everything when it is asked for.

    Raises: DataError for illegal values, and for an example that is longer than the greatest length.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        batch_size: int,
        lengths: Sequence[int],
        seed: int | None = 0,
        epochs: int | None = None,
        pack: bool = False,
        shard: tuple[int, int] = (0, 1),
        threads: int = 2,
    ):
        self.examples, self.batch_size, self.lengths = examples, batch_size, tuple(map(int, lengths))
        self.seed, self.epochs, self.pack, self.shard, self.threads = seed, epochs, pack, shard, threads
        if found := list(self._problems()):
            raise DataError(examples.path, found)
        sizes = [len(item.ids) for item in examples.items]
        self.packs = first_fit(sizes, self.lengths[-1]) if pack else [(i,) for i in range(len(sizes))]
        self.batches_per_epoch = math.ceil(len(self.packs) / batch_size)
        self._order = self._ordered()

    def _problems(self) -> Iterator[str]:
        lengths, (index, count) = self.lengths, self.shard
        if not lengths or list(lengths) != sorted({*lengths}) or lengths[0] < 1:
            yield f"lengths = {lengths}: legal are one or more integers of at least 1, rising"
        else:
            long = (item for item in self.examples.items if len(item.ids) > lengths[-1])
            yield from (f"line {i.line} has {len(i.ids)} tokens, the greatest length is {lengths[-1]}" for i in long)
        if not 0 <= index < count:
            yield f"shard = {self.shard}: legal is (number of this process, from 0; processes)"
        elif self.batch_size < 1 or self.batch_size % count:
            yield f"batch_size = {self.batch_size}: legal is a multiple of the {count} process(es)"
        for name, least in (("seed", 0), ("epochs", 1), ("threads", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                yield f"{name} = {value}: legal is an integer of at least {least}"

    def __iter__(self) -> "Batches":
        return Batches(self)

    def order(self, epoch: int) -> np.ndarray:
        """int32 [packs]: their numbers in the order of an epoch, which counts from 0."""
        n = len(self.packs)
        return np.array([self._order[epoch * n + i] for i in range(n)], np.int32)

    @property
    def settings(self) -> dict[str, Any]:
        """All that the batches depend on, but for the shard: JSON."""
        return {
            "examples": self.examples.digest,
            "batch_size": self.batch_size,
            "lengths": list(self.lengths),
            "seed": self.seed,
            "pack": self.pack,
        }

    def _ordered(self) -> Any:
        """Grain's data set of pack numbers; its index runs on through the epochs, each of which is shuffled anew."""
        import grain

        numbers = grain.MapDataset.range(len(self.packs))
        if self.seed is None:
            return numbers
        # Grain adds the epoch to the seed: near seeds would share their orders, an epoch apart.
        return numbers.shuffle(seed=int(np.random.SeedSequence(self.seed).generate_state(1)[0]))

    def grain_iterator(self) -> Any:
        """Grain's iterator over this process's batches."""
        import grain

        batches = self._order.batch(self.batch_size, drop_remainder=False, batch_fn=tuple).repeat(self.epochs)
        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=AHEAD if self.threads else 0)
        return iter(batches.map(self._batch).to_iter_dataset(options))

    def _batch(self, numbers: tuple[int, ...]) -> Batch:
        rows = [self.packs[n] for n in numbers] + [()] * (self.batch_size - len(numbers))
        items = self.examples.items
        longest = max(sum(len(items[i].ids) for i in row) for row in rows)
        length = next(length for length in self.lengths if length >= longest)
        index, count = self.shard
        size = self.batch_size // count
        return self._filled(rows[index * size : (index + 1) * size], length)

    def _filled(self, rows: Sequence[tuple[int, ...]], length: int) -> Batch:
        items, shape = self.examples.items, (len(rows), length)
        tokens = np.full(shape, self.examples.pad_id, np.int32)
        segments, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for r, row in enumerate(rows):
            at = 0
            for segment, i in enumerate(row, 1):
                span = slice(at, at := at + len(items[i].ids))
                tokens[r, span], segments[r, span], mask[r, span] = items[i].ids, segment, items[i].mask
        flat = [i for row in rows for i in row]
        patches = [found for i in flat if (found := self.examples.patches(i)) is not None]
        return Batch(
            tokens=tokens,
            segments=segments,
            loss_mask=mask,
            patches=np.concatenate(patches) if patches else None,
            grids=tuple(picture.grid_thw for i in flat for picture in items[i].pictures),
            rows=tuple(tuple(items[i].line for i in row) for row in rows),
        )


class Batches(Iterator[Batch]):
    """The batches of a loader, one after the other. `get_state` between two of them, `set_state` in a new one that was
    made with the same settings: what follows is what would have followed."""

    def __init__(self, loader: Loader):
        self.loader = loader
        self._batches = loader.grain_iterator()
        self._checksums: dict[int, int] = {}

    def __next__(self) -> Batch:
        return next(self._batches)

    @property
    def position(self) -> int:
        """Batches given so far, over all epochs."""
        return self._batches.get_state()["next_index"]

    def get_state(self) -> dict[str, Any]:
        """JSON: the position, the settings, and a checksum of the epoch's order, the same in every process."""
        return {"position": self.position, "order": self._checksum(self.position), "settings": self.loader.settings}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """DataError, with both values, if what follows would not be what followed: other examples or settings, another
        order of this epoch (a version of Grain that shuffles differently), a position that is none."""
        where, settings = self.loader.examples.path, self.loader.settings
        if state.keys() != {"position", "order", "settings"} or not isinstance(state["settings"], Mapping):
            raise DataError(where, [f"a state has position, order and settings; this one has {sorted(state)}"])
        was = state["settings"]
        found = [
            f"{key} was {was.get(key)!r} when the state was taken and is {settings.get(key)!r}"
            for key in sorted({*settings, *was})
            if was.get(key) != settings.get(key)
        ]
        last = None if self.loader.epochs is None else self.loader.epochs * self.loader.batches_per_epoch
        position = state["position"]
        if type(position) is not int or position < 0 or (last is not None and position > last):
            found.append(f"position {position!r} is not in 0..{'' if last is None else last}")
        if not found and state["order"] != (order := self._checksum(position)):
            found = [f"the order of the epoch had checksum {state['order']} and has {order}"]
        if found:
            raise DataError(where, [f"cannot go on from this state: {what}" for what in found])
        self._batches.set_state({"next_index": position})

    def _checksum(self, position: int) -> int:
        """Of the order of the epoch in which the next batch lies. Orders of a million packs take seconds: keep it."""
        epoch = position // self.loader.batches_per_epoch
        if epoch not in self._checksums:
            self._checksums = {epoch: zlib.crc32(self.loader.order(epoch).tobytes())}
        return self._checksums[epoch]


def first_fit(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Numbers of the sizes, each in the first bin that still has room for it; none may exceed `capacity`."""
    bins: list[list[int]] = []
    room = np.full(len(sizes), capacity)
    for i, size in enumerate(sizes):
        place = int(np.argmax(room[: len(bins) + 1] >= size))
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        room[place] -= size
    return [tuple(numbers) for numbers in bins]
