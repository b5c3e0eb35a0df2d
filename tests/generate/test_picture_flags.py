"""`trillion-moe generate`: the settings of pictures."""

import PIL.Image

from trillion_moe.cli import main


def test_limit_and_rotation(text_folder, tmp_path, capsys) -> None:
    """A limit is kept before anything is generated, and a flag without pictures is refused."""
    PIL.Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    prompt = ["generate", str(text_folder), "--prompt", "What?"]
    for flags, says in (
        (["--image", str(tmp_path / "a.png"), "--max-image-tokens", "1"], "2 x 1 = 2 tokens, max_tokens is 1"),
        (["--exif"], "--exif is legal with pictures"),
        (["--max-image-tokens", "5"], "--max-image-tokens is legal with pictures"),
    ):
        assert main([*prompt, *flags]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert says in printed.err
