"""Where a patch stands: a learned table of any size, the frame number, rotation in two directions.

The table is added to a patch once, before the first block. The rotation turns queries and keys in
every block, so that a score depends on how far apart two patches are.
"""
import numpy as np

from k3np.ops import differentiable


def bilinear_matrix(n_out, n_in):
    """Weights that resize an axis linearly: pixel centres at i + 1/2, edges repeated.

    Output i reads the input at (i + 1/2) n_in / n_out - 1/2, held within 0..n_in-1. The identity
    when the sizes agree. No smoothing when it shrinks.

    Returns: [n_out, n_in], rows of at most two entries that sum to one.
    Source: torch interpolate, bilinear, align_corners=False, antialias=False.
    """
    at = np.clip((np.arange(n_out) + 0.5) * (n_in / n_out) - 0.5, 0, n_in - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(n_in)))


@differentiable
def resize_table(table, h, w):
    """Resize the learned position table to a grid, linear in each direction.

    Args: table [H,W,D]; h, w in patches. Returns: [h,w,D].
    """
    down = bilinear_matrix(h, table.shape[0]).astype(table.dtype)        # [h,H]
    across = bilinear_matrix(w, table.shape[1]).astype(table.dtype)      # [w,W]
    resized = across @ np.tensordot(down, table, 1)                      # [h,W,D] -> [h,w,D]
    return resized, lambda ct: (np.tensordot(down.T, across.T @ ct, 1), None, None)


def frame_table(t, D):
    """Sine and cosine of the frame number, [t,D]: frequencies 10000^(-2i/D), sines first."""
    angle = np.arange(t)[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


@differentiable
def positions(table, grid):
    """What is added to a medium's patches: the resized table, in a clip plus the frame's row.

    A single frame gets no frame row; frame 0 of a clip does, and its cosines are ones.

    Args: table [H,W,D]; grid (t, h, w). Returns: [t*h*w,D].
    """
    t, h, w = grid
    plane, pull = resize_table.vjp(table, h, w)
    D = table.shape[-1]
    y = np.broadcast_to(plane, (t, h, w, D))
    if t > 1:
        y = y + frame_table(t, D).astype(table.dtype)[:, None, None]
    return (y.reshape(-1, D),
            lambda ct: (pull(ct.reshape(t, h, w, D).sum(axis=0))[0], None))


def rotation(grid, K):
    """Cosine and sine by which the pairs of a head are turned, [t*h*w,1,K/2] each.

    Pair 2i turns by column * θ_i, pair 2i+1 by row * θ_i, with θ_i = 10000^(-4i/K); every frame
    alike.
    """
    t, h, w = grid
    theta = 10000.0 ** (-4 * np.arange(K // 4) / K)
    row, column = np.indices((h, w)).reshape(2, -1, 1) * theta           # [h*w,K/4] each
    angle = np.stack([column, row], axis=-1).reshape(h * w, 1, K // 2)
    angle = np.tile(angle, (t, 1, 1))
    return np.cos(angle), np.sin(angle)


@differentiable
def rotate(x, cos, sin):
    """Turn each pair of neighbouring channels. x [N,H,K]; cos, sin [N,1,K/2] -> [N,H,K]."""
    def turn(a, s):
        even, odd, y = a[..., ::2], a[..., 1::2], np.empty_like(a)
        y[..., ::2], y[..., 1::2] = even * cos - odd * s, even * s + odd * cos
        return y
    return turn(x, sin), lambda ct: (turn(ct, -sin), None, None)
