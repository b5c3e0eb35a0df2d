"""KDA in chunks in float64, documents and padding token by token; the step of one token; gates; refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.kda_tools import NAMES, RECURRENCE, B, close, exact, found, make, pick
from tests.numerics import TOLERANCE, rel_rms

from trillion_moe.kernels import linear_attention
from trillion_moe.kernels.linear_attention import CASES, Case, kda, kda_gate, kda_range, l2norm

FORMS = {"xla": kda, "reference": RECURRENCE}


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def run(data, *, impl="xla", dtype="float64", segments=None, state_segment=None, chunk=32):
    return found(FORMS[impl], data, segments, state_segment, chunk=chunk, dtype=dtype)


@pytest.mark.parametrize("T", [3, 33])
def test_equals_recurrence(T):
    """In float64, where nothing hides in rounding."""
    data = make(T)
    close(run(data), exact(data), "float64")


@pytest.mark.parametrize("chunk", [1, 2, 8, 64])
def test_every_chunk_size(chunk):
    data = make(33)
    close(run(data, chunk=chunk), exact(data), "float64")


def test_zero_key_rows_fault_18():
    """fault 18: an all-zero key through l2norm and the recurrence has finite gradients, equal to the reference's."""
    (q, k, v, g, beta), state, _ = make(9)
    k[:, ::3] = 0

    def loss(k, impl):
        o, final = kda(q, l2norm(k), v, g, beta, state=state, impl=impl)
        return jnp.sum(o**2) + jnp.sum(final**2)

    q, k, v, g, beta, state = map(jnp.asarray, (q, k, v, g, beta, state))
    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(k, impl) for impl in ("xla", "reference"))
    assert rel_rms(got, want) < TOLERANCE["float64"]


PACKED = np.array([[3] * 5 + [1] * 1 + [2] * 2 + [7] * 29, [1] * 20 + [2] * 17])


@pytest.mark.parametrize(("impl", "chunk"), [("reference", 8), ("xla", 8), ("xla", 32)])
def test_packed_equals_alone_fault_15_16_20(impl, chunk):
    """fault 15, 16, 20: outputs and gradients of each document are those of the document alone, state 0 before it."""
    data = make(37)
    got = run(data, segments=PACKED, impl=impl, chunk=chunk)
    (_, _, _, _, _), state, (_, dstate) = data
    for row in range(B):
        starts = [0, *(np.flatnonzero(np.diff(PACKED[row])) + 1), 37]
        for a, b in itertools.pairwise(starts):
            x, _, (do, _) = pick(data, np.s_[row : row + 1, a:b])
            alone = (x, state[row : row + 1] * (a == 0), (do, dstate[row : row + 1] * (b == 37)))
            want = exact(alone)
            mine = [got[i][row : row + 1, a:b] for i in (0, 2, 3, 4, 5, 6)]
            want_dg = want[5].copy()
            want_dg[:, :1] *= a == 0  # decay of a dropped state: no gradient
            close(mine, [want[0], *want[2:5], want_dg, want[6]], "float64", ("o", *NAMES[2:7]))
            if a == 0:
                close([got[7][row : row + 1]], [want[7]], "float64", ["dstate"])
            if b == 37:
                close([got[1][row : row + 1]], [want[1]], "float64", ["state"])


PADDED = {
    "left": np.repeat([0, 1], [5, 32]),
    "tail": np.repeat([1, 0], [30, 7]),
    "middle": np.repeat([1, 0, 1, 0, 2, 0], [7, 3, 9, 1, 12, 5]),
    "all": np.zeros(37, int),
    "one": np.repeat([0, 4, 0], [9, 1, 27]),
}


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("where", PADDED)
def test_nan_padding_anywhere_fault_18(where, impl):
    """fault 18: rows with padding full of NaN equal the rows without it; padding gives 0, takes exactly no gradient."""
    segments = np.stack([PADDED[where]] * B)
    real = PADDED[where] != 0
    data = make(37)
    for a in (*data[0], data[2][0]):
        a[:, ~real] = np.nan
    got = run(data, segments=segments, impl=impl, chunk=8)
    for i in (0, 2, 3, 4, 5, 6):
        assert not np.asarray(got[i])[:, ~real].any(), NAMES[i]
    if where == "all":
        close([got[1], got[7]], [data[1], data[2][1]], "float64", ["state", "dstate"])
        return
    want = run(pick(data, np.s_[:, real]), segments=segments[:, real], impl="reference")  # no padding in this call
    mine = [a if i in (1, 7) else a[:, real] for i, a in enumerate(got)]
    close(mine, want, "float64")


def test_pads_at_the_tail_of_a_pack_fault_8_11():
    """fault 8, 11: 37 + 20 tokens padded to 64 equal T = 57, all gradients finite; documents need no offsets."""
    data = make(64)
    segments = np.stack([np.repeat([1, 2, 0], [37, 20, 7])] * B)
    got = run(data, segments=segments, dtype="float32")
    want = exact(pick(data, np.s_[:, :57]), segments=segments[:, :57])
    close([a if i in (1, 7) else a[:, :57] for i, a in enumerate(got)], want, "float32")
    assert not any(np.asarray(got[i])[:, 57:].any() for i in (0, 2, 3, 4, 5, 6))


def through_cut(data, cut, total, segments):
    """`run` in two calls, the cotangent of the state handed back through the cut; parts padded to `total` tokens."""
    _, state, (_, dstate) = data

    def part(tokens, state, dstate, before):
        (x, _, (do, _)), mine = pick(data, np.s_[:, tokens]), None
        extra = 0 if segments is None else total - do.shape[1]
        x, do = jax.tree.map(lambda a: np.pad(a, [(0, 0), (0, extra)] + [(0, 0)] * (a.ndim - 2)), (x, do))
        if segments is not None:
            mine = np.pad(segments[:, tokens], [(0, 0), (0, extra)])
        got = run((x, state, (do, dstate)), segments=mine, state_segment=before, chunk=8)
        return [a if i in (1, 7) else a[:, : a.shape[1] - extra] for i, a in enumerate(got)]

    own = None if segments is None else segments[:, 0]
    last = None if segments is None else np.max(segments[:, :cut], axis=1)  # these segments only grow
    middle = part(np.s_[:cut], state, np.zeros_like(dstate), own)[1]
    rest = part(np.s_[cut:], middle, dstate, last)
    first = part(np.s_[:cut], state, rest[7], own)
    joined = [np.concatenate([a, b], axis=1) for a, b in zip(first, rest, strict=True)]
    return [rest[1] if i == 1 else first[7] if i == 7 else a for i, a in enumerate(joined)]


@pytest.mark.parametrize("cut", [1, 2, 7, 8, 9, 19, 20, 31, 36])
def test_cut_anywhere_in_documents_equals_one_go_fault_3(cut):
    """fault 3: the state passes a cut, K != V and not symmetric, and its gradient passes back; also cuts in padding."""
    segments = np.stack([PADDED["middle"]] * B)
    data = make(37)
    close(through_cut(data, cut, 37, segments), exact(data, segments), "float64")


def test_cut_40_24_equals_one_go_fault_3():
    data = make(64)
    close(through_cut(data, 40, 64, None), exact(data), "float64")


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_state_of_another_document_is_dropped(impl, T):
    """Even a NaN state; row 0 continues, row 1 restarts; its state takes no gradient."""
    x, state, cotangents = make(T)
    state[1] = np.nan
    got = run((x, state, cotangents), segments=np.full((B, T), 2), state_segment=[2, 1], impl=impl)
    state[1] = 0
    want = exact((x, state, cotangents))
    row0, row1 = [[a[i : i + 1] for a in want] for i in range(B)]
    close([a[:1] for a in got], row0, "float64")
    close([a[1:] for a in got[:5]], row1[:5], "float64", NAMES[:5])
    close([got[6][1:]], row1[6:7], "float64", ["dbeta"])
    assert not np.asarray(got[7])[1].any()


@pytest.mark.parametrize("padded", [False, True])
def test_step_equals_recurrence(padded):
    """Decode: T = 1 has a path of its own; a padded row keeps its state."""
    data = make(1)
    segments = np.array([[1], [0]]) if padded else None
    want = exact(data, segments)
    close(run(data, segments=segments), want, "float64")
    close(run(data, segments=segments, dtype="float32"), want, "float32")


def test_jit_of_the_step_stays_small():
    """Decode pays per operation: no loop, and few operations."""
    x, state, _ = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), make(1))
    jaxpr = jax.make_jaxpr(lambda x, state: kda(*x, state=state))(x, state)
    assert "while" not in str(jaxpr)
    assert "scan" not in str(jaxpr)
    assert len(jaxpr.eqns) <= 45, len(jaxpr.eqns)


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("T", [1, 9])
def test_a_state_in_float64_is_not_cast_down(impl, T):
    x, state, _ = make(T)
    low = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), x)
    o, final = kda(*low, state=jnp.asarray(state), impl=impl)
    assert (o.dtype, final.dtype) == (jnp.float32, jnp.float64)
    wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), low)
    assert rel_rms(final, kda(*wide, state=jnp.asarray(state), impl="reference")[1]) < TOLERANCE["float64"]


def test_derivatives_of_derivatives_are_in_reverse_mode():
    """The gradients' own gradients are right; forward mode is refused, not silently wrong."""
    x, _, _ = jax.tree.map(jnp.asarray, make(9))

    def first(impl, *x):
        return jax.grad(lambda *x: jnp.sum(kda(*x, impl=impl, chunk=4)[0] ** 2), argnums=range(5))(*x)

    def second(impl):
        return jax.grad(lambda *x: sum(jnp.sum(d**2) for d in first(impl, *x)), argnums=range(5))(*x)

    close(second("xla"), second("reference"), "float64", NAMES[2:7])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda *x: kda(*x)[0], x, x)


def test_gate_values_fault_1():
    """fault 1: lower_bound scales a sigmoid (no clamp of a softplus); a_log is per head, equal across channels."""
    z, a_log = jnp.zeros((1, 1, 2, 3), jnp.float32), jnp.zeros(2)
    np.testing.assert_allclose(kda_gate(z, a_log, lower_bound=-5.0), -2.5, rtol=1e-6)
    np.testing.assert_allclose(kda_gate(z, a_log, lower_bound=None), -np.log(2), rtol=1e-6)
    a_log = jnp.log(jnp.array([1.0, 3.0]))
    for lower_bound, want in (
        (-5.0, [-5 / (1 + np.exp(-0.5)), -5 / (1 + np.exp(-1.5))]),
        (None, np.log1p(np.exp(0.5)) * np.array([-1, -3])),
    ):
        g = kda_gate(z + 0.5, a_log, lower_bound=lower_bound)
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g[0, 0], np.repeat(np.asarray(want)[:, None], 3, axis=1), rtol=1e-6)


@pytest.mark.parametrize("z", [-1e4, -30.0, 30.0, 1e4])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_gradients_stay_finite(z, lower_bound):
    z, a_log = jnp.full((1, 1, 2, 3), z, jnp.float32), jnp.ones(2, jnp.float32)
    g, grads = jax.value_and_grad(lambda z, a: kda_gate(z, a, lower_bound=lower_bound).sum(), argnums=(0, 1))(z, a_log)
    assert g <= 0
    assert all(bool(jnp.isfinite(d).all()) for d in grads)


def test_l2norm():
    """fault 18: eps on the sum, inside the root; the gradient of a zero row is finite (1/sqrt(eps))."""
    x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(l2norm(x), x / np.sqrt([[25 + 1e-6], [1e-6]]))
    np.testing.assert_allclose(jax.grad(lambda x: l2norm(x).sum())(x)[1], 1e3, rtol=1e-6)
    assert l2norm(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_refusals_give_numbers_fault_7():
    """fault 7: more value heads than key heads are refused, not indexed past the end."""
    x, state, _ = jax.tree.map(jnp.asarray, make(3))
    q, k, v, g, beta = x
    with pytest.raises(ValueError, match=r"v has shape \(2, 3, 6, 7\), want \(2, 3, 3, 7\)"):
        kda(q, k, jnp.repeat(v, 2, axis=2), g, beta)
    with pytest.raises(ValueError, match=r"state has shape .*7, 5\), want \(2, 3, 5, 7\)"):
        kda(*x, state=jnp.swapaxes(state, 2, 3))
    with pytest.raises(ValueError, match=r"unknown impl 'cuda'; legal: \['gpu', 'reference', 'tpu', 'xla'\]"):
        kda(*x, impl="cuda")
    with pytest.raises(ValueError, match="chunk is 24"):
        kda(*x, chunk=24)
    with pytest.raises(ValueError, match="T is 0"):
        kda(*(a[:, :0] for a in x))
    with pytest.raises(ValueError, match="no dim may be 0"):
        kda(*(a[:0] for a in x))
    with pytest.raises(TypeError, match="v has dtype int"):
        kda(q, k, v.astype(int), g, beta)
    with pytest.raises(ValueError, match="kda_range: v has shape"):
        kda_range(k, v[:, :2], g, beta)
    with pytest.raises(ValueError, match=r"kda_range: k has shape \(3, 3, 5\) and v .*; want \[B,T,H,K\]"):
        kda_range(k[0], v, g, beta)
    with pytest.raises(ValueError, match=r"state_segment without segments"):
        kda(*x, state_segment=jnp.ones(B, jnp.int32))
    with pytest.raises(ValueError, match=r"a_log has shape \(128,\), but z .* H=96"):
        kda_gate(jnp.zeros((1, 1, 96, 2)), jnp.zeros(128), lower_bound=-5.0)
    with pytest.raises(ValueError, match=r"lower_bound is 5\.0"):
        kda_gate(jnp.zeros((1, 1, 1, 2)), jnp.zeros(1), lower_bound=5.0)


def test_cases_are_the_real_models_shapes():
    assert CASES["kimi_k3"] == Case(B=1, T=4096, H=96, K=128, V=128, lower_bound=-5.0)
    assert (CASES["kimi_linear"].H, CASES["kimi_linear"].K, CASES["kimi_linear"].lower_bound) == (32, 128, None)


def test_what_gates_and_norms_refuse() -> None:
    with pytest.raises(ValueError, match=r"kda_gate: z has shape \(3, 4\); want \[B,T,H,K\]"):
        kda_gate(jnp.zeros((3, 4)), jnp.zeros(3), lower_bound=-5.0)
    with pytest.raises(ValueError, match=r"lower_bound is -inf; .* legal is negative and finite"):
        kda_gate(jnp.zeros((1, 1, 1, 2)), jnp.zeros(1), lower_bound=-np.inf)
    with pytest.raises(TypeError, match="l2norm: x has dtype int"):
        l2norm(jnp.array([[3, 4]]))
    with pytest.raises(TypeError, match="short_conv: x has dtype int"):
        linear_attention.short_conv(jnp.ones((1, 3, 4), int), jnp.ones((4, 4)))
    with pytest.raises(ValueError, match=r"short_conv: x has shape \(3, 4\) and w \(4, 4\)"):
        linear_attention.short_conv(jnp.ones((3, 4)), jnp.ones((4, 4)))
