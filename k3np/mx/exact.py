"""What a block of an MX array is, written for reading: the definition that fast.py must equal.

The rules that choose a scale are integer arithmetic on the bits of the block's largest magnitude:
add a constant to the fraction, cut the fraction off, take the exponent that is left. A logarithm
in floating point misplaces the scale next to powers of two.
"""
import numpy as np

from k3np.mx.formats import E8M0_NAN, decode_e8m0, encode, values

RULES = ("floor", "even", "even175", "ceil", "rceil")


def check_rule(rule):
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}; known scale rules are {', '.join(RULES)}")


def increment(f, rule, width=23):
    """What a rule adds to a fraction of `width` bits before cutting it off.

    With amax = c 2^k, 1 <= c < 2, the exponent becomes k + 1 instead of k from some c on:
    never for floor; at the middle of the element's last step for even (half up), at 1.75 for
    even175; above 1 for ceil; above the fraction of the largest number for rceil, which makes
    rceil the smallest power of two that clips nothing.
    """
    one = 1 << width
    return {"floor": 0,
            "even": one >> (f.m_bits + 1),
            "even175": one >> 2,
            "ceil": one - 1,
            "rceil": 2 * one - 1 - int(f.max / 2.0 ** f.emax * one)}[rule]


def scale_bytes(amax, f, rule):
    """E8M0 byte of blocks from their largest magnitudes.

    Args: amax [...], float64, not negative; f, a Format; rule, one of RULES.
    Returns: uint8 [...]: 0 for zero and for anything whose scale would be below 2^-127, 254 for
        what would be above 2^127, 255 for infinity and NaN.
    """
    bits = np.ascontiguousarray(amax, np.float64).view(np.int64).reshape(np.shape(amax))
    exponent = ((bits + increment(f, rule, 52)) >> 52) - 1023 - f.emax
    byte = np.clip(exponent, -127, 127) + 127
    return np.where(np.isfinite(amax), byte, E8M0_NAN).astype(np.uint8)


def encode_blocks(blocks, f, rule, rounding="even", rng=None):
    """Codes and scale bytes of blocks along the last axis, without a shortcut.

    Args: blocks [..., block], floats; f, a Format; rule; rounding, rng as in `encode`.
    Returns: codes uint8 [..., block]; scales uint8 [...]. A block with NaN or infinity has the
        scale 255 and codes of zero.
    """
    blocks = np.asarray(blocks, np.float64)
    amax = np.abs(blocks).max(axis=-1)                          # [..., block] -> [...], NaN passes
    scales = scale_bytes(amax, f, rule)
    bad = scales == E8M0_NAN
    unit = np.where(bad[..., None], 0.0, blocks)
    shift = np.where(bad, 0, 127 - scales.astype(np.int32))
    scaled = np.ldexp(unit, shift[..., None])                   # exact: float64 has the room
    return encode(scaled, f, rounding, rng), scales


def decode_blocks(codes, scales, f):
    """float64 values of codes [..., block] under scale bytes [...]."""
    scale = decode_e8m0(scales, np.float64)[..., None]
    return values(f)[codes].astype(np.float64) * scale
