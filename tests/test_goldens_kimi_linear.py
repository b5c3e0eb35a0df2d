"""Kimi Linear against transformers' outputs, array by array (see goldens/README.md)."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.numerics import rel_rms

import trillion_moe as tm

BAR = 1e-4


@pytest.fixture(scope="module")
def folder(goldens):
    return goldens / "kimi_linear" / "a"


@pytest.fixture(scope="module")
def model(folder):
    return tm.load(folder)


@pytest.fixture(scope="module")
def outputs(folder):
    return load_file(folder / "outputs.safetensors")


@pytest.fixture(scope="module")
def inputs(folder):
    return load_file(folder / "inputs.safetensors")


def test_every_array(model, inputs, outputs):
    arrays = tm.trace(model, inputs["input_ids"])
    skipped = ("gen.", "grad.", "padded.", "loss")  # compared by the tests below
    golden = {name: a for name, a in outputs.items() if not name.startswith(skipped)}
    assert not [name for name in golden if name not in arrays]
    for name, expected in golden.items():
        if expected.dtype.kind == "i":
            np.testing.assert_array_equal(arrays[name], expected, err_msg=name)
        else:
            assert rel_rms(arrays[name], expected) < BAR, name


def test_left_padding(model, inputs, outputs):
    mask = inputs["gen.attention_mask"]
    logits, _ = tm.forward(model, inputs["gen.input_ids"], segments=mask)
    assert rel_rms(np.asarray(logits)[mask == 1], outputs["padded.logits"][mask == 1]) < BAR


@pytest.mark.slow
def test_greedy_ids(model, inputs, outputs):
    """Unequal prompts, generated as one batch."""
    mask = inputs["gen.attention_mask"].astype(bool)
    prompts = [row[keep].tolist() for row, keep in zip(inputs["gen.input_ids"], mask, strict=True)]
    completions = tm.generate(model, prompts, max_new_tokens=16, eos_ids=())
    np.testing.assert_array_equal([c.ids for c in completions], outputs["gen.sequences"][:, mask.shape[1] :])


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_gradients(model, inputs, outputs, tmp_path, remat):
    def mean_loss(model, batch):
        return tm.loss(model, batch, remat=remat)[0]

    value, grads = jax.jit(jax.value_and_grad(mean_loss))(model, {"tokens": inputs["input_ids"]})
    assert abs(float(value) - outputs["loss"][0]) < 1e-5
    tm.save(tmp_path / "grads", grads)
    found = load_file(tmp_path / "grads" / "model.safetensors")
    golden = {name.removeprefix("grad."): a for name, a in outputs.items() if name.startswith("grad.")}
    assert len(golden) > 30
    for name, expected in golden.items():
        assert rel_rms(found[name].reshape(expected.shape), expected) < 3e-4, name
