"""`config.json` <-> fields: an engine that reads and writes through one table.

A `Key` row names one field and every JSON spelling of it. The same row reads the field, compares spellings, checks a
value built in a program, and writes the field back. A `Check` row is a JSON key that carries no field: a constant (the
only value we implement) or a number that follows from fields. `Schema.inert`: keys that nobody reads, with the reason.
JSON paths are `"scope:name.name"`; `Schema.scopes` says where a scope lies for each `model_type`.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from .config_codecs import ABSENT, MOST_LAYERS, Absent, Codec, CodecError, is_int

Path = tuple[str, ...]


class ConfigError(ValueError):
    """Everything found wrong with one configuration: `findings` name the key, its value and the legal ones."""

    def __init__(self, where: str, findings: list[str] | tuple[str, ...]):
        self.where, self.findings = where, tuple(findings)
        super().__init__(f"{where}: {len(self.findings)} problem(s)\n" + "\n".join(f"  - {f}" for f in self.findings))

    def __reduce__(self):
        return type(self), (self.where, self.findings)


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: a JSON object. ValueError for a name that comes twice (a dict would keep the last)."""
    names = [name for name, _ in pairs]
    if len(table := dict(pairs)) != len(names):
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return table


# --- the table's row types -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    """JSON paths that together say one field; `primary` ones are written where no spelling is present."""

    paths: tuple[str, ...]
    codec: Codec
    primary: bool = True


@dataclass(frozen=True)
class Key:
    """A field (`"section.name"` or `"name"`) and its spellings.

    `default` (a value, or a function of model_type) stands for absence, ABSENT = required. `disputed`: the libraries
    that read these files differ; ours is transformers' and holds for its spelling only, elsewhere the key is required.
    """

    field: str
    spellings: tuple[Spelling, ...]
    default: Any = ABSENT
    disputed: bool = False

    @property
    def section(self) -> str:
        return self.field.rpartition(".")[0]

    def default_for(self, model_type: str) -> Any:
        return self.default(model_type) if callable(self.default) else self.default


def key(
    field: str, codec: Codec, *paths: str, alt: tuple[str, ...] = (), default: Any = ABSENT, disputed: bool = False
) -> Key:
    """A row whose spellings are single paths sharing one codec: `paths` are written, `alt` are only read and kept."""
    spellings = [Spelling((p,), codec) for p in paths] + [Spelling((p,), codec, False) for p in alt]
    return Key(field, tuple(spellings), default, disputed)


@dataclass(frozen=True)
class Check:
    """A JSON key without a field: `legal` values, constant or a function of the built config; the first is written."""

    path: str
    legal: tuple[Any, ...] | Callable[[Any], tuple[Any, ...]]
    section: str = ""
    fresh: bool = True  # write it into a new file


@dataclass(frozen=True)
class Schema:
    """The table: where scopes lie and what new files begin with per model_type, rows, inert keys (path -> reason),
    and the sections that may be absent."""

    scopes: Mapping[str, Mapping[str, str]]
    keys: tuple[Key, ...]
    checks: tuple[Check, ...]
    inert: Mapping[str, str]
    optional: tuple[str, ...]
    begin: Mapping[str, dict[str, Any]]

    def resolve(self, path: str, model_type: str) -> Path | None:
        """JSON path of `"scope:a.b"`, None where this model_type has no such scope."""
        scope, _, name = path.partition(":")
        prefix = self.scopes[model_type].get(scope)
        return None if prefix is None else tuple((prefix + name).split("."))

    def spellings(self, row: Key, model_type: str) -> Iterator[tuple[tuple[Path, ...], Spelling]]:
        for spelling in row.spellings:
            paths = [self.resolve(p, model_type) for p in spelling.paths]
            if None not in paths:
                yield tuple(p for p in paths if p is not None), spelling

    def leaves(self, model_type: str) -> set[Path]:
        named = (
            [p for row in self.keys for s in row.spellings for p in s.paths]
            + [c.path for c in self.checks]
            + list(self.inert)
        )
        return {p for name in named if (p := self.resolve(name, model_type)) is not None}

    def section_paths(self, section: str, model_type: str) -> list[Path]:
        named = [p for row in self.keys if row.section == section for s in row.spellings for p in s.paths]
        named += [c.path for c in self.checks if c.section == section]
        return [p for name in named if (p := self.resolve(name, model_type)) is not None]


def get(data: Any, path: Path) -> Any:
    """The value at `path`, ABSENT if it or one of its parents is missing."""
    for name in path:
        if not isinstance(data, dict) or name not in data:
            return ABSENT
        data = data[name]
    return data


def put(data: dict, path: Path, value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(data.get(name), dict):
            data[name] = {}
        data = data[name]
    data[path[-1]] = value


def _drop(data: dict, path: Path) -> None:
    if get(data, path) is not ABSENT:
        del get(data, path[:-1])[path[-1]]
        if len(path) > 1 and not get(data, path[:-1]):
            _drop(data, path[:-1])


def same(a: Any, b: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def allowed(value: Any, legal: tuple[Any, ...]) -> bool:
    return any(same(value, x) for x in legal)


# --- reading ---------------------------------------------------------------------------------------------------------


def read(schema: Schema, data: Any) -> tuple[dict[str, Any], list[str]]:
    """Field values (of present sections, defaults filled in; refused rows are left out) and findings."""
    model_type = data.get("model_type", ABSENT) if isinstance(data, dict) else ABSENT
    if type(model_type) is not str or model_type not in schema.scopes:
        legal = " or ".join(map(repr, schema.scopes))
        return {}, [f"model_type {'is missing' if model_type is ABSENT else f'= {model_type!r}'}: legal is {legal}"]
    found = list(unknown(data, schema.leaves(model_type))) + list(refused_checks(schema, data, model_type))
    sections = _sections(schema, data, model_type)
    count = get(data, schema.resolve("text:num_hidden_layers", model_type) or ())
    lists = get(data, ("linear_attn_config", "kda_layers")), get(data, ("linear_attn_config", "full_attn_layers"))
    runtime = model_type == "kimi_linear" and "layer_types" in data and lists == (ABSENT, ABSENT)
    values, missing = {}, []
    for row in schema.keys:
        if row.section in schema.optional and row.section not in sections:
            continue
        default = row.default_for(model_type) if runtime or not row.disputed else ABSENT
        try:
            values[row.field] = _field(
                schema, row, data, model_type, count if is_int(count, 1) and count <= MOST_LAYERS else None, default
            )
        except CodecError as refused:
            found += refused.findings
        except KeyError:
            missing.append(
                " or ".join(" + ".join(map(".".join, paths)) for paths, _ in schema.spellings(row, model_type))
            )
    if missing:
        found.append("missing: " + "; ".join(missing) + " (no default is assumed for them)")
    return values, found


def _sections(schema: Schema, data: Any, model_type: str) -> set[str]:
    """The optional sections of which any key is present."""
    return {s for s in schema.optional if any(get(data, p) is not ABSENT for p in schema.section_paths(s, model_type))}


def _field(schema: Schema, row: Key, data: dict, model_type: str, count: int | None, default: Any) -> Any:
    """One field from every spelling present; KeyError if none is and there is no default."""
    found, seen = [], []
    for paths, spelling in schema.spellings(row, model_type):
        raws, names = tuple(get(data, p) for p in paths), tuple(map(".".join, paths))
        if all(raw is ABSENT for raw in raws):
            continue
        if count is None and row.field in ("attention", "mlp"):
            raise CodecError()  # num_hidden_layers itself is reported
        try:
            seen.append((names, raws, spelling.codec.decode(raws, names, count or 0)))
        except CodecError as refused:
            found += refused.findings
    found += [_differ(row.field, seen[0], other) for other in seen[1:] if not same(seen[0][2], other[2])]
    if found:
        raise CodecError(*found)
    if not seen and default is ABSENT:
        raise KeyError(row.field)
    return seen[0][2] if seen else default


def _differ(field: str, a: tuple, b: tuple) -> str:
    (names_a, raws_a, value_a), (names_b, raws_b, value_b) = a, b
    if field in ("attention", "mlp"):
        at = [i for i, (x, y) in enumerate(zip(value_a, value_b, strict=True)) if x != y]
        says_a, says_b = (", ".join(f"layer {i + 1} {v[i]}" for i in at) for v in (value_a, value_b))
        return f"{' + '.join(names_a)}: {says_a}, but {' + '.join(names_b)}: {says_b} (counted from 1) must agree"
    return f"{names_a[0]} = {raws_a[0]!r} but {names_b[0]} = {raws_b[0]!r}: both say {field} and must agree"


def unknown(data: dict, leaves: Set[Path], at: Path = ()) -> Iterator[str]:
    """Keys of `data` neither at a path in `leaves` nor above one; `at` is where `data` lies, for the message."""
    inner = {path[:i] for path in leaves for i in range(1, len(path))}

    def walk(node: dict, here: Path) -> Iterator[str]:
        for name, value in node.items():
            path = (*here, name)
            if path in inner and isinstance(value, dict):
                yield from walk(value, path)
            elif path in inner and value is not None:
                yield f"{'.'.join(at + path)} = {value!r}: legal is an object"
            elif path not in inner and path not in leaves:
                near = difflib.get_close_matches(name, [p[-1] for p in leaves if p[:-1] == here], 1)
                yield f"unknown key {'.'.join(at + path)}" + (f" (is {near[0]} meant?)" if near else "")

    return walk(data, ())


def refused_checks(schema: Schema, data: dict, model_type: str, cfg: Any = None) -> Iterator[str]:
    """Findings about keys without a field: constants, or with the built `cfg` those that follow from it."""
    for check in schema.checks:
        path = schema.resolve(check.path, model_type)
        if path is None or callable(check.legal) == (cfg is None) or (value := get(data, path)) is ABSENT:
            continue
        legal = check.legal(cfg) if callable(check.legal) else check.legal
        if not allowed(value, legal):
            why = "all that is implemented is" if cfg is None else "the other keys need"
            yield f"{'.'.join(path)} = {value!r}: {why} {' or '.join(map(repr, legal))}"


def field_problems(schema: Schema, section: str, part: Any) -> Iterator[str]:
    """What the codecs refuse in a dataclass built by a program: every field must survive encode and decode."""
    for row in schema.keys:
        name = row.field.rpartition(".")[2]
        if row.section != section or row.field in ("attention", "mlp"):
            continue
        value, codec = getattr(part, name), row.spellings[0].codec
        try:
            raws = codec.encode(value)
            if raws is not ABSENT and not same(codec.decode(raws, (row.field,), 0), value):
                yield f"{row.field} = {value!r} cannot be written to config.json and read back"
        except CodecError as refused:
            yield from refused.findings


def placeless(schema: Schema, values: Mapping[str, Any]) -> Iterator[str]:
    """Fields that this model_type's config.json has no place for, and that are not at their default."""
    model_type = values["model_type"]
    for row in schema.keys:
        homeless = row.field in values and not any(True for _ in schema.spellings(row, model_type))
        if homeless and not same(values[row.field], row.default_for(model_type)):
            yield f"{row.field} = {values[row.field]!r}: a {model_type} config.json has no place for it"


# --- writing ---------------------------------------------------------------------------------------------------------


def write(schema: Schema, cfg: Any, values: Mapping[str, Any], source: dict | None) -> dict[str, Any]:
    """`source` with changed fields written under every spelling present; without a source (or with one of another
    model_type) a new file spelled as releases are. `values` holds the fields of `cfg`'s present sections."""
    model_type = values["model_type"]
    fresh = source is None or source.get("model_type") != model_type
    data: dict[str, Any] = copy.deepcopy(schema.begin[model_type] if fresh or source is None else source)
    old_count = 0 if fresh else get(data, schema.resolve("text:num_hidden_layers", model_type) or ())
    had = _sections(schema, data, model_type)
    gone = {s for s in schema.optional if not any(f.startswith(f"{s}.") for f in values)}
    for section in gone:
        if section == "vision" and section in had:
            data.pop("vision_config", None)  # its inert keys go too
        for path in schema.section_paths(section, model_type):
            _drop(data, path)
    for row in schema.keys:
        if row.field in values:
            new = fresh or (row.section in schema.optional and row.section not in had)
            _write_field(schema, row, data, values[row.field], model_type, old_count, new)
    for check in schema.checks:
        path = schema.resolve(check.path, model_type)
        if path is not None and check.section not in gone:
            _write_check(check, path, data, cfg, fresh or (check.section != "" and check.section not in had))
    return data


def _write_check(check: Check, path: Path, data: dict, cfg: Any, fresh: bool) -> None:
    legal = check.legal(cfg) if callable(check.legal) else check.legal
    value = get(data, path)
    if (value is ABSENT and fresh and check.fresh) or (value is not ABSENT and not allowed(value, legal)):
        put(data, path, copy.deepcopy(legal[0]))


def _write_field(
    schema: Schema, row: Key, data: dict, value: Any, model_type: str, old_count: int, fresh: bool
) -> None:
    spellings = list(schema.spellings(row, model_type))
    said = False
    for paths, spelling in spellings:
        raws = tuple(get(data, p) for p in paths)
        if all(raw is ABSENT for raw in raws):
            continue
        if same(spelling.codec.decode(raws, tuple(map(".".join, paths)), old_count), value):
            said = True
        else:
            said |= _say(data, paths, spelling.codec.encode(value))
    ours = row.spellings[0].paths[0].startswith("ours:")
    if said or (same(value, row.default_for(model_type)) and (ours or value is None or not fresh)):
        return
    wrote = [_say(data, paths, s.codec.encode(value)) for paths, s in spellings if s.primary]
    if not any(wrote):
        any(_say(data, paths, s.codec.encode(value)) for paths, s in spellings if not s.primary)


def _say(data: dict, paths: tuple[Path, ...], raws: tuple[Any, ...] | Absent) -> bool:
    """Write one spelling, or take it away where it cannot say the value."""
    for i, path in enumerate(paths):
        if isinstance(raws, tuple):
            put(data, path, copy.deepcopy(raws[i]))
        else:
            _drop(data, path)
    return isinstance(raws, tuple)
