"""How Kimi K3 turns images into patches: the settings of its `preprocessor_config.json`, checked key by key.

Source: preprocessor_config.json and media_utils.py of the release.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trillion_moe.config import ConfigError, VisionConfig
from trillion_moe.config_json import distinct

SETTINGS_FILE = "preprocessor_config.json"


def _whole(value: Any, low: int = 1) -> bool:
    return type(value) is int and value >= low


def _triple(value: Any, legal: Callable[[float], bool]) -> bool:
    numbers = [x for x in value if type(x) in (int, float)] if isinstance(value, tuple) else []
    return len(numbers) == 3 == len(value) and all(math.isfinite(x) and legal(x) for x in numbers)


_POSITIVE = (_whole, "an integer of at least 1")
_BYTE = (lambda x: _whole(x, 0) and x <= 255, "an integer in 0..255")
_BOOL = (lambda x: isinstance(x, bool), "true or false")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "in_patch_limit": _POSITIVE,
    "patch_limit_on_one_side": _POSITIVE,
    "patch_size": _POSITIVE,
    "merge_kernel_size": _POSITIVE,
    "image_mean": (lambda x: _triple(x, lambda _: True), "three finite numbers"),
    "image_std": (lambda x: _triple(x, lambda v: v > 0), "three finite numbers above 0"),
    "chessboard_square_size": _POSITIVE,
    "chessboard_square_on_top_left": _BOOL,
    "chessboard_white_value": _BYTE,
    "chessboard_gray_value": _BYTE,
    "apply_exif": _BOOL,
    "max_tokens": (lambda x: x is None or _whole(x), "None or an integer of at least 1"),
}


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How images become patches; the defaults are Kimi K3's, the names those of its `preprocessor_config.json`.

    in_patch_limit: whole patches of an image. The scale follows from the size before shrinking, and padding comes after
        it, so a few more come out: with K3's limit up to 67,320 patches or 16,830 tokens (1889 x 7377 pixels), the most
        of all sizes up to 9000 x 9000.
    patch_limit_on_one_side: patches; a side is shrunk to this many times `patch_size` pixels (K3: 7168).
    merge_kernel_size: side of the square of patches that one token stands for.
    chessboard_*: the ground under transparent pixels: side of a square in pixels of the resized image, whether the
        square at the top left is a white one, the two values.
    apply_exif: rotate and mirror as the EXIF data says, before anything else. Not in the release.
    max_tokens: an image of more tokens is refused; None = no limit of its own. Not in the release.

    Raises `ConfigError` with all findings.
    """

    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    patch_size: int = 14
    merge_kernel_size: int = 2
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    chessboard_square_size: int = 8
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 180
    apply_exif: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if found := list(_problems({f.name: getattr(self, f.name) for f in fields(self)})):
            raise ConfigError("ImageSettings", found)


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    bad = {name for name, value in values.items() if not _RULES[name][0](value)}
    yield from (f"{name} = {values[name]!r}: legal is {_RULES[name][1]}" for name in values if name in bad)
    side, merge = (values.get(name, 1) for name in ("patch_limit_on_one_side", "merge_kernel_size"))
    if not bad & {"patch_limit_on_one_side", "merge_kernel_size"} and side % merge:
        yield f"patch_limit_on_one_side = {side}: legal is a multiple of merge_kernel_size = {merge}"


KIMI_K3 = ImageSettings()

_BOARD = [f.name for f in fields(ImageSettings) if f.name.startswith("chessboard_")]
_OURS = ["apply_exif", "max_tokens"]
_PLAIN = [f.name for f in fields(ImageSettings) if f.name not in (*_BOARD, *_OURS)]
# Keys of the file that have one legal value here.
_FIXED = {
    "fixed_output_tokens": None,
    "transparent_bg_fill_stage": "after_resize",
    "transparent_bg_config.pattern": "chessboard",
}
_FILE_KEYS = [*_PLAIN, *_FIXED, *(f"transparent_bg_config.{name}" for name in _BOARD)]
_TOP_KEYS = ["media_proc_cfg", "auto_map", "image_processor_type", "processor_class"]


def read_settings(folder: str | Path, vision: VisionConfig | None = None) -> ImageSettings:
    """The settings in `preprocessor_config.json` of a checkpoint's folder; K3's if it has no such file.

    vision: of the same checkpoint; sizes of patch and merge window must agree with it.

    Raises:
        NotADirectoryError: no such folder.
        ConfigError: an unknown, missing or illegal key, a contradiction with `vision`; all of them, with legal values.
    """
    path = Path(folder) / SETTINGS_FILE
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder; legal is one of a checkpoint")
    values, found = _read_file(path) if path.exists() else ({}, [])
    found += _problems(values)
    if found:
        raise ConfigError(str(path), found)
    settings = ImageSettings(**values)
    if found := list(_against(settings, vision)):
        raise ConfigError(str(path) if path.exists() else f"no {path}, so Kimi K3's settings", found)
    return settings


def _against(settings: ImageSettings, vision: VisionConfig | None) -> Iterator[str]:
    if vision is None:
        return
    merge = settings.merge_kernel_size
    if settings.patch_size != vision.patch_size:
        yield f"patch_size = {settings.patch_size}: legal is {vision.patch_size}, that of the model's config"
    if (merge, merge) != vision.merge:
        yield f"merge_kernel_size = {merge}: legal is {vision.merge} (height, width), that of the model's config"


def _read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The values of known keys as `ImageSettings` takes them, and what is wrong with the keys."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        return {}, [f"not a JSON object with distinct keys: {error}"]
    media = data.get("media_proc_cfg") if isinstance(data, dict) else None
    board = media.get("transparent_bg_config") if isinstance(media, dict) else None
    if not isinstance(media, dict) or not isinstance(board, dict):
        key = "media_proc_cfg.transparent_bg_config" if isinstance(media, dict) else "media_proc_cfg"
        return {}, [f"{key} is missing or no object; legal keys: {_FILE_KEYS}"]
    flat = {name: value for name, value in media.items() if name != "transparent_bg_config"}
    flat |= {f"transparent_bg_config.{name}": value for name, value in board.items()}
    found = [f"unknown key {name!r}; legal at the top: {_TOP_KEYS}" for name in data if name not in _TOP_KEYS]
    found += [f"unknown key {name!r}; legal in media_proc_cfg: {_FILE_KEYS}" for name in flat if name not in _FILE_KEYS]
    found += [f"key {name!r} is missing in media_proc_cfg" for name in _FILE_KEYS if name not in flat]
    for name, legal in _FIXED.items():
        if flat.get(name, legal) != legal:
            found.append(f"{name} = {flat[name]!r}: legal is {legal!r}, the only one implemented")
    known = {
        name.rpartition(".")[2]: value for name, value in flat.items() if name in _FILE_KEYS and name not in _FIXED
    }
    for name in ("image_mean", "image_std"):
        if isinstance(value := known.get(name), list):
            known[name] = tuple(float(x) if type(x) is int else x for x in value)
    return known, found
