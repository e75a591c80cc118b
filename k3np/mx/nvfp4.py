"""NVFP4, for contrast: E2M1 in blocks of 16, an E4M3 scale for each, a float32 for the array.

A finer scale than a power of two wastes less of the four bits. It costs half a bit a number more
than none, a quarter more than MXFP4's, a range that the array's float32 has to place, and a
division that is not exact.
"""
from typing import NamedTuple

import numpy as np

from k3np.mx.formats import E2M1, E4M3, check_float, decode, encode

BLOCK = 16
LARGEST = E2M1.max * E4M3.max                       # 2688, the reach of a block without the float32


class NVFP4Array(NamedTuple):
    """Codes uint8 [.., n], E4M3 scale codes uint8 [.., n/16], float32 tensor scale."""
    codes: np.ndarray
    scales: np.ndarray
    tensor_scale: np.float32


def quantize_nvfp4(x, tensor_scale=None):
    """Encode along the last axis in NVFP4.

    With g the tensor scale, a block's scale is s = E4M3(amax / 6 / g) and its elements are
    E2M1(x / (g s)); a block whose scale rounds to zero becomes zeros.

    Args: x [.., n], finite floats, n a multiple of 16; tensor_scale, g; None takes the largest
        magnitude over 2688, so that no scale exceeds E4M3's 448; 1.0 shows what happens without.
    Returns: NVFP4Array.
    Raises: ValueError for NaN or infinity, a length that 16 does not divide, g <= 0.
    Departs: the quotients are formed in float64; kernels form them in float32.
    """
    x = check_float("x", x).astype(np.float64)
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x has shape {x.shape}; the last axis must be a multiple of {BLOCK}")
    if not np.isfinite(x).all():
        raise ValueError("x holds NaN or infinity, for which NVFP4 has no code")
    g = np.float32(np.abs(x).max(initial=0) / LARGEST if tensor_scale is None else tensor_scale)
    if tensor_scale is None and g == 0:
        g = np.float32(1)
    if not 0 < g < np.inf:
        raise ValueError(f"tensor_scale={tensor_scale}; expected a positive, finite number")
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)                     # [.., n] -> [.., G, 16]
    scales = encode(np.abs(blocks).max(axis=-1) / E2M1.max / float(g), E4M3)
    unit = decode(scales, E4M3, np.float64)[..., None] * float(g)
    scaled = np.divide(blocks, unit, out=np.copysign(0.0, blocks), where=unit > 0)
    return NVFP4Array(encode(scaled, E2M1).reshape(x.shape), scales, g)


def dequantize_nvfp4(nv, dtype=np.float32):
    """Decode: element times block scale times tensor scale. NVFP4Array -> [.., n]."""
    scale = decode(nv.scales, E4M3, np.float64) * float(nv.tensor_scale)
    blocks = decode(nv.codes, E2M1, np.float64).reshape(*nv.scales.shape, BLOCK)
    return (blocks * scale[..., None]).reshape(nv.codes.shape).astype(dtype)
