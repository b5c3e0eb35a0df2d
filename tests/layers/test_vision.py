"""The vision tower against Kimi K3's release code, its two attention paths against each other, and the host's work.

Goldens: `kimi_k3/a`, computed by the release code on a tiny random model; see the README beside them.
"""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.numerics import rel_rms

from trillion_moe.blueprint import init
from trillion_moe.config import ModelConfig, VisionConfig
from trillion_moe.layers import vision
from trillion_moe.layers.vision import Features, Projector, VisionTower, splice
from trillion_moe.layers.vision_positions import ImageBatch, expand_placeholders, positions
from trillion_moe.weights import LoRA

CASES = ["image_text", "tower_video"]
MEDIA, PAD = 500, 511
MATRICES = {"patch_embed", "qkv", "o", "up", "down", "proj_0", "proj_2"}


def cosine(got, want) -> float:
    got, want = (np.asarray(x, np.float64).ravel() for x in (got, want))
    return float(got @ want / np.sqrt((got @ got) * (want @ want)))


@pytest.fixture(scope="module")
def folder(goldens: Path) -> Path:
    return goldens / "kimi_k3" / "a"


@pytest.fixture(scope="module")
def cfg(folder: Path) -> ModelConfig:
    cfg = ModelConfig.from_file(folder)
    assert (cfg.media_id, cfg.pad_id) == (MEDIA, PAD)
    return cfg


@pytest.fixture(scope="module")
def parts(folder: Path, cfg: ModelConfig) -> tuple[VisionTower, Projector]:
    """Tower and projector with the golden weights. Linear layers are stored [out, in]."""
    hf = load_file(folder / "model.safetensors")
    names = {
        "attn_norm": "norm0",
        "qkv": "wqkv",
        "o": "wo",
        "mlp_norm": "norm1",
        "up": "mlp.fc0",
        "down": "mlp.fc1",
    }
    tower, projector = VisionTower(cfg, dtype="float32"), Projector(cfg, dtype="float32")
    tower.patch_embed = hf["vision_tower.patch_embed.proj.weight"].reshape(tower.patch_embed.shape[1], -1).T
    tower.pos_emb = hf["vision_tower.patch_embed.pos_emb.weight"]
    tower.final_norm = hf["vision_tower.encoder.final_layernorm.weight"]
    for ours, theirs in names.items():
        layers = [hf[f"vision_tower.encoder.blocks.{j}.{theirs}.weight"].T for j in range(cfg.vision.num_layers)]
        setattr(tower.blocks, ours, np.stack(layers))
    projector.proj_0 = hf["mm_projector.proj.0.weight"].T
    projector.proj_2 = hf["mm_projector.proj.2.weight"].T
    projector.norm = hf["mm_projector.post_norm.weight"]
    return jax.tree.map(jnp.asarray, (tower, projector))


def features(parts, images: ImageBatch, cfg: ModelConfig, tap: dict | None = None) -> jax.Array:
    tower, projector = parts
    return projector(tower(images, cfg, tap), cfg, tap)


def tapped(parts, images: ImageBatch, cfg: ModelConfig) -> dict[str, jax.Array]:
    tap = {}
    features(parts, images, cfg, tap)
    return tap


run = jax.jit(features, static_argnums=2)
run_tapped = jax.jit(tapped, static_argnums=2)


def random_images(cfg: ModelConfig, grids, seed: int = 0) -> ImageBatch:
    rows, p = int(np.prod(grids, axis=1).sum()), cfg.vision.patch_size
    return ImageBatch(np.random.default_rng(seed).uniform(-1, 1, (rows, 3, p, p)).astype(np.float32), grids)


# --- against the release ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_golden_array(case: str, folder: Path, cfg: ModelConfig, parts) -> None:
    golden = load_file(folder / f"{case}.safetensors")

    got = run_tapped(parts, ImageBatch(golden["pixel_values"], golden["grid_thws"]), cfg)
    assert set(got) == {name for name in golden if name.startswith("vision.")}
    errors = {name: rel_rms(got[name], golden[name]) for name in got}
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_agrees_with_the_release_in_float32(case: str, folder: Path, cfg: ModelConfig, parts) -> None:
    """Fault 117: an epsilon left to the framework changes by 65,000 between float32 and bfloat16."""
    golden = load_file(folder / f"{case}.safetensors")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parts)
    tap = run_tapped(half, ImageBatch(golden["pixel_values"], golden["grid_thws"]), cfg)
    for name, x in tap.items():
        assert x.dtype == jnp.bfloat16
        assert cosine(x, golden[name]) > 0.999, name


def test_spliced_embeddings(folder: Path, cfg: ModelConfig) -> None:
    golden = load_file(folder / "image_text.safetensors")
    table = load_file(folder / "model.safetensors")["language_model.model.embed_tokens.weight"]
    assert cfg.vision is not None
    counts = ImageBatch(golden["pixel_values"], golden["grid_thws"]).tokens_per_item(cfg.vision)
    assert counts == (6, 9)
    for given_ids in (golden["input_ids"], golden["input_ids_expanded"]):
        tokens, segments = expand_placeholders(given_ids, None, counts, MEDIA, PAD)
        np.testing.assert_array_equal(tokens, golden["input_ids_expanded"])
        assert segments is None
        features = Features(jnp.asarray(golden["vision.projected"]), sum(counts))
        got = splice(jnp.asarray(table)[tokens], jnp.asarray(tokens) == MEDIA, features)
        np.testing.assert_array_equal(got, golden["embed"])


# --- attention paths, depth, gradients -------------------------------------------------------------------------------

GRIDS = {"equal": [(1, 4, 2)] * 5, "interleaved": [(1, 4, 6), (1, 2, 2), (2, 2, 6), (1, 2, 2), (4, 2, 2)]}


def test_items_do_not_see_each_other(cfg: ModelConfig, parts) -> None:
    """Also: tapping changes nothing."""
    grids = [(1, 4, 2), (1, 2, 2), (1, 4, 2)]
    images = random_images(cfg, grids)
    alone = [run(parts, ImageBatch(p, [g]), cfg) for p, g in zip(np.split(images.patches, [8, 12]), grids, strict=True)]
    together = run_tapped(parts, images, cfg)["vision.projected"]
    assert rel_rms(together, np.concatenate(alone)) < 1e-6


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS.keys())
def test_items_by_length_equal_the_mask(grids, monkeypatch) -> None:
    """Outputs and gradients; also with many query blocks, the last one cut, and with one item's scores at a time."""
    at = positions(grids, vision_config(4, 4))
    qkv = tuple(jax.random.normal(jax.random.key(0), (3, len(at.item), 2, 4)))

    def measure(**limits: int):
        for name, value in limits.items():
            monkeypatch.setattr(vision, name, value)

        def loss(q, k, v):
            out = vision.attend(q, k, v, at)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*qkv)

    want = measure()
    for limits in ({"SCORES": 1}, {"QUERY_BLOCK": 5}, {"MAX_GROUPS": 0}):  # the earlier limits stay
        errors = jax.tree.map(rel_rms, measure(**limits), want)
        assert max(jax.tree.leaves(errors)) < 1e-6, (limits, errors)


def test_gradient_is_finite_and_reaches_every_weight(cfg: ModelConfig, parts) -> None:
    images = random_images(cfg, GRIDS["interleaved"])
    grads = jax.jit(jax.grad(lambda parts: jnp.sum(jnp.square(features(parts, images, cfg) - 1))))(parts)
    for path, g in jax.tree.leaves_with_path(grads):
        assert np.all(np.isfinite(g)), jax.tree_util.keystr(path)
        assert np.max(np.abs(g)) > 0, jax.tree_util.keystr(path)


def test_a_tower_of_one_block(cfg: ModelConfig, parts) -> None:
    """Its leaves are not stacked; it is the first block of a deeper one."""
    assert cfg.vision is not None
    shallow = dataclasses.replace(cfg, vision=dataclasses.replace(cfg.vision, num_layers=1))
    images, (deep, projector) = random_images(cfg, [(1, 2, 4)]), parts
    tower = VisionTower(shallow, dtype="float32")
    assert tower.blocks.qkv.shape == (cfg.vision.hidden_size, 3 * cfg.vision.qkv_size)
    tower.blocks = jax.tree.map(lambda x: x[0], deep.blocks)
    tower.patch_embed, tower.pos_emb, tower.final_norm = deep.patch_embed, deep.pos_emb, deep.final_norm
    got, want = run_tapped((tower, projector), images, shallow), run_tapped(parts, images, cfg)
    assert rel_rms(got["vision.block0"], want["vision.block0"]) < 1e-6
    assert "vision.block1" not in got


def test_adapters_on_every_matrix(cfg: ModelConfig, parts) -> None:
    """A LoRA leaf computes what the merged matrix does, under the scan over the blocks too."""

    def adapt(merge: bool, path, w):
        if jax.tree_util.keystr(path)[1:].split(".")[-1] not in MATRICES:
            return w
        *b, k, n = w.shape
        rng = np.random.default_rng(k + n)
        down, up = (jnp.asarray(rng.normal(size=s), jnp.float32) / 8 for s in ((*b, k, 2), (*b, 2, n)))
        return w + 0.5 * down @ up if merge else LoRA(w, down, up, scaling=0.5)

    adapted, merged = (jax.tree.map_with_path(partial(adapt, merge), parts) for merge in (False, True))
    assert len(jax.tree.leaves(adapted)) == len(jax.tree.leaves(parts)) + 2 * len(MATRICES)
    images = random_images(cfg, [(1, 2, 4)])
    got, want = run(adapted, images, cfg), run(merged, images, cfg)
    assert rel_rms(want, run(parts, images, cfg)) > 0.1
    assert rel_rms(got, want) < 1e-5


def test_blueprint_initialises(cfg: ModelConfig) -> None:
    tower = jax.eval_shape(lambda key: init(VisionTower(cfg, dtype="bfloat16"), key), jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(tower)} == {jnp.dtype(jnp.bfloat16)}
    assert tower.blocks.up.shape == (2, 32, 64)


# --- positions -------------------------------------------------------------------------------------------------------


def slow_resize(table: np.ndarray, h: int, w: int) -> np.ndarray:
    """Bilinear, corners not aligned, by the definition: table values sit at pixel centres, edges repeat outward."""
    height, width = table.shape[:2]
    out = np.zeros((h, w, table.shape[2]))
    for i in range(h):
        for j in range(w):
            y, x = (i + 0.5) * height / h - 0.5, (j + 0.5) * width / w - 0.5
            for r in range(-1, height + 1):
                for c in range(-1, width + 1):
                    share = max(0.0, 1 - abs(y - r)) * max(0.0, 1 - abs(x - c))
                    out[i, j] += share * table[min(max(r, 0), height - 1), min(max(c, 0), width - 1)]
    return out


side = st.integers(1, 7)


@settings(max_examples=40, deadline=None)
@given(side, side, side, side, st.integers(1, 3))
def test_resized_table(height: int, width: int, half_h: int, half_w: int, t: int) -> None:
    cfg = vision_config(height, width)
    table, h, w = np.random.default_rng(0).normal(size=(height, width, 3)), 2 * half_h, 2 * half_w
    at = positions([(t, h, w)], cfg)
    got = np.sum(at.corner_weights[..., None] * table.reshape(-1, 3)[at.corners], axis=0).reshape(t, h, w, 3)
    want = slow_resize(table, h, w)
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), atol=1e-6)
    if (h, w) == (height, width):
        assert set(np.unique(at.corner_weights).tolist()) <= {0.0, 1.0}
        np.testing.assert_array_equal(got[0].astype(np.float32), table.astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([2, 4]), st.sampled_from([2, 6])), min_size=1, max_size=5))
def test_merge_and_order(grids) -> None:
    """Patches that carry (item, row, column) as their value come back window by window, item by item."""
    at = positions(grids, vision_config(4, 4))
    batch = np.concatenate(
        [np.c_[np.full(t * h * w, i), np.indices((t, h, w)).reshape(3, -1).T] for i, (t, h, w) in enumerate(grids)]
    )
    np.testing.assert_array_equal(at.order[at.inverse], np.arange(len(batch)))
    work = batch[at.order]
    np.testing.assert_array_equal(np.stack([at.item, at.row, at.column], axis=1), work[:, [0, 2, 3]])
    lengths = [n for items, n in at.groups for _ in range(items)]
    np.testing.assert_array_equal(np.diff(np.flatnonzero(np.diff(at.item, prepend=-1, append=-1))), lengths)
    want = []
    for i, (t, h, w) in enumerate(grids):
        for r in range(0, h, 2):
            for c in range(0, w, 2):
                want.append([[i, (t - 1) / 2, r + dr, c + dc] for dr in (0, 1) for dc in (0, 1)])
    got = np.einsum("mtwd,mt->mwd", work[at.merge], at.merge_weights)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def vision_config(height: int, width: int) -> VisionConfig:
    return VisionConfig(
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        qkv_size=4,
        mlp_size=8,
        patch_size=2,
        pos_emb_height=height,
        pos_emb_width=width,
        pos_emb_time=4,
        text_hidden_size=8,
    )


# --- the batch of images ---------------------------------------------------------------------------------------------


def test_image_batch_is_a_pytree_with_static_grids() -> None:
    images = ImageBatch(np.zeros((12, 3, 2, 2), np.float32), np.array([[1, 2, 4], [1, 2, 2]]))
    assert images.grid_thw == ((1, 2, 4), (1, 2, 2))
    doubled = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x))(images)
    assert isinstance(doubled, ImageBatch)
    assert doubled.grid_thw == images.grid_thw
    assert float(doubled.patches.sum()) == 12 * 3 * 2 * 2
    [(path, _)] = jax.tree.leaves_with_path(images)
    assert jax.tree_util.keystr(path) == ".patches"
    assert images.tokens_per_item(vision_config(4, 4)) == (2, 1)


@pytest.mark.parametrize(
    ("shape", "grids", "message"),
    [
        ((8, 3, 2, 2), [(1, 2, 2), (1, 2, 4)], r"patches has 8 rows, but the 2 grids in grid_thw hold 12"),
        ((4, 1, 2, 2), [(1, 2, 2)], r"patches has shape \(4, 1, 2, 2\)"),
        ((4, 3, 2, 1), [(1, 2, 2)], r"patches has shape \(4, 3, 2, 1\)"),
        ((4, 3, 2, 2), [(1, 2, 2), (0, 2, 2)], r"grid_thw\[1\] = \[0, 2, 2\]"),
        ((4, 3, 2, 2), [(1.0, 2.0, 2.0)], r"float64\[1, 3\]"),
        ((4, 3, 2, 2), [(2, 2)], r"int64\[1, 2\]"),
        ((0, 3, 2, 2), np.zeros((0, 3), int), r"at least one item"),
    ],
)
def test_image_batch_refuses(shape, grids, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageBatch(np.zeros(shape, np.float32), grids)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((5, 2, 2), r"grid_thw\[1\] = \(5, 2, 2\): 5 frames; an item has 1 to 4"),
        ((1, 3, 2), r"grid_thw\[1\] = \(1, 3, 2\): h and w must be multiples of the merge window \(2, 2\)"),
        ((1, 2, 514), r"grid_thw\[1\] = \(1, 2, 514\): h and w are at most 512"),
    ],
)
def test_tower_refuses(grid, message: str) -> None:
    images = ImageBatch(np.zeros((4 + int(np.prod(grid)), 3, 2, 2), np.float32), [(1, 2, 2), grid])
    with pytest.raises(ValueError, match=message):
        images.tokens_per_item(vision_config(4, 4))


def test_patches_of_another_size_are_refused(cfg: ModelConfig, parts) -> None:
    with pytest.raises(ValueError, match="patches are 2 pixels wide; this model takes 14"):
        run(parts, ImageBatch(np.zeros((4, 3, 2, 2), np.float32), [(1, 2, 2)]), cfg)


# --- placeholders ----------------------------------------------------------------------------------------------------


def test_expansion_pads_rows_of_unequal_length() -> None:
    tokens = np.array([[1, MEDIA, 2, 3], [4, MEDIA, 5, MEDIA], [6, 7, 8, 9]], np.int32)
    got, segments = expand_placeholders(tokens, None, (3, 1, 2), MEDIA, PAD)
    m, p = MEDIA, PAD
    np.testing.assert_array_equal(got, [[1, m, m, m, 2, 3], [4, m, 5, m, m, p], [6, 7, 8, 9, p, p]])
    np.testing.assert_array_equal(segments, [[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2])
    assert got.dtype == tokens.dtype
    again, same = expand_placeholders(got, segments, (3, 1, 2), MEDIA, PAD)
    np.testing.assert_array_equal(again, got)
    np.testing.assert_array_equal(same, segments)


def test_expansion_keeps_documents_and_ignores_padding() -> None:
    tokens = np.array([[MEDIA, MEDIA, 2, MEDIA]])
    got, segments = expand_placeholders(tokens, np.array([[0, 1, 1, 2]]), (2, 3), MEDIA, PAD)
    np.testing.assert_array_equal(got, [[PAD, MEDIA, MEDIA, 2, MEDIA, MEDIA, MEDIA]])
    np.testing.assert_array_equal(segments, [[0, 1, 1, 1, 2, 2, 2]])


def test_nothing_to_expand() -> None:
    tokens = np.array([[1, 2, 3]])
    got, segments = expand_placeholders(tokens, None, (), MEDIA, PAD)
    np.testing.assert_array_equal(got, tokens)
    assert segments is None
    got, _ = expand_placeholders(np.array([[MEDIA, 5, MEDIA]]), None, (1, 1), MEDIA, PAD)  # both readings coincide
    np.testing.assert_array_equal(got, [[MEDIA, 5, MEDIA]])


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        ([[1, 2]], (4,), r"row 0: 0 placeholders .* 1 images need 1 \(one each\) or 4 \(expanded to \[4\]\)"),
        ([[1, 2], [MEDIA, MEDIA]], (4,), r"row 1: 2 placeholders .* per row \[0, 2\]; 1 images need 1 .* or 4"),
        ([[1, MEDIA]], (), r"row 0: 1 placeholders .* 0 images need 0 \(one each\) or 0"),
        ([[MEDIA] * 3 + [1]], (4,), r"row 0: 3 placeholders .* or 4"),  # fault 112: a run that truncation cut
        (
            [[MEDIA] * 3, [MEDIA] * 3],
            (2, 4),
            r"row 0: placeholders of image 1 spread over \[row, segment\] \[\[0, 1\], \[1, 1\]\]",
        ),
    ],
)
def test_placeholders_that_do_not_fit(rows, counts, message: str) -> None:
    """Fault 113: no placeholder for an image, one too many, no image: each a refusal that names the row."""
    with pytest.raises(ValueError, match=message):
        expand_placeholders(np.array(rows), None, counts, MEDIA, PAD)


def test_images_of_another_row_are_refused() -> None:
    rows = np.array([[MEDIA, MEDIA], [1, 2]])
    with pytest.raises(ValueError, match=r"row 0: 2 placeholders .* its 1 images need 1 \(one each\) or 4"):
        expand_placeholders(rows, None, (4, 4), MEDIA, PAD, items_per_row=(1, 1))
    with pytest.raises(ValueError, match=r"items_per_row \[3, 0\] does not share 2 images among 2 rows"):
        expand_placeholders(rows, None, (4, 4), MEDIA, PAD, items_per_row=(3, 0))
    got, _ = expand_placeholders(rows, None, (4, 4), MEDIA, PAD, items_per_row=(2, 0))
    assert got.shape == (2, 8)


def test_splice_in_row_major_order_with_gradient() -> None:
    tokens = jnp.array([[1, MEDIA, MEDIA], [MEDIA, 2, 3]])
    embeddings, rows = jnp.zeros((2, 3, 2), jnp.bfloat16), jnp.arange(1.0, 7).reshape(3, 2)
    out = jax.jit(splice)(embeddings, tokens == MEDIA, Features(rows, 3))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, jnp.array([[[0, 0], [1, 2], [3, 4]], [[5, 6], [0, 0], [0, 0]]], jnp.bfloat16))

    def total(rows, embeddings):
        return jnp.sum(splice(embeddings, tokens == MEDIA, Features(rows, 3)))

    to_rows, to_embeddings = jax.grad(total, (0, 1))(rows, embeddings)
    np.testing.assert_array_equal(to_rows, np.ones((3, 2)))
    np.testing.assert_array_equal(to_embeddings[..., 0], [[1, 0, 0], [0, 1, 1]])


@pytest.mark.parametrize("count", [1, 4])
def test_splice_poisons_on_a_wrong_count(count: int) -> None:
    holds = jnp.array([[1, MEDIA, 2, MEDIA, MEDIA]]) == MEDIA
    assert np.isnan(splice(jnp.zeros((1, 5, 2)), holds, Features(jnp.ones((4, 2)), count))).all()


def test_rows_past_the_count_are_room() -> None:
    """Features padded to a bucket give what they give without."""
    holds, rows = jnp.array([[False, True, True]]), jnp.arange(8.0).reshape(4, 2)
    out = splice(jnp.zeros((1, 3, 2)), holds, Features(rows.at[2:].set(jnp.nan), jnp.int32(2)))
    np.testing.assert_array_equal(out, [[[0, 0], [0, 1], [2, 3]]])
