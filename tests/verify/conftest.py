"""A tiny model that has every operator, and files that say of all of them that they passed."""

import dataclasses

import pytest
from tests.tiny import SHORT, tiny_k3

from trillion_moe.config import ModelConfig, VisionConfig
from trillion_moe.verify import Report, Row, operators_of

VISION = VisionConfig(
    hidden_size=32, num_layers=1, num_heads=2, qkv_size=32, mlp_size=64, patch_size=14, text_hidden_size=64,
    pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def cfg() -> ModelConfig:
    return tiny_k3(**SHORT, vision=VISION, quantization="mxfp4")


@pytest.fixture(scope="session")
def plain(cfg) -> ModelConfig:
    """The same without packed experts."""
    return dataclasses.replace(cfg, quantization=None)


@pytest.fixture(scope="session")
def passed():
    """A report in which implementations passed, the first of them fastest; others are unavailable."""

    def passed(cfg: ModelConfig, *names: str, dtype: str = "float32", leave_out: tuple[str, ...] = ()) -> Report:
        rows = []
        for operator in operators_of(cfg):
            for name in () if operator.name in leave_out else operator.implementations:
                place = names.index(name) if name in names else None if len(operator.implementations) > 1 else 0
                fine = place is not None
                rows.append(
                    Row(
                        operator=operator.name, implementation=name, dtype=dtype, error=1e-7 if fine else None,
                        tolerance=1e-5, verdict="pass" if fine else "unavailable", time=1e-3 + place if fine else None,
                        shape="x 4x4", reason=None if fine else "no such chip",
                    )
                )  # fmt: skip
        return Report.of(cfg, rows)

    return passed
