"""Kimi K3's image preprocessing: a PIL image becomes rows of square patches, bit for bit as the release makes them.

In this order: plan the size; resize (bicubic) in the image's own mode; lay what is transparent over a chessboard and
cut to bytes; pad right and bottom with black to whole merge windows; ``(x / 255 - mean) / std`` in float32; cut into
patches, row by row. EXIF rotation is left alone, as in the release, unless `ImageSettings.apply_exif` asks for it.

Sizes are (width, height) in pixels, grids (frames, rows, columns) in patches, tokens are merge windows of patches. The
values are those of Pillow up to 11.3; later ones resize some very long and narrow images in another order of passes.
A 3600 x 3600 image took 0.5 to 1.0 s on one core of a small, busy server, 1.1 to 1.8 s in RGBA; most of it is resizing.
Source: kimi_k3_vision_processing.py, media_utils.py and preprocessor_config.json of the release.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .image_files import ImageError, open_image
from .image_settings import KIMI_K3, ImageSettings, read_settings

if TYPE_CHECKING:
    import PIL.Image

__all__ = [
    "KIMI_K3",
    "ImageError",
    "ImageSettings",
    "PatchBatch",
    "Patches",
    "SizePlan",
    "count_tokens",
    "open_image",
    "plan_size",
    "preprocess",
    "preprocess_all",
    "read_settings",
]

Size = tuple[int, int]
Grid = tuple[int, int, int]

# Modes whose result in the release is what the picture shows. The others would come out wrong there without an error.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
_DEEP = (
    "more than 8 bits per value, which the release cuts off at 255, so that most of the picture turns white (and "
    "Pillow's versions disagree how): scale the values to 0..255 and use mode 'L'"
)
REFUSED = {
    "I": _DEEP,
    "F": _DEEP,
    "La": "premultiplied colours, whose transparency the release drops: use image.convert('LA')",
    "RGBa": "premultiplied colours, whose transparency the release drops: use image.convert('RGBA')",
    "LAB": "its channel A is a colour, which the release takes for transparency: convert to 'RGB' with PIL.ImageCms",
}


# --- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizePlan:
    """What becomes of an image's size: (width, height) after resizing and after padding, its grid, its tokens."""

    resized: Size
    padded: Size
    grid_thw: Grid
    tokens: int


def plan_size(width: int, height: int, settings: ImageSettings = KIMI_K3) -> SizePlan:
    """The sizes of an image of width x height pixels. Never enlarges. ImageError for a side below 1 pixel.

    `in_patch_limit` is aimed at, not kept to the patch, as in the release.
    """
    if min(width, height) < 1:
        raise ImageError(f"the image has {width} x {height} pixels; both sides need at least 1")
    patch, side = settings.patch_size, settings.patch_limit_on_one_side * settings.patch_size
    whole = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(settings.in_patch_limit / whole), side / width, side / height)
    w, h = (min(max(1, int(n * scale)), side) for n in (width, height))
    window = settings.merge_kernel_size * patch
    columns, rows = -(-w // window), -(-h // window)
    grid = (1, rows * settings.merge_kernel_size, columns * settings.merge_kernel_size)
    return SizePlan((w, h), (columns * window, rows * window), grid, columns * rows)


def count_tokens(width: int, height: int, settings: ImageSettings = KIMI_K3) -> int:
    """Tokens that an image of width x height pixels becomes: its placeholders in the prompt. Ignores `max_tokens`."""
    return plan_size(width, height, settings).tokens


def _check_tokens(size: Size, plan: SizePlan, settings: ImageSettings) -> None:
    limit, window = settings.max_tokens, settings.merge_kernel_size * settings.patch_size
    if limit is None or plan.tokens <= limit:
        return
    raise ImageError(
        f"{size[0]} x {size[1]} pixels become {plan.padded[0] // window} x {plan.padded[1] // window} = {plan.tokens} "
        f"tokens, max_tokens is {limit}: shrink the image (padded to multiples of {window}, it may have "
        f"{limit * window**2} pixels) or raise max_tokens to {plan.tokens}"
    )


# --- pixels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Patches:
    """One image: patches float32 [N, 3, p, p] in rows of the grid, the grid, the size the prompt names (the original
    one, rotated if EXIF data was applied), tokens."""

    patches: np.ndarray
    grid_thw: Grid
    size: Size
    tokens: int


@dataclass(frozen=True, eq=False)
class PatchBatch:
    """Several images: patches float32 [N, 3, p, p] one image after the other; per image its grid, size and tokens."""

    patches: np.ndarray
    grid_thw: tuple[Grid, ...]
    sizes: tuple[Size, ...]
    tokens: tuple[int, ...]


def preprocess(image: "PIL.Image.Image", settings: ImageSettings = KIMI_K3) -> Patches:
    """The patches of one image; of an animation, the frame it stands at. The image itself is not changed.

    Modes: 1, L, LA, P, RGB, RGBA, RGBX, CMYK, YCbCr and HSV as in the release, which resizes in that mode (1 and P to
    the nearest pixel) and then calls `convert`; a palette with alpha (PA) only while its size stays. Refused, because
    the release would get them wrong without an error: `REFUSED`, the 16-bit modes I;16*, any other.

    Raises:
        TypeError: no PIL image.
        ImageError: a mode as above, a broken file, more than `max_tokens`; with the numbers and the remedy.
    """
    batch = preprocess_all([image], settings)
    return Patches(batch.patches, batch.grid_thw[0], batch.sizes[0], batch.tokens[0])


def preprocess_all(images: Sequence["PIL.Image.Image"], settings: ImageSettings = KIMI_K3) -> PatchBatch:
    """The patches of several images, as `preprocess` makes them. ImageError names the image, counted from 0."""
    if not images:
        raise ImageError("no images: without any there are no patches, so leave the step out")
    images, plans = list(images), []
    for i, image in enumerate(images):
        try:
            images[i] = prepared(image, settings)
            plans.append(checked_plan(images[i], settings))
        except ImageError as error:
            raise ImageError(f"image {i} of {len(images)}: {error}") from error.__cause__
    p, ends = settings.patch_size, np.cumsum([math.prod(plan.grid_thw) for plan in plans])
    patches, table = np.empty((ends[-1], 3, p, p), np.float32), _value_table(settings)
    for image, plan, rows in zip(images, plans, np.split(patches, ends[:-1]), strict=True):
        _write(rows, _rgb(image, plan, settings), plan, table)
    grids, sizes = tuple(plan.grid_thw for plan in plans), tuple(image.size for image in images)
    return PatchBatch(patches, grids, sizes, tuple(plan.tokens for plan in plans))


def prepared(image: "PIL.Image.Image", settings: ImageSettings) -> "PIL.Image.Image":
    """The image decoded and, if asked for, turned; ImageError if that cannot be done. A second time changes nothing."""
    import PIL.Image
    import PIL.ImageOps

    if not isinstance(image, PIL.Image.Image):
        raise TypeError(f"an image must be a PIL.Image.Image, not {type(image).__name__}; open_image reads a file")
    try:
        image.load()
        return PIL.ImageOps.exif_transpose(image) if settings.apply_exif else image
    except Exception as error:  # of a decoder or of the EXIF reader, over a broken file: see open_image
        raise ImageError(f"cannot be read: {error or type(error).__name__}") from error


def checked_plan(image: "PIL.Image.Image", settings: ImageSettings) -> SizePlan:
    """What becomes of a prepared image's size; ImageError if its mode or number of tokens is not legal."""
    plan = plan_size(*image.size, settings)
    _check_mode(image, plan)
    _check_tokens(image.size, plan, settings)
    return plan


def _check_mode(image: "PIL.Image.Image", plan: SizePlan) -> None:
    mode = image.mode
    if mode == "PA" and image.size != plan.resized:
        raise ImageError(
            f"mode 'PA' of {image.size} pixels must shrink to {plan.resized}, and Pillow would blend "
            "numbers of colours instead of colours: use image.convert('RGBA')"
        )
    if mode not in MODES:
        why = REFUSED.get(mode.partition(";")[0], "not one whose colours the release is known to get right")
        raise ImageError(f"mode {mode!r}: {why}; legal modes: {MODES}")


def _rgb(image: "PIL.Image.Image", plan: SizePlan, settings: ImageSettings) -> np.ndarray:
    """uint8 [h, w, 3] at the resized size, over the chessboard where transparent."""
    from PIL.Image import Resampling

    image = image.resize(plan.resized, Resampling.BICUBIC)
    # A transparent colour of an RGB image (PNG's tRNS) is ignored in the release; that of L and P is not.
    transparent = "A" in image.getbands() or "transparency" in image.info
    if image.mode == "RGB" or not transparent:
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    rgba = np.asarray(image.convert("RGBA"))
    alpha = rgba[..., 3].astype(np.float32) / np.float32(255)
    ground = (1 - alpha) * _chessboard(plan.resized, settings)
    # Cut to bytes, not rounded, as in the release. One channel at a time is faster than all three.
    channels = [(alpha * rgba[..., channel] + ground).astype(np.uint8) for channel in range(3)]
    return np.stack(channels, axis=-1)


def _chessboard(size: Size, settings: ImageSettings) -> np.ndarray:
    """uint8 [h, w]."""
    x, y = (np.arange(n) // settings.chessboard_square_size % 2 for n in size)
    gray = (y[:, None] != x) == settings.chessboard_square_on_top_left
    board = np.where(gray, settings.chessboard_gray_value, settings.chessboard_white_value)
    return board.astype(np.uint8)


def _value_table(settings: ImageSettings) -> np.ndarray:
    """float32 [3, 256]: what a byte becomes in each channel, rounded after every step.

    One fused multiplication and addition would differ in the last bit of 111 of K3's 256 values.
    """
    mean, std = (np.array(x, np.float64)[:, None] for x in (settings.image_mean, settings.image_std))
    unit = (np.arange(256) / 255).astype(np.float32)
    centred = (unit - mean).astype(np.float32)
    return (centred * (1 / std)).astype(np.float32)


def _write(out: np.ndarray, rgb: np.ndarray, plan: SizePlan, table: np.ndarray) -> None:
    """Pads `rgb` with black, cuts it into patches and writes their values to `out`, float32 [N, 3, p, p]."""
    (_, rows, columns), p, (w, h) = plan.grid_thw, out.shape[-1], plan.resized
    padded = np.zeros((rows * p, columns * p, 3), np.uint8)
    padded[:h, :w] = rgb
    patches = padded.reshape(rows, p, columns, p, 3).transpose(0, 2, 4, 1, 3)
    for channel in range(3):
        out[:, channel] = table[channel][patches[:, :, channel]].reshape(-1, p, p)
