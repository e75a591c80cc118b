"""Products of MX arrays: exact inside a block, accumulated between blocks as you choose.

The specification's product of two blocks is X_a X_b sum_i P_ai P_bi, and that of two vectors is
the sum over their blocks; how it is accumulated is left to the machine. The products P_ai P_bi are
integers in units of the two formats' last places, so float64 holds a block's sum exactly for every
pair of formats but E5M2 with E5M2 (see `sum_bits`).
"""
from fractions import Fraction

import numpy as np

from k3np.mx.formats import decode_e8m0, find, values
from k3np.mx.quantize import quantize

ACCUMULATE = ("float64", "float32", "exact")


def sum_bits(fmt_a, fmt_b, block=32):
    """Bits that a block's sum of products can need, the sign left out.

    float32 holds 24 of them and float64 holds 53.
    """
    a, b = find(fmt_a), find(fmt_b)
    last = a.emin - a.m_bits + b.emin - b.m_bits                     # exponent of the last place
    return int(Fraction(a.max * b.max * block) / Fraction(2) ** last).bit_length()


def block_dots(a, b):
    """The scaled sum of products of each pair of blocks.

    Args: a, b, MXArrays of one shape [..., I], blocked alike along the last axis.
    Returns: float64 [..., n_blocks], exact unless sum_bits is above 53.
    Raises: ValueError for shapes or blocks that do not fit.
    """
    _check(a, b)
    if a.shape != b.shape:
        raise ValueError(f"a has shape {a.shape} and b {b.shape}; give one shape, or use matmul")
    (pa, sa), (pb, sb) = _parts(a), _parts(b)
    return (pa * pb).sum(axis=-1) * sa * sb                          # [..., G, 32] -> [..., G]


def dot(a, b, accumulate="float64"):
    """Dot product along the last axis: MXArrays a, b [..., I] -> [...]. Else like `matmul`."""
    _check_accumulate(accumulate)
    parts = block_dots(a, b)
    total = _add(np.moveaxis(parts, -1, 0), accumulate, a.shape[:-1])
    return total if accumulate != "exact" else _exact(_integers(a), _integers(b), a, b, total)


def matmul(x, w, accumulate="float64"):
    """x Wᵀ for MX arrays blocked along the axis that is summed over.

    Blocks are added one after another in the order of the axis, so the result does not depend on
    the machine.

    Args: x, an MXArray [..., I]; w, an MXArray [O, I]; accumulate: "float64"; "float32", where
        each block's sum is rounded to float32 and added in float32; or "exact", where the whole
        sum is rounded once, to float64 (with Python's integers, slow).
    Returns: y [..., O], float32 for "float32", else float64; NaN where a block is NaN.
    Raises: ValueError for an unknown choice, and for shapes or blocks that do not fit.
    Source: OCP Microscaling Formats 1.0, §6.1 and §6.2.
    """
    _check_accumulate(accumulate)
    _check(x, w)
    if len(w.shape) != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(f"w has shape {w.shape}; expected [O, {x.shape[-1]}] for x of shape "
                         f"{x.shape}")
    (px, sx), (pw, sw) = _parts(x), _parts(w)                        # [..., G, 32], [..., G]
    products = (px[..., g, :] @ pw[:, g].T * sx[..., g, None] * sw[:, g]
                for g in range(sw.shape[1]))                         # each [..., 32] -> [..., O]
    total = _add(products, accumulate, (*x.shape[:-1], w.shape[0]))
    if accumulate != "exact":
        return total
    left, right = _integers(x)[..., None, :, :], _integers(w)        # [..., 1, G, 32], [O, G, 32]
    return _exact(left, right, x._replace(scales=x.scales[..., None, :]), w, total)


def linear_mx(x, w, fmt="e4m3", rule="floor", accumulate="float64"):
    """A linear map as Kimi K3's experts have it: MXFP4 weights, activations rounded to MXFP8.

    Args: x [..., I], floats; w, an MXArray [O, I]; fmt, rule for the activations, which neither
        the report nor the checkpoint fixes; accumulate, see `matmul`.
    Returns: y [..., O].
    Source: report §4.1.4 for the pair of formats.
    """
    return matmul(quantize(x, fmt, rule, axis=-1, block=w.block), w, accumulate)


def _parts(mx):
    """Elements [..., G, block] and scales [..., G], both float64."""
    elements = values(mx.fmt)[mx.codes].astype(np.float64)
    return (elements.reshape(*mx.scales.shape, mx.block), decode_e8m0(mx.scales, np.float64))


def _integers(mx):
    """Elements [..., G, block] in units of the format's last place, as Python's integers."""
    f = find(mx.fmt)
    elements = np.nan_to_num(_parts(mx)[0], nan=0, posinf=0, neginf=0)
    return np.ldexp(elements, f.m_bits - f.emin).astype(np.int64).astype(object)


def _add(parts, accumulate, shape):
    dtype = np.float32 if accumulate == "float32" else np.float64
    total = np.zeros(shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):               # float32 may end at infinity
        for part in parts:
            total = total + part.astype(dtype)
    return total


def _exact(left, right, a, b, total):
    """Sum of all products, rounded once; where `total` is not finite, that.

    left, right: integers that broadcast, [..., G, block]; a, b, with scales that broadcast too.
    """
    f, g = find(a.fmt), find(b.fmt)
    shift = a.scales.astype(np.int64) + b.scales.astype(np.int64)    # both biased by 127
    sums = (left * right).sum(axis=-1)                               # [..., G]
    sums = (sums * 2 ** shift.astype(object)).sum(axis=-1)
    unit = Fraction(2) ** (f.emin - f.m_bits + g.emin - g.m_bits - 2 * 127)
    sums = np.asarray(sums, object)
    exact = np.array([float(n * unit) for n in sums.ravel()], np.float64).reshape(sums.shape)
    return np.where(np.isfinite(total), exact, total)


def _check_accumulate(accumulate):
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate={accumulate!r}; known are {', '.join(ACCUMULATE)}")


def _check(a, b):
    for mx in (a, b):
        if mx.axis != len(mx.shape) - 1:
            raise ValueError(f"an array of shape {mx.shape} is blocked along axis {mx.axis}; a dot "
                             "product runs along the last: quantise along axis=-1")
    if a.block != b.block:
        raise ValueError(f"blocks of {a.block} and of {b.block}; give both the same")
