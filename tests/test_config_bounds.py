"""Numbers in config.json that no model has: refused at once, before anything is made of that size."""

import json

import pytest

from trillion_moe.config import ConfigError, ModelConfig


@pytest.mark.parametrize(
    ("path", "value", "legal"),
    [
        ("text_config.num_hidden_layers", 10**12, "an integer from 1 to 10000"),
        ("text_config.num_experts", 10**12, "an integer from 1 to 100000"),
        ("vision_config.vt_num_hidden_layers", 10**12, "an integer from 1 to 10000"),
        ("text_config.rms_norm_eps", 10**400, "a finite number"),
    ],
)
def test_out_of_bounds(goldens, path, value, legal) -> None:
    data = json.loads((goldens / "kimi_k3" / "a" / "config.json").read_text())
    section, name = path.split(".")
    data[section][name] = value
    with pytest.raises(ConfigError, match=f"{path} = .*: legal is {legal}"):
        ModelConfig.from_json(data)


def test_nesting_is_a_finding(tmp_path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not a JSON object"):
        ModelConfig.from_file(tmp_path)
