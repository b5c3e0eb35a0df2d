"""Images from files, bytes and data URIs, decoded whole or refused with the name of the source."""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import PIL.Image

# Formats that Pillow decodes by itself. It knows more, but some of them run other programs (EPS starts Ghostscript).
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")


class ImageError(ValueError):
    """An image that cannot be read, or that this preprocessing would get wrong; says which and what is legal."""


def open_image(source: str | Path | bytes) -> "PIL.Image.Image":
    """The image in a file, in bytes or in a ``data:...;base64,...`` URI, decoded whole, in the mode it is stored in.

    Of an animation (GIF, WebP, PNG, AVIF) and of a camera's multi-picture JPEG the first picture is taken, as in the
    release, which reads images only. A TIFF of several pages is refused: those are several images.

    Raises:
        ImageError: an address to fetch, a file that is absent, empty, broken or cut short, a format not in `FORMATS`,
            more pixels than `PIL.Image.MAX_IMAGE_PIXELS` (where Pillow only warns); with the name of the source.
    """
    import PIL.Image

    data, name = _read(source)
    if not data:
        raise ImageError(f"{name} is empty: 0 bytes")
    PIL.Image.init()
    formats = [known for known in FORMATS if known in PIL.Image.OPEN]
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=formats)
        _check_pixels(image, name)
        pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
        if pages > 1:
            raise ImageError(f"{name} holds {pages} pages; legal is 1: save each as an image of its own")
        image.load()
    except ImageError:
        raise
    except PIL.UnidentifiedImageError:
        raise ImageError(f"{name} is no image that can be read: {_start(data)}; legal formats: {formats}") from None
    except Exception as error:  # decoders raise what they like over a broken file: OSError, SyntaxError, struct.error
        raise ImageError(f"{name} cannot be read as an image: {error or type(error).__name__}") from error
    return image


def _check_pixels(image: "PIL.Image.Image", name: str) -> None:
    import PIL.Image

    (width, height), limit = image.size, PIL.Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise ImageError(
            f"{name} claims {width} x {height} = {width * height} pixels, legal are {limit} "
            "(PIL.Image.MAX_IMAGE_PIXELS): shrink it, or raise that if you trust the source"
        )


def _start(data: bytes) -> str:
    return f"{len(data)} bytes that start with {data[:12]!r}"


def _read(source: str | Path | bytes) -> tuple[bytes, str]:
    """The bytes and a name for errors."""
    if isinstance(source, bytes):
        return source, f"the image in {len(source)} bytes"
    text = str(source)
    name = text if len(text) <= 200 else f"{text[:60]}... ({len(text)} characters)"
    if text[:5].lower() == "data:":
        return _decode_uri(text), name
    if "://" in text[:20]:
        raise ImageError(f"{name}: nothing is fetched; legal are a path, bytes, or data:image/...;base64,...")
    try:
        return Path(source).read_bytes(), name
    except (OSError, ValueError) as error:
        raise ImageError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _decode_uri(uri: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError(f"data URI starts with {uri[:60]!r}; legal is data:image/...;base64,...")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except ValueError as error:
        raise ImageError(f"data URI {head},...: {len(body)} characters that are not base64: {error}") from None
