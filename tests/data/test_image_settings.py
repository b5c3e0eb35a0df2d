"""The settings of image preprocessing: a checkpoint's file, key by key."""

import dataclasses
import json
from pathlib import Path

import pytest

from trillion_moe.config import ConfigError, VisionConfig
from trillion_moe.data import image_settings
from trillion_moe.data.images import KIMI_K3, ImageSettings, read_settings

GOLDEN = json.loads((Path(__file__).parent.parent / "goldens" / "front" / "images" / "images.json").read_text())
VISION = VisionConfig(
    hidden_size=1024,
    num_layers=27,
    num_heads=12,
    qkv_size=1536,
    mlp_size=4096,
    patch_size=14,
    pos_emb_height=64,
    pos_emb_width=64,
    pos_emb_time=4,
    text_hidden_size=7168,
)


def write(folder: Path, top: dict | None = None, **media: object) -> Path:
    """A settings file of the release with these keys changed; `...` leaves one out."""
    media = {k: v for k, v in (GOLDEN["media_proc_cfg"] | media).items() if v is not ...}
    data = {"auto_map": {"AutoProcessor": "a.B"}, "media_proc_cfg": media} | (top or {})
    (folder / image_settings.SETTINGS_FILE).write_text(json.dumps(data))
    return folder


def test_settings_of_a_checkpoint(tmp_path: Path) -> None:
    assert read_settings(tmp_path, VISION) == KIMI_K3
    assert read_settings(str(write(tmp_path)), VISION) == KIMI_K3
    board = GOLDEN["media_proc_cfg"]["transparent_bg_config"] | {"chessboard_gray_value": 7}
    got = read_settings(write(tmp_path, in_patch_limit=16384, image_std=[0.5, 1, 2], transparent_bg_config=board))
    assert got == ImageSettings(in_patch_limit=16384, image_std=(0.5, 1.0, 2.0), chessboard_gray_value=7)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({"in_patch_limit_video": 200}, "unknown key 'in_patch_limit_video'; legal in media_proc_cfg: .*'patch_size'"),
        ({"apply_exif": True}, "unknown key 'apply_exif'"),
        ({"patch_size": ...}, "'patch_size' is missing"),
        ({"transparent_bg_fill_stage": ...}, "'transparent_bg_fill_stage' is missing"),
        ({"transparent_bg_fill_stage": "before_resize"}, "= 'before_resize': legal is 'after_resize'"),
        ({"transparent_bg_config": None}, "media_proc_cfg.transparent_bg_config is missing or no object"),
        ({"transparent_bg_config": {"pattern": "white"}}, "pattern = 'white': legal is 'chessboard'"),
        ({"fixed_output_tokens": 256}, "fixed_output_tokens = 256: legal is None"),
        ({"patch_size": "14"}, "patch_size = '14': legal is an integer of at least 1"),
        ({"patch_size": True}, "patch_size = True"),
        ({"merge_kernel_size": [2, 2]}, r"merge_kernel_size = \[2, 2\]: legal is an integer"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean = \(0.5, 0.5\): legal is three finite numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "legal is three finite numbers above 0"),
        ({"image_std": 0.5}, "legal is three finite numbers above 0"),
        ({"patch_limit_on_one_side": 511}, "511: legal is a multiple of merge_kernel_size = 2"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, media: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_settings(write(tmp_path, **media))
    assert str(tmp_path / image_settings.SETTINGS_FILE) in str(error.value)


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="absent is not a folder"):
        read_settings(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"unknown key 'size'; legal at the top: \['media_proc_cfg'"):
        read_settings(write(tmp_path, {"size": 4}))
    for text in ("{", "[]", "{}", '{"media_proc_cfg": {}, "media_proc_cfg": {}}'):
        (tmp_path / image_settings.SETTINGS_FILE).write_text(text)
        with pytest.raises(ConfigError, match=r"missing or no object|not a JSON object"):
            read_settings(tmp_path)


def test_all_findings_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings(write(tmp_path, {"size": 4}, extra=1, patch_size=0, fixed_output_tokens=3))
    assert len(error.value.findings) == 4


def test_settings_and_the_model_must_agree(tmp_path: Path) -> None:
    other = dataclasses.replace(VISION, patch_size=16, merge=(2, 1))
    message = "patch_size = 14: legal is 16, .*\n.*merge_kernel_size = 2: legal is .2, 1. .height, width."
    with pytest.raises(
        ConfigError, match=f"^no .*{image_settings.SETTINGS_FILE}, so Kimi K3's settings: 2 .*\n.*{message}"
    ):
        read_settings(tmp_path, other)
    with pytest.raises(ConfigError, match=f"{image_settings.SETTINGS_FILE}: 2 .*\n.*{message}"):
        read_settings(write(tmp_path), other)


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 0), ("chessboard_white_value", 256), ("patch_size", -1), ("in_patch_limit", 0)]
)
def test_illegal_settings(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} = {value}: legal is"):
        dataclasses.replace(KIMI_K3, **{field: value})
