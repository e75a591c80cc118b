"""Position table, frame rows and the two-dimensional rotation."""
import numpy as np
import pytest
import scipy.ndimage
from helpers import check_grad, rel
from hypothesis import given, settings
from hypothesis import strategies as st

from k3np.vision_positions import (
    bilinear_matrix,
    frame_table,
    positions,
    resize_table,
    rotate,
    rotation,
)

size = st.integers(1, 40)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def rotate_one(x, row, column):
    """A head's vector turned as the patch at (row, column) is, pair by pair."""
    y, K = np.empty_like(x), len(x)
    for m in range(K // 2):
        where, i = (column, m // 2) if m % 2 == 0 else (row, m // 2)
        angle = where * 10000.0 ** (-4 * i / K)
        e, o = x[2 * m], x[2 * m + 1]
        y[2 * m] = e * np.cos(angle) - o * np.sin(angle)
        y[2 * m + 1] = e * np.sin(angle) + o * np.cos(angle)
    return y


@pytest.mark.property
@settings(max_examples=50, deadline=None)
@given(size, size)
def test_bilinear_weights(n_out, n_in):
    weights = bilinear_matrix(n_out, n_in)
    assert weights.shape == (n_out, n_in) and weights.min() >= 0
    assert np.abs(weights.sum(axis=1) - 1).max() < 1e-12
    assert ((weights > 0).sum(axis=1) <= 2).all()
    assert np.abs(weights - weights[::-1, ::-1]).max() < 1e-12        # no side is preferred
    assert np.array_equal(bilinear_matrix(n_in, n_in), np.eye(n_in))


@pytest.mark.golden
@settings(max_examples=25, deadline=None)
@given(size, size, size, size)
def test_resize_agrees_with_scipys_interpolation(h, w, H, W):
    table = normal(H, W, 2)
    at = [(np.arange(n) + 0.5) * N / n - 0.5 for n, N in ((h, H), (w, W))]
    grid = np.meshgrid(*at, indexing="ij")
    for c in range(2):
        expected = scipy.ndimage.map_coordinates(table[..., c], grid, order=1, mode="nearest")
        assert np.abs(resize_table(table, h, w)[..., c] - expected).max() < 1e-12


@pytest.mark.property
def test_resize_keeps_a_plane_within_and_repeats_the_edge():
    ramp = np.arange(8.0)[:, None, None] * np.ones((8, 8, 1))
    resized = resize_table(ramp, 16, 8)[:, 0, 0]
    assert resized[:3].tolist() == [0, 0.25, 0.75] and resized[-1] == 7
    assert np.array_equal(resize_table(ramp, 8, 8), ramp)


@pytest.mark.property
def test_a_still_image_has_no_frame_row_and_a_clip_has_one_for_each_frame():
    table = normal(4, 5, 6)
    still, clip = positions(table, (1, 6, 8)), positions(table, (3, 6, 8))
    frames = clip.reshape(3, 48, 6) - still
    assert np.abs(frames - frame_table(3, 6)[:, None]).max() < 1e-15
    assert frame_table(3, 6)[0].tolist() == [0, 0, 0, 1, 1, 1]        # frame 0 of a clip adds ones
    f = frame_table(4, 1024)
    assert f[3, 0] == np.sin(3) and f[3, 512 + 256] == np.cos(3 * 10000 ** -0.5)


@pytest.mark.property
def test_rotation_turns_each_pair_as_written_out():
    grid, x = (2, 3, 4), normal(24, 2, 8)
    cos, sin = rotation(grid, 8)
    assert cos.shape == sin.shape == (24, 1, 4)
    y = rotate(x, cos, sin)
    for n in range(24):
        row, column = n % 12 // 4, n % 4
        for head in range(2):
            assert rel(y[n, head], rotate_one(x[n, head], row, column)) < 1e-14


@pytest.mark.property
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3),
       st.integers(0, 10 ** 6))
def test_rotation_keeps_length_and_a_score_sees_only_the_offset(h, w, down, across, seed):
    q, k = normal(2, 8, seed=seed)
    cos, sin = rotation((1, h + down, w + across), 8)
    cos, sin = (a.reshape(h + down, w + across, 4) for a in (cos, sin))

    def turned(x, row, column):
        return rotate(x[None, None], cos[row, column][None, None], sin[row, column][None, None])
    assert abs(np.linalg.norm(turned(q, h - 1, w - 1)) - np.linalg.norm(q)) < 1e-12
    here = (turned(q, 0, 0) * turned(k, down, across)).sum()
    there = (turned(q, h - 1, w - 1) * turned(k, h - 1 + down, w - 1 + across)).sum()
    assert abs(here - there) < 1e-11


@pytest.mark.grad
def test_grad():
    check_grad(resize_table, normal(5, 4, 3), 3, 7)
    check_grad(positions, normal(5, 4, 6), (1, 3, 2))
    check_grad(positions, normal(5, 4, 6), (3, 3, 2))
    check_grad(rotate, normal(6, 2, 8), *rotation((1, 2, 3), 8))


@pytest.mark.property
def test_float32_stays_float32():
    table = normal(4, 4, 6).astype(np.float32)
    for grid in ((1, 2, 6), (2, 2, 6)):
        y, pullback = positions.vjp(table, grid)
        assert y.dtype == np.float32 and pullback(y)[0].dtype == np.float32
