"""The blocks of exact.py, a cache-sized piece at a time, by additions that round.

Let s be a block's scale, emin the element's smallest normal exponent, m its bits of fraction and w
those of the float type. For each x take p = max(|x| with its fraction cleared, s 2^emin) and
M = p 2^(w-m). M is so large that |x| + M has its last place exactly where the element has its own,
so the processor's addition rounds to nearest, ties to even, on the element's grid:

    (|x| + M) - M is the rounded magnitude.

With the number of binades from s 2^emin to p written into M's last bits, just above the m that the
element counts, the last bits of |x| + M are the code.

This holds while s 2^emin and M are normal numbers. Each block's scale is held against a gate, and
blocks outside it (tiny, huge, infinite, NaN) are done by exact.py.
"""
import functools
from typing import NamedTuple

import numpy as np

from k3np.mx.exact import decode_blocks, encode_blocks, increment
from k3np.mx.formats import decode_e8m0, values

PIECE = 131072                      # elements worked on at once: 512 KiB of float32


class Kind(NamedTuple):
    """A float type as the integers that its bits are."""
    real: type
    uint: type
    width: int                      # bits of fraction
    bias: int
    exponent: int                   # mask of the exponent field
    sign: int                       # mask of the sign


SINGLE = Kind(np.float32, np.uint32, 23, 127, 0x7F800000, 1 << 31)
DOUBLE = Kind(np.float64, np.uint64, 52, 1023, 0x7FF << 52, 1 << 63)


def gate(f, kind):
    """Lowest and highest scale byte for which the additions are exact.

    At the lowest, half the element's last place is float32's smallest normal number, so nothing
    depends on how a processor treats subnormal ones; at the highest, M stays finite.
    """
    return (0, 254) if kind is DOUBLE else (2 - f.emin + f.m_bits, 230 + f.m_bits - f.emax)


def pieces(shape, block, limit=PIECE):
    """Cut [A, n, B], blocked along n, into pieces of whole blocks and about `limit` elements.

    Yields: slices into [A, n, B], and the matching slices into [A, n_blocks, B].
    """
    A, n, B = shape
    n_blocks = -(-n // block)
    w = max(1, min(B, limit // block))
    k = max(1, min(n_blocks, limit // (block * w)))
    r = max(1, limit // (block * w * k)) if w == B and k == n_blocks else 1
    for a in range(0, A, r):
        for j in range(0, n_blocks, k):
            for b in range(0, B, w):
                stop, rows, columns = min(j + k, n_blocks), slice(a, a + r), slice(b, b + w)
                yield ((rows, slice(j * block, min(stop * block, n)), columns),
                       (rows, slice(j, stop), columns))


def preparer(shape, f, rule, kind, exact_only):
    """What pieces of one shape need before they are rounded or encoded.

    Buffers and views are made once: a call then costs what its arithmetic costs.

    Args: shape (R, block, w) of a piece; f, rule, kind; exact_only, to send all blocks to exact.py.
    Returns: begin(x, d), and the arrays a, b [R * block * w] and byte [R, w]. begin, for a flat x,
        leaves the bits of |x| in a, those of M in d, those of the M of s 2^emin in b, the scale in
        byte, and returns None or (zero [R, w], where, blocks): which blocks are zero, the indices
        of the blocks outside the gate, and those blocks.
    """
    R, block, w = shape
    a, b, c = np.empty((3, R * block * w), kind.uint)
    constant = functools.partial(np.array, dtype=kind.uint)          # faster than scalars
    magnitude, exponent = constant(kind.sign - 1), constant(kind.exponent)
    to_m, width = constant((kind.width - f.m_bits) << kind.width), constant(kind.width)
    to_byte = (127 - kind.bias - f.emax) * (1 << kind.width) + increment(f, rule, kind.width)
    to_byte = constant(to_byte % (2 * kind.sign))                    # a negative byte wraps: huge
    source, passes, span = a, [], block // 2 if w == 1 else 0
    while span:                     # few long shifted passes beat many short reductions
        target = b if source is not b else c
        passes.append((source[:-span], source[span:], target[:-span]))
        source, span = target, span // 2
    top = source[::block].reshape(R, 1) if w == 1 else np.empty((R, w), kind.uint)
    byte = np.empty((R, w), kind.uint)
    smallest = _smallest(f, kind, block)
    low, high = gate(f, kind)

    def begin(x, d):
        np.bitwise_and(x.view(kind.uint), magnitude, out=a)
        for left, right, out in passes:
            np.maximum(left, right, out=out)
        if w > 1:
            np.maximum.reduce(a.reshape(shape), axis=1, out=top)
        np.add(top, to_byte, out=byte)
        np.right_shift(byte, width, out=byte)
        odd = None
        if exact_only or byte.min() < low or byte.max() > high:
            zero = top == 0
            where = np.nonzero(((byte < low) | (byte > high) | exact_only) & ~zero)
            odd = zero, where, x.reshape(shape)[where[0], :, where[1]]     # a copy: d may be x
            np.clip(byte, low, high, out=byte)
        if w == 1:
            np.take(smallest, byte[:, 0].astype(np.intp), axis=0, out=b.reshape(R, block),
                    mode="clip")
        else:
            np.copyto(b.reshape(shape), smallest[byte, 0][:, None])
        np.bitwise_and(a, exponent, out=d)
        np.add(d, to_m, out=d)
        np.maximum(d, b, out=d)
        return odd
    return begin, a, b, byte


@functools.lru_cache
def _smallest(f, kind, block):
    """Bits of the M of s 2^emin for each scale byte, repeated for a block: [256, block]."""
    field = np.arange(256, dtype=np.int64) - 127 + f.emin + kind.bias
    field = np.clip(field, 1, 2 * kind.bias) + kind.width - f.m_bits
    bits = (field.astype(kind.uint) << kind.uint(kind.width)) & kind.uint(kind.sign - 1)
    return np.repeat(bits[:, None], block, axis=1)


def rounder(shape, f, rule, kind, rounding="even", rng=None):
    """run(x, out), which rounds pieces of one shape; x and out flat, out may be x."""
    begin, a, b, _ = preparer(shape, f, rule, kind, rounding != "even")
    own = np.empty_like(a)
    real = a.view(kind.real)
    largest = int((f.max / 2.0 ** f.emax - 1) * (1 << kind.width))   # fraction of the largest
    to_limit = ((f.emax - f.emin - kind.width + f.m_bits) << kind.width) + largest
    to_limit = np.array(to_limit % (2 * kind.sign), kind.uint)
    sign = np.array(kind.sign, kind.uint)

    def run(x, out):
        d = own if out is x else out.view(kind.uint)
        odd = begin(x, d)
        if rule not in ("ceil", "rceil"):                            # those clip nothing
            np.add(b, to_limit, out=b)
            np.minimum(a, b, out=a)
        m = d.view(kind.real)
        np.add(real, m, out=real)
        np.subtract(real, m, out=real)
        np.bitwise_and(x.view(kind.uint), sign, out=d)
        np.bitwise_or(a, d, out=out.view(kind.uint))
        if f.twos_complement:
            np.add(out, 0, out=out)                                  # no -0 there
        if odd:
            zero, where, blocks = odd
            codes, scales = encode_blocks(blocks, f, rule, rounding, rng)
            out.reshape(shape)[where[0], :, where[1]] = decode_blocks(codes, scales, f)
    return run


def encoder(shape, f, rule, kind, rounding="even", rng=None):
    """run(x, codes, scales), which encodes pieces of one shape: flat, flat uint8, uint8 [R, w]."""
    begin, a, b, byte = preparer(shape, f, rule, kind, rounding != "even")
    d = np.empty_like(a)
    real, m = a.view(kind.real), d.view(kind.real)
    eights = np.zeros(-(-a.size // 8), np.uint64)                    # bytes shift faster by eights
    signs = eights.view(np.uint8)[:a.size]
    limit = np.full(a.size, f.max_code, np.uint8)
    to_last, to_top = np.array(kind.width - f.m_bits, kind.uint), np.uint64(f.n_bits - 1)

    def run(x, codes, scales):
        odd = begin(x, d)
        np.subtract(d, b, out=b)
        np.right_shift(b, to_last, out=b)                            # binades above the lowest
        np.add(d, b, out=d)
        np.add(real, m, out=real)
        np.copyto(codes, a, casting="unsafe")                        # the last eight bits
        if rule not in ("ceil", "rceil"):
            np.minimum(codes, limit, out=codes)
        np.signbit(x, out=signs.view(bool))
        if f.twos_complement:                                        # subtract one, flip all bits
            np.subtract(codes, signs, out=codes)
            np.negative(signs, out=signs)
            np.bitwise_xor(codes, signs, out=codes)
        else:
            np.left_shift(eights, to_top, out=eights)
            np.bitwise_or(codes, signs, out=codes)
        np.copyto(scales, byte, casting="unsafe")
        if odd:
            zero, where, blocks = odd
            scales[zero] = 0
            codes.reshape(shape)[where[0], :, where[1]], scales[where] = encode_blocks(
                blocks, f, rule, rounding, rng)
    return run


@functools.lru_cache
def _pairs(f):
    """Two values for each pair of codes, as one uint64, indexed by the pair read as a uint16."""
    top = (1 << f.n_bits) - 1
    index = np.arange((top << 8 | top) + 1, dtype=np.uint16)
    table = values(f)[index.view(np.uint8) & top].view(np.uint64)
    table.setflags(write=False)
    return table


@functools.lru_cache
def _scales(dtype, block):
    """The value of each scale byte, repeated for a block: [256, block]."""
    return np.repeat(decode_e8m0(np.arange(256, dtype=np.uint8), dtype)[:, None], block, axis=1)


def decoder(shape, f, dtype):
    """run(codes, scales, out), which decodes pieces of one shape to float32 or float64."""
    R, block, w = shape
    pairs, by_byte = _pairs(f), _scales(dtype, block)
    index = np.empty(R * block * w // 2, np.intp)
    own = np.empty(R * block * w, np.float32)
    scale = np.empty(R * block * w, dtype)

    def run(codes, scales, out):
        element = out if out.dtype == np.float32 else own
        np.copyto(index, codes.view(np.uint16))
        np.take(pairs, index, out=element.view(np.uint64), mode="clip")
        if w == 1:
            np.take(by_byte, scales[:, 0], axis=0, out=scale.reshape(R, block), mode="clip")
        else:
            np.copyto(scale.reshape(shape), by_byte[scales, 0][:, None])
        np.multiply(element, scale, out=out)
    return run
