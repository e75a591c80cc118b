"""Small number formats, exactly: every code's value, and the nearest code of a number.

An element is a sign, a few bits of exponent and a few of fraction. With magnitude bits
`exponent field E` and `fraction F` of m bits its value is

    (2^m + F) 2^(E - 1 + emin - m)   for E > 0,        F 2^(emin - m)   for E = 0 (subnormal).

INT8 fits the same reading: one exponent bit, six of fraction, and two's complement for the sign.
Encoding works on the bits of float64, which holds float16, bfloat16 and float32 exactly, so that
nothing is rounded twice.
"""
import functools
from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """An element format of the OCP Microscaling set."""
    name: str
    n_bits: int
    m_bits: int                     # bits of fraction
    emin: int                       # exponent of the smallest normal number
    emax: int                       # exponent of the largest power of two
    max_code: int                   # code of the largest finite number
    max: float                      # the largest finite number
    nan: int | None = None          # a code for NaN, if there is one
    inf: int | None = None          # the code for infinity, if there is one
    twos_complement: bool = False


E2M1 = Format("e2m1", 4, 1, 0, 2, 0x7, 6.0)
E2M3 = Format("e2m3", 6, 3, 0, 2, 0x1F, 7.5)
E3M2 = Format("e3m2", 6, 2, -2, 4, 0x1F, 28.0)
E4M3 = Format("e4m3", 8, 3, -6, 8, 0x7E, 448.0, nan=0x7F)
E5M2 = Format("e5m2", 8, 2, -14, 15, 0x7B, 57344.0, nan=0x7F, inf=0x7C)
INT8 = Format("int8", 8, 6, 0, 0, 0x7F, 1.984375, twos_complement=True)
FORMATS = {f.name: f for f in (E2M1, E2M3, E3M2, E4M3, E5M2, INT8)}

E8M0_NAN = 255                      # the scale: 2^(byte - 127), no sign, no zero
FLOATS = ("float16", "bfloat16", "float32", "float64")


def find(fmt):
    """The Format for a name such as "e2m1"; a Format passes. Raises: ValueError with the list."""
    if isinstance(fmt, Format):
        return fmt
    if fmt not in FORMATS:
        raise ValueError(f"fmt={fmt!r}; known element formats are {', '.join(FORMATS)}")
    return FORMATS[fmt]


def check_float(name, x):
    """`x` as an array if it is float16, bfloat16, float32 or float64; else ValueError."""
    x = np.asarray(x)
    if x.dtype.name not in FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}; expected {', '.join(FLOATS[:3])} or float64"
                         f": convert it, for example with {name}.astype(np.float32)")
    return x


def check_rounding(rounding, rng):
    """Raise ValueError unless the rounding is known and has the generator that it needs."""
    if rounding not in ("even", "stochastic"):
        raise ValueError(f"rounding={rounding!r}; known are 'even' (nearest, ties to even) and "
                         "'stochastic'")
    if rounding == "stochastic" and not isinstance(rng, np.random.Generator):
        raise ValueError("rounding='stochastic' needs rng, a np.random.Generator such as "
                         "np.random.default_rng(0)")


def values(fmt):
    """Value of every code.

    Args: fmt, a name or a Format; "e8m0" for the scale.
    Returns: float32 [2^n_bits], read-only; codes for NaN and infinity hold them.
    """
    return _e8m0_values() if fmt == "e8m0" else _values(find(fmt))


@functools.lru_cache
def _values(f):
    codes = np.arange(1 << f.n_bits)
    negative = codes >> (f.n_bits - 1) == 1
    if f.twos_complement:
        magnitude = np.where(negative, (1 << f.n_bits) - codes, codes)
    else:
        magnitude = codes & ((1 << (f.n_bits - 1)) - 1)
    field, fraction = magnitude >> f.m_bits, magnitude & ((1 << f.m_bits) - 1)
    significand = fraction + np.where(field > 0, 1 << f.m_bits, 0)
    exponent = np.maximum(field, 1) - 1 + f.emin - f.m_bits
    table = np.ldexp(significand.astype(np.float64), exponent.astype(np.int32))
    if f.nan is not None:
        table[magnitude > f.max_code] = np.nan
    if f.inf is not None:
        table[magnitude == f.inf] = np.inf
    table = np.where(negative, -table, table).astype(np.float32)
    table.setflags(write=False)
    return table


@functools.lru_cache
def _e8m0_values():
    bits = np.arange(256, dtype=np.uint32) << np.uint32(23)
    bits[0] = 0x00400000                                # 2^-127 is subnormal in float32
    bits[E8M0_NAN] = 0x7FC00000
    table = bits.view(np.float32)
    table.setflags(write=False)
    return table


def _float64_bits(x):
    return np.ascontiguousarray(x, np.float64).view(np.uint64)


def encode(x, fmt, rounding="even", rng=None):
    """Nearest code of each number, by integer operations on its bits.

    The significand is cut at the element's last place; the part cut off decides. Beyond the
    largest finite number the result saturates, infinity too. The sign of zero is kept where the
    format has one, also when a small negative number rounds to zero.

    Args: x [...], float16, bfloat16, float32 or float64; fmt, a name or a Format;
        rounding, "even" (to nearest, ties to even) or "stochastic" (up with a probability equal
        to the distance from the lower neighbour, in gaps); rng, the Generator for the latter.
    Returns: uint8 [...], one code each, in the low n_bits.
    Raises: ValueError for an unknown format or rounding, for a dtype that is not a float, and for
        NaN in a format without NaN.
    """
    f, x = find(fmt), check_float("x", x)
    check_rounding(rounding, rng)
    bits = _float64_bits(x).reshape(x.shape)
    field = ((bits >> 52) & 0x7FF).astype(np.int64)
    significand = bits & ((1 << 52) - 1)
    significand = np.where(field > 0, significand | (1 << 52), significand)
    exponent = np.maximum(field, 1) - 1023
    cut = 52 - f.m_bits + np.maximum(f.emin - exponent, 0)      # bits below the last place
    shift = np.minimum(cut, 63).astype(np.uint64)
    kept = significand >> shift
    rest = significand & ((np.uint64(1) << shift) - np.uint64(1))
    if rounding == "even":
        half = np.uint64(1) << (shift - np.uint64(1))
        up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    else:
        up = rng.random(x.shape) < np.ldexp(rest.astype(np.float64), -cut.astype(np.int32))
    magnitude = kept.astype(np.int64) + up                      # a carry moves to the next binade
    magnitude += np.maximum(exponent - f.emin, 0) << f.m_bits
    magnitude = np.minimum(magnitude, f.max_code)
    negative = bits >> 63 == 1
    is_nan = np.isnan(x)
    if f.nan is not None:
        magnitude = np.where(is_nan, f.nan, magnitude)
    elif is_nan.any():
        raise ValueError(f"x holds NaN, and {f.name} has no code for it; "
                         "a block with NaN is marked by its scale: see quantize")
    if f.twos_complement:
        return (np.where(negative, -magnitude, magnitude) & 0xFF).astype(np.uint8)
    return np.where(negative, magnitude | 1 << (f.n_bits - 1), magnitude).astype(np.uint8)


def decode(codes, fmt, dtype=np.float32):
    """Value of each code. codes uint8 [...] -> dtype [...]; exact in float32 and bfloat16.

    Raises: ValueError for codes that are not uint8 or do not fit the format.
    """
    f = find(fmt)
    return values(f)[check_codes(codes, f)].astype(dtype)


def check_codes(codes, f):
    """`codes` as an array if it is uint8 and every code has at most n_bits; else ValueError."""
    codes = np.asarray(codes)
    if codes.dtype != np.uint8:
        raise ValueError(f"codes have dtype {codes.dtype}; expected uint8, one code each")
    if codes.size and codes.max() >= 1 << f.n_bits:
        raise ValueError(f"codes reach {codes.max()}; {f.name} has {f.n_bits} bits, so the largest "
                         f"is {(1 << f.n_bits) - 1}: are these packed bytes? See unpack")
    return codes


def encode_e8m0(x):
    """Scale byte of the nearest power of two, 1.5 upwards to 2; 255 for what has none.

    Args: x [...], floats. Zero, negative numbers, infinity and NaN give 255; numbers beyond the
        range give its ends, 0 and 254.
    Returns: uint8 [...]. (MX does not round amax like this: it has rules, see `scale_bytes`.)
    """
    x = check_float("x", x)
    bits = _float64_bits(x).reshape(x.shape)
    byte = ((bits + (1 << 51)) >> 52).astype(np.int64) - 1023 + 127
    return np.where((x > 0) & np.isfinite(x), np.clip(byte, 0, 254), E8M0_NAN).astype(np.uint8)


def decode_e8m0(scales, dtype=np.float32):
    """2^(byte - 127), NaN for 255. uint8 [...] -> dtype [...]."""
    scales = np.asarray(scales)
    if scales.dtype != np.uint8:
        raise ValueError(f"scales have dtype {scales.dtype}; expected uint8, an E8M0 byte each")
    return _e8m0_values()[scales].astype(dtype)
