"""The small functions: gradients, two independent judges, extreme inputs, and messages."""
import warnings

import autograd.numpy as anp
import ml_dtypes
import numpy as np
import pytest
from autograd import make_vjp
from helpers import check_grad, rel
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from k3np import ops
from k3np.ops import (
    causal_conv,
    check_floats,
    check_shapes,
    cross_entropy,
    differentiable,
    l2_norm,
    linear,
    rms_norm,
    round_bf16,
    sigmoid,
    silu,
    softmax,
    softplus,
    unbroadcast,
)

POINTWISE = (sigmoid, softplus, silu)
few = settings(deadline=None, max_examples=40)
vectors = hnp.arrays(np.float64, 6, elements=st.floats(-30, 30))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# What a textbook would write, with autograd's NumPy: the judge of values and gradients.

def textbook_conv(x, w, state):
    u = anp.concatenate([state, x], axis=1)
    taps = w[:, 0]
    rows = [sum(u[:, t + j] * taps[:, j] for j in range(taps.shape[1]))
            for t in range(x.shape[1])]
    return anp.stack(rows, axis=1)


def textbook_cross_entropy(logits, targets):
    p = anp.exp(logits) / anp.sum(anp.exp(logits), axis=-1, keepdims=True)
    rows = [-anp.log(p[i, t]) for i, t in enumerate(targets) if t != -100]
    return sum(rows) / len(rows)


TARGETS = np.array([2, -100, 0, 4])
TEXTBOOK = {
    "linear": (linear, lambda x, w: anp.einsum("bti,oi->bto", x, w),
               (normal(2, 3, 4), normal(5, 4, seed=1))),
    "sigmoid": (sigmoid, lambda x: 1 / (1 + anp.exp(-x)), (normal(3, 4),)),
    "softplus": (softplus, lambda x: anp.log(1 + anp.exp(x)), (normal(3, 4),)),
    "silu": (silu, lambda x: x / (1 + anp.exp(-x)), (normal(3, 4),)),
    "softmax": (softmax, lambda x: anp.exp(x) / anp.sum(anp.exp(x), axis=-1, keepdims=True),
                (normal(3, 4),)),
    "rms_norm": (rms_norm, lambda x, w: w * x / anp.sqrt(
        anp.mean(x ** 2, axis=-1, keepdims=True) + 1e-5), (normal(2, 3, 4), normal(4, seed=1))),
    "l2_norm": (l2_norm, lambda x: x / anp.sqrt(anp.sum(x ** 2, axis=-1, keepdims=True) + 1e-6),
                (normal(2, 3, 4),)),
    "causal_conv": (causal_conv, textbook_conv,
                    (normal(2, 5, 3), normal(3, 1, 4, seed=1), normal(2, 3, 3, seed=2))),
    "cross_entropy": (lambda x: cross_entropy(x, TARGETS), lambda x: textbook_cross_entropy(
        x, TARGETS), (normal(4, 5),)),
}
PULLBACKS = {name: f.vjp for name, (f, _, _) in TEXTBOOK.items() if hasattr(f, "vjp")}
PULLBACKS["cross_entropy"] = lambda x: cross_entropy.vjp(x, TARGETS)


@pytest.mark.grad
@pytest.mark.parametrize("name", TEXTBOOK)
def test_agrees_with_a_textbook_form_differentiated_by_autograd(name):
    f, textbook, args = TEXTBOOK[name]
    value, pullback = PULLBACKS[name](*args)
    assert rel(f(*args), textbook(*args)) < 1e-13
    ct = normal(*np.shape(value), seed=9) if np.ndim(value) else 1.7
    got = [g for g in pullback(ct) if g is not None]
    assert len(got) == len(args)
    for i, a in enumerate(got):
        back, _ = make_vjp(textbook, i)(*args)
        assert rel(a, back(ct)) < 1e-12


@pytest.mark.grad
@pytest.mark.parametrize("f", POINTWISE + (softmax, l2_norm))
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_grad_of_functions_of_one_array(f, shape):
    check_grad(f, normal(*shape))
    check_grad(f, 20 * normal(*shape))


@pytest.mark.grad
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_grad_softmax_along_any_axis(axis):
    check_grad(softmax, normal(3, 4, 5), axis=axis)
    assert rel(softmax(normal(3, 4, 5), axis=axis).sum(axis), np.ones((3, 4, 5)).sum(axis) / (
        3, 4, 5)[axis]) < 1e-15


@pytest.mark.grad
def test_grad_linear():
    check_grad(linear, normal(2, 3, 4), normal(5, 4))
    check_grad(linear, normal(4), normal(5, 4))


@pytest.mark.grad
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.3])
def test_grad_norms(eps):
    check_grad(rms_norm, normal(2, 3, 4), normal(4), eps=eps)
    check_grad(l2_norm, normal(2, 3, 4), eps=eps)


@pytest.mark.grad
@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("w_shape", [(3, 1, 4), (3, 4), (3, 1, 1)])
def test_grad_causal_conv(T, w_shape):
    x, w, width = normal(2, T, 3), normal(*w_shape, seed=1), w_shape[-1]
    check_grad(causal_conv, x, w)
    check_grad(causal_conv, x, w, normal(2, width - 1, 3, seed=2))


@pytest.mark.grad
def test_grad_cross_entropy():
    check_grad(cross_entropy, normal(4, 5), TARGETS)
    check_grad(cross_entropy, 20 * normal(2, 3, 5), np.array([[0, 1, 2], [-100, 4, 3]]))


@pytest.mark.property
def test_registry_names_each_function_once_and_keeps_the_value_function():
    assert ops.REGISTRY["k3np.ops.sigmoid"] is sigmoid
    before = dict(ops.REGISTRY)
    try:
        @differentiable
        def double(x):
            """Twice x."""
            return 2 * x, lambda ct: (2 * ct,)
        assert double(3.0) == 6.0 and double.vjp(3.0)[1](1.0) == (2.0,)
        assert double.__doc__ == "Twice x." and double.__name__ == "double"
        added = set(ops.REGISTRY) - set(before)
        assert len(added) == 1 and added.pop().endswith("double")
    finally:
        ops.REGISTRY.clear()
        ops.REGISTRY.update(before)


@pytest.mark.property
@few
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3))
def test_unbroadcast_is_the_adjoint_of_broadcasting(shapes):
    """<broadcast(a), c> = <a, unbroadcast(c)> for every pair of shapes."""
    shape = shapes.input_shapes[0]
    a, c = normal(*shape), normal(*shapes.result_shape, seed=1)
    back = unbroadcast(c, shape)
    assert np.shape(back) == shape
    assert np.isclose((a * c).sum(), (a * back).sum())


@pytest.mark.property
@few
@given(vectors, st.floats(-5, 5))
def test_relations(x, shift):
    assert np.allclose(sigmoid(x) + sigmoid(-x), 1, atol=1e-15)
    assert np.allclose(softplus(x) - softplus(-x), x, atol=1e-13)
    assert np.allclose(softplus.vjp(x)[1](np.ones(6))[0], sigmoid(x), atol=1e-15)
    assert np.allclose(silu(x) - silu(-x), x, atol=1e-13)
    p = softmax(x)
    assert np.isclose(p.sum(), 1) and (p >= 0).all()
    assert np.allclose(softmax(x + shift), p, atol=1e-12)


@pytest.mark.property
@few
@given(vectors, st.floats(0.5, 100))
def test_norms_do_not_see_scale_and_have_unit_size(x, scale):
    x = x + 0.1 * np.sign(x) + 0.1                               # away from eps
    assert np.allclose(rms_norm(x * scale, np.ones(6), 0), rms_norm(x, np.ones(6), 0))
    assert np.isclose((rms_norm(x, np.ones(6), 0) ** 2).mean(), 1)
    assert np.isclose((l2_norm(x, 0) ** 2).sum(), 1)


@pytest.mark.traps
def test_eps_is_on_the_mean_in_one_norm_and_on_the_sum_in_the_other():
    """With 128 channels the two conventions differ by a factor 128 in eps."""
    x = 1e-3 * normal(2, 128)
    ones, root = np.ones(128), np.sqrt(128)
    assert rel(rms_norm(x, ones, eps=1e-6 / 128) / root, l2_norm(x, eps=1e-6)) < 1e-12
    assert rel(rms_norm(x, ones, eps=1e-6) / root, l2_norm(x, eps=1e-6)) > 0.1


@pytest.mark.property
@few
@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 5))
def test_causal_conv_streams_and_does_not_look_ahead(T1, T2, width):
    x, w = normal(2, T1 + T2, 3), normal(3, 1, width, seed=1)
    whole = causal_conv(x, w)
    past = np.concatenate([np.zeros((2, width - 1, 3)), x[:, :T1]], axis=1)
    state = past[:, past.shape[1] - (width - 1):]
    parts = [causal_conv(x[:, :T1], w), causal_conv(x[:, T1:], w, state)]
    assert np.allclose(np.concatenate(parts, axis=1), whole, atol=1e-14)
    other = x.copy()
    other[:, T1:] += 1                                           # the future changes
    assert np.array_equal(causal_conv(other, w)[:, :T1], whole[:, :T1])


@pytest.mark.property
def test_last_tap_multiplies_the_current_token():
    x = np.zeros((1, 6, 1))
    x[0, 2] = 1
    w = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    assert causal_conv(x, w)[0, :, 0].tolist() == [0, 0, 4, 3, 2, 1]


@pytest.mark.property
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1000.0, -1000.0])
def test_stable_far_out(dtype, size):
    """No overflow, no NaN, no warning, and the right limits, at +-1000 in both precisions."""
    x = np.array([size, -size, 0, 1], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for f in (*POINTWISE, softmax, l2_norm):
            y, pullback = f.vjp(x)
            (ct_x, *_) = pullback(np.ones_like(x))
            assert y.dtype == ct_x.dtype == dtype
            assert np.isfinite(y).all() and np.isfinite(ct_x).all()
        hi, lo = (0, 1) if size > 0 else (1, 0)
        assert sigmoid(x)[hi] == 1 and sigmoid(x)[lo] == 0 and sigmoid(x)[2] == 0.5
        assert softplus(x)[hi] == 1000 and softplus(x)[lo] == 0
        assert silu(x)[hi] == 1000 and silu(x)[lo] == 0
        assert softmax(x)[hi] == 1
        assert sigmoid(np.array([np.inf, -np.inf], dtype)).tolist() == [1, 0]
        loss, pullback = cross_entropy.vjp(np.stack([x, x]), np.array([hi, lo]))
        assert loss == 1000 and np.isfinite(pullback(dtype(1))[0]).all()
        y, pullback = rms_norm.vjp(x, np.ones(4, dtype))
        assert y.dtype == dtype and all(g.dtype == dtype for g in pullback(y)[:2])


@pytest.mark.property
def test_softmax_gives_masked_entries_an_exact_zero_and_no_gradient():
    p, pullback = softmax.vjp(np.array([[1.0, -np.inf, 2.0]]))
    assert p[0, 1] == 0 and pullback(np.ones((1, 3)))[0][0, 1] == 0


@pytest.mark.property
def test_cross_entropy_ignores_whatever_stands_at_an_ignored_position():
    logits = normal(3, 5)
    logits[1] = [np.nan, -np.inf, 1, 2, 3]
    value, pullback = cross_entropy.vjp(logits, np.array([1, -100, 2]))
    assert value == cross_entropy(logits[[0, 2]], np.array([1, 2]))
    assert (pullback(1.0)[0][1] == 0).all() and np.isfinite(pullback(1.0)[0]).all()


@pytest.mark.property
@pytest.mark.parametrize("name", TEXTBOOK)
def test_float32_stays_float32(name):
    f, textbook, args = TEXTBOOK[name]
    small = [a.astype(np.float32) for a in args]
    value, pullback = PULLBACKS[name](*small)
    assert value.dtype == np.float32
    assert all(g is None or g.dtype == np.float32 for g in pullback(value))
    assert rel(value, textbook(*args)) < 1e-5


def bf16_neighbourhood():
    """Every bfloat16 pattern and, after it, patterns just below, on and above the next tie."""
    top = np.arange(65536, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (top[:, None] | low).view(np.float32)


@pytest.mark.golden
def test_round_bf16_agrees_with_ml_dtypes_on_every_pattern_and_its_ties():
    x = bf16_neighbourhood()
    with np.errstate(invalid="ignore"):
        ours, judge = round_bf16(x), x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert ours.shape == x.shape and ours.dtype == np.float32
    assert np.array_equal(np.isnan(ours), np.isnan(judge))
    seen = ~np.isnan(judge)
    assert np.array_equal(ours[seen].view(np.uint32), judge[seen].view(np.uint32))   # signs too
    assert np.isnan(x).sum() == np.isnan(ours).sum() and np.isinf(ours).sum() > np.isinf(x).sum()


@pytest.mark.property
def test_round_bf16_is_idempotent_symmetric_and_keeps_dtype_and_shape():
    x = normal(50).astype(np.float32)
    once = round_bf16(x)
    assert np.array_equal(round_bf16(once), once) and np.array_equal(round_bf16(-x), -once)
    assert (np.abs(once - x) <= 2.0 ** -8 * np.abs(x)).all()
    assert round_bf16(x.astype(np.float64)).dtype == np.float64
    assert round_bf16(np.float64(1.00390625)).shape == ()
    assert round_bf16(x[::2]).shape == (25,)
    assert [float(round_bf16(v)) for v in (1 + 2 ** -8, 1 + 3 * 2 ** -8, -0.0)] == [
        1.0, 1 + 2 ** -6, 0.0]                                   # ties go to even
    assert np.signbit(round_bf16(np.float32(-0.0)))


@pytest.mark.errors
def test_check_shapes():
    assert check_shapes(a=(np.zeros((2, 3)), "B T"), b=(np.zeros(3), "T"), c=(None, "T")) == {
        "B": 2, "T": 3}
    assert check_shapes(a=(np.zeros((9, 8, 3)), "... T")) == {"T": 3}
    with pytest.raises(ValueError, match=r"b has shape \(4,\); expected \[T\] with T=3 \(from a\)"):
        check_shapes(a=(np.zeros((2, 3)), "B T"), b=(np.zeros(4), "T"))
    with pytest.raises(ValueError, match=r"a has shape \(2, 3\); expected \[B, T, C\]"):
        check_shapes(a=(np.zeros((2, 3)), "B T C"))
    with pytest.raises(ValueError, match=r"w has shape \(2, 3\); expected \[C, 4\]"):
        check_shapes(w=(np.zeros((2, 3)), "C 4"))
    with pytest.raises(ValueError, match=r"a has shape \(3, 4\); expected \[K, K\]"):
        check_shapes(a=(np.zeros((3, 4)), "K K"))


@pytest.mark.errors
def test_check_floats():
    check_floats(a=np.zeros(2), b=None, c=np.ones(3))
    with pytest.raises(ValueError, match="a has dtype int64.*astype"):
        check_floats(a=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="dtypes differ: a float32, b float64"):
        check_floats(a=np.zeros(2, np.float32), b=np.zeros(2))


@pytest.mark.errors
def test_messages_of_refused_inputs():
    x, w = np.zeros((2, 5, 3)), np.zeros((3, 1, 4))
    with pytest.raises(ValueError, match=r"x has shape \(2, 5, 2\).*C=3 \(from w\)"):
        causal_conv(x[..., :2], w)
    with pytest.raises(ValueError, match=r"state has shape \(2, 4, 3\); expected \[B, 3, C\]"):
        causal_conv(x, w, np.zeros((2, 4, 3)))
    with pytest.raises(ValueError, match=r"targets has shape \(3,\); expected \(2,\)"):
        cross_entropy(np.zeros((2, 5)), np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="nothing to average"):
        cross_entropy(np.zeros((2, 5)), np.array([-100, -100]))
    for bad in (5, -1):
        with pytest.raises(ValueError, match=rf"targets must lie in 0..4; found.*{bad}"):
            cross_entropy(np.zeros((2, 5)), np.array([bad, -100 if bad == 5 else 0]))
