"""The error function and the two GELUs, against SciPy and by differences."""
import numpy as np
import pytest
import scipy.special
from helpers import check_grad, rel

from k3np.gelu import erf, gelu, gelu_tanh

POINTS = np.concatenate([np.linspace(-7, 7, 20_001), np.geomspace(1e-300, 1, 2_000)])
ALL = (erf, gelu, gelu_tanh)


@pytest.mark.golden
def test_erf_agrees_with_scipy():
    reference = scipy.special.erf(POINTS)
    assert np.abs(erf(POINTS) - reference).max() < 1e-15
    assert (np.abs(erf(POINTS) - reference) <= 1e-15 * np.abs(reference)).all()
    ends = erf(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0]))
    assert np.isnan(ends[0]) and ends[1:].tolist() == [1, -1, 0, 0] and np.signbit(ends[4])


@pytest.mark.golden
def test_gelu_agrees_with_scipys_normal_distribution():
    assert np.abs(gelu(POINTS) - POINTS * scipy.special.ndtr(POINTS)).max() < 1e-15


@pytest.mark.property
@pytest.mark.parametrize("f", ALL, ids=lambda f: f.__name__)
def test_shapes_and_dtypes(f):
    for shape in ((), (0, 3), (2, 3, 4)):
        assert np.shape(f(np.zeros(shape))) == shape
    x = np.linspace(-9, 9, 50, dtype=np.float32)
    y, pullback = f.vjp(x)
    assert y.dtype == np.float32 and pullback(y)[0].dtype == np.float32
    assert rel(y, f(x.astype(float))) < 1e-6
    assert np.array_equal(f(x[::2]), f(x)[::2])                        # a view that is not packed


@pytest.mark.property
def test_limits():
    for f in (gelu, gelu_tanh):
        assert f(np.array([-40.0, 0.0, 40.0])).tolist() == [0, 0, 40]
        x = np.linspace(0, 5, 101)
        assert np.abs(f(x) - f(-x) - x).max() < 1e-15                  # Φ(x) + Φ(-x) = 1


@pytest.mark.grad
@pytest.mark.parametrize("f", ALL, ids=lambda f: f.__name__)
def test_grad(f):
    check_grad(f, np.random.default_rng(0).normal(0, 2, (3, 5)))


@pytest.mark.traps
def test_the_two_gelus_differ_by_half_a_thousandth():
    gap = np.abs(gelu(POINTS) - gelu_tanh(POINTS)).max()
    assert 4e-4 < gap < 5e-4
