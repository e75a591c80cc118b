"""The two numbers of a wire, fitted to times that somebody measured, and how far off they are."""
import numpy as np


def fit_alpha_beta(n_bytes, time_s):
    """The fixed time and the bandwidth whose relative errors have the least squares.

    t = a + n / B.

    Args: n_bytes [M], time_s [M], at least two sizes.
    Returns: (alpha_s, bytes_per_s).
    Raises: ValueError for fewer than two sizes, or times that do not grow with the size.
    """
    n, t = np.asarray(n_bytes, float), np.asarray(time_s, float)
    if n.shape != t.shape or len(np.unique(n)) < 2 or not (t > 0).all():
        raise ValueError(f"n_bytes {n.shape}, time_s {t.shape}: give times above zero for at least "
                         "two sizes")
    (a, slope), *_ = np.linalg.lstsq(np.stack([1 / t, n / n.max() / t], 1), np.ones(len(t)),
                                     rcond=None)
    if slope <= 0:
        raise ValueError("time_s does not grow with n_bytes: no bandwidth fits it")
    return float(a), float(n.max() / slope)


def relative_errors(n_bytes, time_s, alpha_s, bytes_per_s):
    """(model - measured) / measured, one a size. [M]"""
    return (alpha_s + np.asarray(n_bytes, float) / bytes_per_s) / np.asarray(time_s, float) - 1


def leave_one_out(n_bytes, time_s):
    """The error at each size of a fit that has not seen it; the ends are extrapolated. [M]"""
    n, t = np.asarray(n_bytes, float), np.asarray(time_s, float)
    keep = ~np.eye(len(n), dtype=bool)
    return np.array([relative_errors(n[i], t[i], *fit_alpha_beta(n[keep[i]], t[keep[i]]))
                     for i in range(len(n))])
