"""SiTU-GLU: golden vectors, bounds, limits, gradients, and the variants that must be caught."""
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import check_grad, rel
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from k3np import situ
from k3np.ops import sigmoid
from k3np.situ import clamped_swiglu, glu, mlp, situ_glu, soft_cap, swiglu
from k3np.vectors import golden

CASES = ("situ_0", "situ_1", "situ_3")           # ordinary, huge, and huge with up uncapped
UNITS = (glu, swiglu, clamped_swiglu, situ_glu)
any_float = st.floats(-1e6, 1e6)
arrays = hnp.arrays(np.float64, 7, elements=any_float)


def read(name):
    case = golden(name)
    gate, up = np.split(case["x"], 2, axis=-1)
    caps = {key: case["meta"][key] for key in ("beta", "linear_beta")}
    return case, gate, up, caps


def random_mlp(rng, d=6, inter=9):
    shapes = {"gate_proj": (inter, d), "up_proj": (inter, d), "down_proj": (d, inter)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def config(act="situ", beta=4.0, linear_beta=25.0):
    return SimpleNamespace(hidden_act=act, activation_situ_beta=beta,
                           activation_situ_linear_beta=linear_beta)


@pytest.mark.golden
@pytest.mark.grad
@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case, gate, up, caps = read(name)
    y, pullback = situ_glu.vjp(gate, up, **caps)
    assert rel(y, case["y"]) < 1e-10
    ct_gate, ct_up, *choices = pullback(case["ct_y"])
    assert choices == [None, None]
    assert rel(np.concatenate([ct_gate, ct_up], axis=-1), case["grad_x"]) < 1e-10


@pytest.mark.traps
@pytest.mark.golden
@pytest.mark.parametrize("name", CASES)
def test_golden_rejects_a_sigmoid_of_the_capped_gate(name):
    case, gate, up, caps = read(name)
    capped = soft_cap(gate, caps["beta"])
    value = up if caps["linear_beta"] is None else soft_cap(up, caps["linear_beta"])
    assert rel(capped * sigmoid(gate) * value, case["y"]) < 1e-10
    assert rel(capped * sigmoid(capped) * value, case["y"]) > 1e-3


@pytest.mark.traps
@pytest.mark.golden
def test_golden_rejects_other_misreadings():
    case, gate, up, caps = read("situ_1")
    beta, linear_beta = caps["beta"], caps["linear_beta"]
    for wrong in (swiglu(gate, up),                                         # no caps at all
                  clamped_swiglu(gate, up, beta, linear_beta),              # hard caps
                  situ_glu(gate, up, linear_beta, beta),                    # caps exchanged
                  situ_glu(up, gate, beta, linear_beta),                    # halves exchanged
                  soft_cap(gate * sigmoid(gate), beta) * soft_cap(up, linear_beta),
                  soft_cap(swiglu(gate, up), beta * linear_beta)):          # the product capped
        assert rel(wrong, case["y"]) > 1e-3


@pytest.mark.property
@settings(max_examples=50, deadline=None)
@given(arrays, arrays, st.floats(0.5, 50), st.floats(0.5, 50))
def test_bounded_finite_and_signed_like_swiglu(gate, up, beta, linear_beta):
    y, pullback = situ_glu.vjp(gate, up, beta, linear_beta)
    limit = situ.bound(beta, linear_beta)
    assert np.isfinite(y).all() and np.abs(y).max() <= limit * (1 + 1e-15)
    assert (np.abs(y) <= np.abs(swiglu(gate, up)) * (1 + 1e-12)).all()      # caps only shrink
    ct_gate, ct_up = pullback(np.ones_like(y))[:2]
    assert np.abs(ct_gate).max() <= 1.3 * linear_beta                       # so are the slopes
    assert np.abs(ct_up).max() <= beta * (1 + 1e-15)


@pytest.mark.property
def test_k3_bound_is_100_and_below_the_e4m3_maximum():
    big = np.float32([1e4, 3e38])
    assert situ.bound() == 100 and situ_glu(big, big).tolist() == [100, 100]
    assert situ.bound() < 448
    assert situ.bound(linear_beta=None) == np.inf
    assert np.isfinite(situ_glu(-big, big)).all()


@pytest.mark.property
@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float64, 5, elements=st.floats(-3, 3)),
       hnp.arrays(np.float64, 5, elements=st.floats(-3, 3)))
def test_equals_swiglu_for_large_caps_and_to_third_order(gate, up):
    assert np.abs(situ_glu(gate, up, 1e6, 1e6) - swiglu(gate, up)).max() < 1e-10
    small = 1e-3
    assert np.abs(situ_glu(small * gate, small * up) - swiglu(small * gate, small * up)
                  ).max() < 1e-9 * small
    assert np.abs(soft_cap(gate, 4.0) - gate).max() <= (np.abs(gate) ** 3).max() / 48 + 1e-15


@pytest.mark.property
@settings(max_examples=50, deadline=None)
@given(arrays, arrays)
def test_soft_cap_is_odd_and_increasing(x, y):
    assert np.array_equal(soft_cap(-x, 4.0), -soft_cap(x, 4.0))
    low, high = np.minimum(x, y), np.maximum(x, y)
    assert (soft_cap(low, 4.0) <= soft_cap(high, 4.0)).all()


@pytest.mark.property
def test_the_hard_clamp_has_no_slope_where_the_soft_cap_has_one():
    gate, up = np.array([8.0]), np.array([40.0])
    hard = clamped_swiglu.vjp(gate, up)[1](np.ones(1))[:2]
    soft = situ_glu.vjp(gate, up)[1](np.ones(1))[:2]
    assert hard[0] == 0 and hard[1] == 0
    assert soft[0] > 0 and soft[1] > 0


@pytest.mark.property
@pytest.mark.parametrize("unit", UNITS, ids=lambda f: f.__name__)
def test_float32_stays_float32(unit):
    x = np.linspace(-9, 9, 8, dtype=np.float32)
    y, pullback = unit.vjp(x, x)
    assert y.dtype == np.float32 and pullback(y)[0].dtype == np.float32
    assert rel(y, unit(x.astype(float), x.astype(float))) < 1e-6


@pytest.mark.grad
def test_gradients():
    rng = np.random.default_rng(0)
    gate, up = 5 * rng.standard_normal((2, 3, 4)), 20 * rng.standard_normal((2, 3, 4))
    check_grad(soft_cap, gate, 4.0)
    check_grad(situ_glu, gate, up)
    check_grad(situ_glu, gate, up, 2.0, None)
    check_grad(glu, gate, up)
    check_grad(swiglu, gate, up)
    check_grad(clamped_swiglu, gate, up)
    x = rng.standard_normal((2, 3, 6))
    check_grad(mlp, x, random_mlp(rng), config())
    check_grad(mlp, x, random_mlp(rng), config("silu"))


@pytest.mark.property
def test_mlp_is_the_formula():
    rng = np.random.default_rng(1)
    x, p = rng.standard_normal((2, 3, 6)), random_mlp(rng)
    gate, up = x @ p["gate_proj"].T, x @ p["up_proj"].T
    for cfg, hidden in ((config(), situ_glu(gate, up)), (config("silu"), swiglu(gate, up)),
                        (config(linear_beta=None), situ_glu(gate, up, 4.0, None))):
        assert rel(mlp(x, p, cfg), hidden @ p["down_proj"].T) < 1e-14
    single = {key: w.astype(np.float32) for key, w in p.items()}
    assert mlp(x.astype(np.float32), single, config()).dtype == np.float32


@pytest.mark.errors
def test_errors():
    x = np.zeros((2, 3))
    for unit in UNITS:
        with pytest.raises(ValueError, match=r"gate has shape \(2, 3\) and up \(3, 2\)"):
            unit(x, x.T)
    for cap in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="positive, finite"):
            situ_glu(x, x, beta=cap)
        with pytest.raises(ValueError, match="positive, finite"):
            situ_glu(x, x, linear_beta=cap)
    with pytest.raises(ValueError, match="beta=None"):
        clamped_swiglu(x, x, None)
    p = random_mlp(np.random.default_rng(0))
    with pytest.raises(ValueError, match="gate_proj has shape"):
        mlp(np.zeros((2, 5)), p, config())
    with pytest.raises(ValueError, match="hidden_act='relu'"):
        mlp(np.zeros((2, 6)), p, config("relu"))
    with pytest.raises(ValueError, match="dtypes differ"):
        mlp(np.zeros((2, 6), np.float32), p, config())
