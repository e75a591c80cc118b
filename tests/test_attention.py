"""Softmax attention in tiles against one matrix of scores."""
import tracemalloc

import numpy as np
import pytest
from helpers import check_grad, rel
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.attention import attention, attention_slow

TWINS = (attention_slow, attention)


def random_qkv(T, S, seed=0, B=2, H=3, K=4, V=5, size=1.0, G=None):
    rng = np.random.default_rng(seed)
    return (size * rng.standard_normal((B, T, H, K)), size * rng.standard_normal((B, S, G or H, K)),
            rng.standard_normal((B, S, G or H, V)))


@pytest.mark.property
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 13), st.integers(0, 13), st.booleans(), st.integers(1, 15),
       st.sampled_from((1.0, 30.0)), st.integers(0, 10 ** 6), st.sampled_from((1, 2, 4)),
       st.booleans())
def test_tiles_equal_one_matrix_backwards_too(T, more, causal, block, size, seed, G, padded):
    q, k, v = random_qkv(T, T + more, seed, size=size, H=4, G=G)
    pad = np.random.default_rng(seed).integers(0, T + more + 1, 2) if padded else None
    (slow, pull_slow), (tiled, pull) = (f.vjp(q, k, v, 0.7, causal, block, pad) for f in TWINS)
    assert np.abs(tiled - slow).max() < 1e-12
    ct = np.random.default_rng(seed + 1).standard_normal(slow.shape)
    for a, b in zip(pull(ct)[:3], pull_slow(ct)[:3]):
        assert np.abs(a - b).max() < 1e-11 * max(1, np.abs(b).max())


@pytest.mark.property
@pytest.mark.parametrize("f", TWINS, ids=lambda f: f.__name__)
def test_is_the_definition(f):
    q, k, v = random_qkv(3, 7)
    for causal in (True, False):
        o = f(q, k, v, 0.5, causal, 2)
        for b, i, h in np.ndindex(2, 3, 3):
            seen = 7 - 3 + i + 1 if causal else 7
            weights = np.exp(0.5 * k[b, :seen, h] @ q[b, i, h])
            assert rel(o[b, i, h], weights / weights.sum() @ v[b, :seen, h]) < 1e-12


@pytest.mark.property
@pytest.mark.parametrize("f", TWINS, ids=lambda f: f.__name__)
def test_causal_does_not_look_ahead_and_continues_a_prefix(f):
    q, k, v = random_qkv(9, 9)
    whole = f(q, k, v, 1.0, True, 4)
    assert rel(f(q[:, 6:], k, v, 1.0, True, 4), whole[:, 6:]) < 1e-12
    k2, v2 = k.copy(), v.copy()
    k2[:, 6:] += 1
    v2[:, 6:] += 1
    assert np.array_equal(f(q, k2, v2, 1.0, True, 4)[:, :6], whole[:, :6])
    order = np.random.default_rng(0).permutation(9)
    mixed = f(q, k[:, order], v[:, order], 1.0, False, 4)
    assert rel(mixed, f(q, k, v, 1.0, False, 4)) < 1e-12


@pytest.mark.property
@pytest.mark.parametrize("f", TWINS, ids=lambda f: f.__name__)
def test_padding_is_as_if_it_were_not_there(f):
    q, k, v = random_qkv(9, 9)
    pad = np.array([4, 0])
    o, pullback = f.vjp(q, k, v, 1.0, True, 2, pad)
    ct = pullback(np.ones_like(o))[:3]
    for b, n in enumerate(pad):
        alone, pull = f.vjp(*(a[b:b + 1, n:] for a in (q, k, v)), 1.0, True, 2)
        assert rel(o[b:b + 1, n:], alone) < 1e-12 and not o[b, :n].any()
        for whole, part in zip(ct, pull(np.ones_like(alone))):
            assert np.abs(whole[b:b + 1, n:] - part).max() < 1e-12 and not whole[b, :n].any()


@pytest.mark.property
@pytest.mark.parametrize("f", TWINS, ids=lambda f: f.__name__)
def test_shared_keys_are_repeated_keys(f):
    q, k, v = random_qkv(5, 8, H=6, G=2)
    k6, v6 = np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2)
    (o, pull), (o6, pull6) = f.vjp(q, k, v, 1.0, True, 3), f.vjp(q, k6, v6, 1.0, True, 3)
    assert rel(o, o6) < 1e-12
    ct_q, ct_k, ct_v, *_ = pull(o)
    ct_q6, ct_k6, ct_v6, *_ = pull6(o)
    assert rel(ct_q, ct_q6) < 1e-12
    assert rel(ct_k, ct_k6.reshape(2, 8, 2, 3, 4).sum(axis=3)) < 1e-12
    assert rel(ct_v, ct_v6.reshape(2, 8, 2, 3, 5).sum(axis=3)) < 1e-12


@pytest.mark.property
@pytest.mark.parametrize("f", TWINS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_scores_and_dtypes(f, dtype):
    q, k, v = (a.astype(dtype) for a in random_qkv(6, 6, size=1e4))
    o, pullback = f.vjp(q, k, v, 1.0, True, 2)
    grads = pullback(o)
    assert o.dtype == dtype and all(g.dtype == dtype for g in grads[:3])
    assert np.isfinite(o).all() and all(np.isfinite(g).all() for g in grads[:3])
    assert np.abs(o).max() <= np.abs(v).max() * (1 + 1e-5)


@pytest.mark.property
def test_tiles_hold_no_square():
    n = 2000
    q, k, v = (a.astype(np.float32) for a in random_qkv(n, n, B=1, H=1))
    peaks = {}
    for f in TWINS:
        tracemalloc.start()
        o, pullback = f.vjp(q, k, v, 0.5, True, 128)
        pullback(o)
        peaks[f] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[attention_slow] > 4 * n * n
    assert peaks[attention] < 4 * n * n / 8


@pytest.mark.grad
@pytest.mark.parametrize("causal", [True, False])
def test_grad(causal):
    q, k, v = random_qkv(4, 7)
    check_grad(attention_slow, q, k, v, 0.7, causal)
    check_grad(attention, q, k, v, 0.7, causal, 3)
    q, k, v = random_qkv(4, 7, H=4, G=2)
    check_grad(attention_slow, q, k, v, 0.7, causal, None, np.array([5, 1]))
    check_grad(attention, q, k, v, 0.7, causal, 3, np.array([5, 1]))


@pytest.mark.errors
@pytest.mark.parametrize("f", TWINS, ids=lambda f: f.__name__)
def test_messages(f):
    q, k, v = random_qkv(4, 3)
    with pytest.raises(ValueError, match=r"q has shape \(2, 4, 3, 4\) and k \(2, 3, 3, 4\)"):
        f(q, k, v, 1.0)
    with pytest.raises(ValueError, match="any attention needs one"):
        f(q, k[:, :0], v[:, :0], 1.0, False)
    with pytest.raises(ValueError, match=r"v has shape \(2, 2, 3, 5\).*S=3 \(from k\)"):
        f(q, k, v[:, :2], 1.0, False)
    with pytest.raises(ValueError, match="dtypes differ"):
        f(q, k, v.astype(np.float32), 1.0, False)
    with pytest.raises(ValueError, match="heads of k that divide those of q"):
        f(*random_qkv(3, 3, H=4, G=3), 1.0)
    for pad in ([1], [-1, 0], [0, 4], [0.0, 1.0]):
        with pytest.raises(ValueError, match=r"pad is .* how many keys are padding, 0..3"):
            f(q, k, v, 1.0, False, 2, np.array(pad))
