"""Images from files, bytes and data URIs, and every way in which they can be no image."""

import base64
import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from trillion_moe.data.images import ImageError, open_image, preprocess

FOLDER = Path(__file__).parent.parent / "goldens" / "front" / "images"
PNG = (FOLDER / "rgb_28x28.png").read_bytes()
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "source",
    [
        FOLDER / "rgb_28x28.png",
        str(FOLDER / "rgb_28x28.png"),
        PNG,
        URI,
        re.sub("(.{60})", r"\1\n", URI),
        URI.replace("data:image/png;base64", "DATA:application/octet-stream;charset=x;Base64"),
    ],
    ids=["Path", "str", "bytes", "URI", "URI in lines", "odd URI"],
)
def test_sources(source: Path | str | bytes) -> None:
    np.testing.assert_array_equal(np.asarray(open_image(source)), np.asarray(Image.open(io.BytesIO(PNG))))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/a.png", r"https://example\.org/a\.png: nothing is fetched; legal are a path"),
        ("file:///tmp/a.png", "nothing is fetched"),
        ("s3://bucket/" + "a" * 500, r"^s3://bucket/a+\.\.\. \(512 characters\): nothing"),
        (b"", "in 0 bytes is empty"),
        (b"not an image at all", r"19 bytes that start with b'not an image'; legal formats: \['PNG', 'JPEG'"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image that can be read"),
        (PNG[:1000], "the image in 1000 bytes cannot be read as an image: .*truncated"),
        (PNG[:20], "20 bytes"),
        ((FOLDER / "rgb_437x300.jpg").read_bytes()[:9000], "cannot be read as an image: .*truncated"),
        ((FOLDER / "rgba_57x33.webp").read_bytes()[:3000], "3000 bytes"),
        ("data:image/png,abc", "legal is data:image/...;base64"),
        ("data:image/png;base64", "legal is data:image/...;base64"),
        ("data:image/png;base64,", "is empty: 0 bytes"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png;base64,abc", "data:image/png;base64,...: 3 characters that are not base64"),
        ("data:image/png;base64,ä", "not base64"),
        (URI[:1998], r"^data:image/png;base64,.{38}\.\.\. \(1998 characters\) cannot be read"),
        ("a\0b.png", "cannot be read"),
    ],
)
def test_bad_sources(source: str | bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        open_image(source)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_bad_files(tmp_path: Path) -> None:
    files = {"empty.png": b"", "text.png": b"hello", "cut.png": PNG[:1500]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for name in [*files, "absent.png", ""]:
        with pytest.raises(ImageError, match=re.escape(str(tmp_path / name))):
            open_image(tmp_path / name)


def test_a_broken_file_that_was_opened_elsewhere() -> None:
    with pytest.raises(ImageError, match=r"image 0 of 1: cannot be read: .*truncated"):
        preprocess(Image.open(io.BytesIO(PNG[:1000])))


def test_too_many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Pillow warns (up to twice its limit) and where it raises (above)."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 783)
    with (
        pytest.warns(Image.DecompressionBombWarning),
        pytest.raises(ImageError, match=r"28 x 28 = 784 pixels, legal are 783 \(PIL\.Image\.MAX_IMAGE_PIXELS\)"),
    ):
        open_image(PNG)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert open_image(PNG).size == (28, 28)


def test_a_decompression_bomb() -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)
    data = PNG[:8] + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    data += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(ImageError, match=r"3600000000 pixels.* exceeds limit of \d+"):
        open_image(data)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO"])
def test_the_first_picture_of_several(kind: str) -> None:
    red, blue = (Image.new("RGB", (28, 28), colour) for colour in ("red", "blue"))
    options = {"lossless": True} if kind == "WEBP" else {}
    image = open_image(encoded(red, kind, save_all=True, append_images=[blue], **options))
    assert getattr(image, "n_frames", 1) == 2
    red_green_blue = preprocess(image).patches.mean((0, 2, 3))
    np.testing.assert_allclose(red_green_blue, [1, -1, -1], atol=0.02)


def test_pages_are_several_images() -> None:
    page = Image.effect_noise((45, 33), 50)
    assert open_image(encoded(page, "TIFF")).size == (45, 33)
    with pytest.raises(ImageError, match="holds 2 pages; legal is 1"):
        open_image(encoded(page, "TIFF", save_all=True, append_images=[page]))
