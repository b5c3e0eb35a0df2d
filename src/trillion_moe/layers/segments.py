"""Depth as data: which layers run one after the other, which are stacked, which lie on a pipeline's stages."""

import dataclasses

from trillion_moe.blueprint import LayerSpec, Segment, layer_numbers, numbered
from trillion_moe.config import ModelConfig
from trillion_moe.layers.schedule import Schedule
from trillion_moe.sharding import BATCH, Layout, LayoutError

SCAN_ABOVE = 16  # layers; a shallower model is unrolled, which runs faster and still compiles in seconds
PERIODS = range(1, 9)  # lengths of a run of layers that may repeat


Plan = tuple[Segment, ...]


def kinds_of(cfg: ModelConfig) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(a, f) for a, f in zip(cfg.attention, cfg.mlp, strict=True))


def depth_plan(cfg: ModelConfig, *, scan: bool | None = None) -> Plan:
    """Depth as data. A repeat is one block of attention residuals; without them, the shortest repeating run of layers.

    scan: stack what repeats; None decides by depth (more than SCAN_ABOVE layers).
    """
    kinds = kinds_of(cfg)
    scan = len(kinds) > SCAN_ABOVE if scan is None else scan
    if cfg.attn_res_block is None:
        return tuple(_runs(kinds)) if scan else (Segment(kinds, 1),)
    size, segments = cfg.attn_res_block, []
    for block in (kinds[i : i + size] for i in range(0, len(kinds), size)):
        if scan and segments and segments[-1].layers == block:
            segments[-1] = Segment(block, segments[-1].repeats + 1)
        else:
            segments.append(Segment(block, 1))
    return tuple(segments)


def plan_for(cfg: ModelConfig, layout: Layout | None, scan: bool | None = None) -> Plan:
    """Of a model that is to lie so: `depth_plan`, or over pipeline stages `staged_plan`, where scan must be None."""
    if layout is None or layout.size("pp") == 1:
        return depth_plan(cfg, scan=scan)
    if scan is not None:
        raise ValueError(f"scan is {scan!r} over pipeline stages, which are always stacked: legal is None")
    return staged_plan(cfg, layout.size("pp"), layout.virtual)


def _runs(kinds: tuple[LayerSpec, ...]) -> list[Segment]:
    """Cut into runs: at each layer the period whose repetition covers most, the shortest on a tie."""
    segments, i = [], 0
    while i < len(kinds):
        best = (1, -1, 1)  # layers covered, -period, repeats
        for period in (p for p in PERIODS if p <= len(kinds) - i):
            repeats = 1
            while kinds[i : i + period] == kinds[i + repeats * period : i + (repeats + 1) * period]:
                repeats += 1
            if repeats > 1:
                best = max(best, (repeats * period, -period, repeats))
        segments.append(Segment(kinds[i : i - best[1]], best[2]))
        i += best[0]
    return segments


def check_plan(cfg: ModelConfig, plan: Plan) -> None:
    """ValueError for a plan that would compute another model than the config's."""
    found = numbered(plan)
    if found != list(enumerate(kinds_of(cfg))):
        raise ValueError(f"the plan's {len(found)} layers are not the {cfg.num_layers} of the config, in its order")
    sizes = [len(segment.layers) for segment in plan for _ in range(segment.repeats)]
    block = cfg.attn_res_block
    if block is None or any(segment.numbers for segment in plan):
        return
    if sizes != [min(block, cfg.num_layers - i) for i in range(0, cfg.num_layers, block)]:
        raise ValueError(f"a repeat must be one block of attention residuals, {block} layers; the plan has {sizes}")


def layer_places(plan: Plan) -> list[tuple[int, int, int | None]]:
    """For every layer: its segment, its place in it, and its repeat (None in a segment that does not repeat)."""
    places = {
        number: (s, j, None if segment.repeats == 1 else r)
        for s, (segment, repeats) in enumerate(zip(plan, layer_numbers(plan), strict=True))
        for r, numbers in enumerate(repeats)
        for j, number in enumerate(numbers)
        if number is not None
    }
    return [place for _, place in sorted(places.items())]


# --- stages of a pipeline --------------------------------------------------------------------------------------------


def staged_plan(cfg: ModelConfig, stages: int, virtual: int = 1) -> Plan:
    """Leading dense layers by themselves, then all others in groups of one pattern that lie on the stages in turn.

    A group is the shortest run of layers of which slots have to stay empty least often: of Kimi K3 the four layers KDA,
    KDA, MLA, KDA; its last layer, an MLA out of turn, has a group for itself. Repeats are stored by stage, then by the
    runs of a stage (`virtual`), then by depth. Raises LayoutError with the legal numbers where a stage would be empty.
    """
    kinds = kinds_of(cfg)
    first = next((i for i, kind in enumerate(kinds) if kind.ffn == "moe"), len(kinds))
    runs = stages * virtual
    pattern, places = _best_groups(kinds[first:], runs)
    each = -(-_groups(pattern, places) // runs)
    if not places or (runs - 1) * each >= _groups(pattern, places):
        legal = [str(n) for n in range(1, len(kinds) + 1) if _fills(kinds[first:], n)] or ["1: no layer has experts"]
        raise LayoutError(
            f"{cfg.num_layers} layers over pp {stages} x virtual {virtual} = {runs} stages leave one empty: legal "
            f"products are {', '.join(legal)}"
        )
    grid: list[list[int | None]] = [[None] * len(pattern) for _ in range(runs * each)]
    for number, place in enumerate(places, first):
        group, j = divmod(place, len(pattern))
        run, inner = divmod(group, each)
        grid[((run % stages) * virtual + run // stages) * each + inner][j] = number
    lead = (Segment(kinds[:first], 1),) if first else ()
    return *lead, Segment(pattern, runs * each, stages, virtual, tuple(map(tuple, grid)))


def _best_groups(kinds: tuple[LayerSpec, ...], runs: int) -> tuple[tuple[LayerSpec, ...], list[int]]:
    """The pattern of a group, and the place of each layer, counted over all slots, for the fewest slots in all."""
    found = [(kinds[:period], _places(kinds, kinds[:period])) for period in PERIODS if period <= len(kinds)]
    usable = [(pattern, places) for pattern, places in found if places]

    def slots(one: tuple[tuple[LayerSpec, ...], list[int]]) -> int:
        return -(-_groups(*one) // runs) * runs * len(one[0])

    return min(usable, key=slots, default=((), []))


def _places(kinds: tuple[LayerSpec, ...], pattern: tuple[LayerSpec, ...]) -> list[int]:
    """Each layer in the next slot of its kind; none if the pattern has no slot for one."""
    if set(kinds) - set(pattern):
        return []
    places, at = [], 0
    for kind in kinds:
        while pattern[at % len(pattern)] != kind:
            at += 1
        places.append(at)
        at += 1
    return places


def _groups(pattern: tuple[LayerSpec, ...], places: list[int]) -> int:
    return places[-1] // len(pattern) + 1 if places else 0


def _fills(kinds: tuple[LayerSpec, ...], runs: int) -> bool:
    groups = _groups(*_best_groups(kinds, runs))
    return groups > 0 and (runs - 1) * -(-groups // runs) < groups


@dataclasses.dataclass(frozen=True)
class Stages:
    """Of a batch over pipeline stages. slots: for layers, of which `empty` hold none and are computed for nothing.
    bubble: share of its time that a stage waits."""

    stages: int
    virtual: int
    microbatches: int
    schedule: str
    bubble: float
    slots: int
    empty: int

    def __str__(self) -> str:
        return (
            f"{self.stages} stages x {self.virtual} runs of layers, {self.microbatches} microbatches, {self.schedule}: "
            f"bubble {self.bubble:.0%}, {self.empty} of {self.slots} slots empty"
        )


def schedule_of(segment: Segment, layout: Layout, rows: int) -> Schedule:
    """Of a batch of so many rows, which the layout can cut (`sharding.check_batch`)."""
    micro = layout.microbatches or rows // layout.size(*BATCH)
    return Schedule(segment.stages, segment.virtual, micro, layout.schedule == "gpipe")


def stages_of(plan: Plan, layout: Layout | None, rows: int) -> Stages | None:
    """None without stages."""
    segment = staged(plan)
    if segment is None or layout is None:
        return None
    schedule, slots = schedule_of(segment, layout, rows), [n for repeat in segment.numbers or () for n in repeat]
    return Stages(
        schedule.stages, schedule.virtual, schedule.microbatches, layout.schedule, schedule.bubble, len(slots),
        slots.count(None),
    )  # fmt: skip


def staged(plan: Plan) -> Segment | None:
    """The segment that lies on the stages of a pipeline, if there is one."""
    return next((segment for segment in plan if segment.numbers), None)
