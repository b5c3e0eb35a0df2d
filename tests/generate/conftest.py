"""A tiny Kimi K3 that reads text and pictures."""

import pytest
from tests.tiny import text_checkpoint

import trillion_moe as tm


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    return text_checkpoint(tmp_path_factory.mktemp("text") / "tiny")


@pytest.fixture(scope="session")
def speaker(text_folder):
    """The model and its processor."""
    model = tm.load(text_folder)
    return model, tm.load_processor(text_folder, model.config)
