"""Arrays in MX formats: blocks of 32 along one axis, each with one power of two as its scale.

What happens where the specification is silent:

| input | here |
|---|---|
| a block of zeros | scale byte 0, codes 0 |
| NaN or infinity anywhere in a block | scale byte 255, codes 0: the whole block decodes to NaN |
| -0, and negative numbers that round to zero | -0 (INT8 has none: 0) |
| subnormal float32 | not flushed; the scale stops at byte 0, which is 2^-127 |
| beyond the scale's range (float64 only) | byte 0 and small codes, or byte 254 and saturation |
| an axis that 32 does not divide | the last block is padded with zeros, the length kept |
| float16, bfloat16 | converted to float32, which is exact |
| float64 | quantised from its own bits, not by way of float32 |
| decoded values beyond the asked dtype | infinity; dtype=np.float64 holds all of them |
"""
import functools
from typing import NamedTuple

import numpy as np

from k3np.mx.exact import check_rule, decode_blocks, encode_blocks
from k3np.mx.fast import DOUBLE, SINGLE, decoder, encoder, pieces, rounder
from k3np.mx.formats import FLOATS, check_codes, check_float, check_rounding, find


class MXArray(NamedTuple):
    """A quantised array.

    `codes` is uint8, shaped like the array with `axis` filled up to whole blocks; `scales` is
    uint8, shaped like it with `axis` counting blocks; `shape` is the true shape.
    """
    codes: np.ndarray
    scales: np.ndarray
    fmt: str
    shape: tuple
    axis: int
    block: int


def quantize(x, fmt="e2m1", rule="floor", axis=-1, block=32, rounding="even", rng=None):
    """Encode an array in an MX format.

    Args: x [...], float16, bfloat16, float32 or float64; fmt, an element format: "e2m1", "e2m3",
        "e3m2", "e4m3", "e5m2" or "int8"; rule for the scale: "floor" (the specification's),
        "even", "even175", "ceil" or "rceil"; axis that the blocks follow; block, a power of two;
        rounding "even" or "stochastic", the latter with rng, a np.random.Generator.
    Returns: MXArray.
    Raises: ValueError for an unknown choice, a dtype that is no float, an axis x does not have.
    Source: OCP Microscaling Formats 1.0, §5 and §6.3; the table above where it is silent.
    """
    x, f, axis = _check(x, fmt, rule, axis, block, rounding, rng)
    x3, n_blocks = _as_three(x, axis), -(-x.shape[axis] // block)
    kind = _kind(x.dtype)
    codes = np.empty((x3.shape[0], n_blocks * block, x3.shape[2]), np.uint8)
    scales = np.empty((x3.shape[0], n_blocks, x3.shape[2]), np.uint8)
    machine = functools.lru_cache(lambda shape: encoder(shape, f, rule, kind, rounding, rng))
    with np.errstate(over="ignore", invalid="ignore"):
        for at, block_at in pieces(x3.shape, block):
            source, scale = _fill(x3[at], block, kind.real), scales[block_at]
            shape = (scale.shape[0] * scale.shape[1], block, scale.shape[2])
            target = codes[_codes_at(block_at, block)]
            flat, done = _flat_or_new(target), scale.reshape(shape[0], shape[2])
            machine(shape)(source, flat, done)
            _put(flat, target)
            scales[block_at] = done.reshape(scale.shape)
    lead, tail = x.shape[:axis], x.shape[axis + 1:]
    return MXArray(codes.reshape(*lead, n_blocks * block, *tail),
                   scales.reshape(*lead, n_blocks, *tail), f.name, x.shape, axis, block)


def dequantize(mx, dtype=np.float32, out=None):
    """Decode: scale times element, exactly, then rounded to `dtype` (which only bounds can need).

    Args: mx, an MXArray; dtype, a float type; out, an array of mx.shape to write to, of any float
        type.
    Returns: the array, or out.
    Raises: ValueError for codes, scales or out that do not fit.
    """
    f, codes3, scales3 = _check_mx(mx)
    if out is None:
        out = np.empty(mx.shape, dtype)
    _check_out(out, mx.shape)
    out3 = _as_three(out, mx.axis, copy=False)
    real = np.float64 if out.dtype == np.float64 else np.float32
    machine = functools.lru_cache(lambda shape: decoder(shape, f, real))
    with np.errstate(over="ignore", invalid="ignore"):
        for at, block_at in pieces(out3.shape, mx.block):
            piece, scale = codes3[_codes_at(block_at, mx.block)], scales3[block_at]
            shape = (scale.shape[0] * scale.shape[1], mx.block, scale.shape[2])
            flat = _flat_or_new(out3[at], real, piece.size)
            machine(shape)(piece.reshape(-1), scale.reshape(shape[0], shape[2]), flat)
            _put(flat, out3[at], piece.shape)
    return out


def fake_quantize(x, fmt="e2m1", rule="floor", axis=-1, block=32, out=None, rounding="even",
                  rng=None):
    """The values that survive quantising: dequantize(quantize(x)), without codes in between.

    Args: as `quantize`; out, an array like x to write to, which may be x itself.
    Returns: an array of x's shape and dtype, or out. Beside it, only a few pieces that fit a cache
        are in use.
    """
    x, f, axis = _check(x, fmt, rule, axis, block, rounding, rng)
    if out is None:
        out = np.empty(x.shape, x.dtype)
    _check_out(out, x.shape, x.dtype)
    in_place = np.shares_memory(out, x)
    if in_place and (out.ctypes.data, out.strides) != (x.ctypes.data, x.strides):
        raise ValueError("out overlaps x without being x: give x itself or memory of its own")
    x3, out3 = _as_three(x, axis), _as_three(out, axis, copy=False)
    kind = _kind(x.dtype)
    machine = functools.lru_cache(lambda shape: rounder(shape, f, rule, kind, rounding, rng))
    with np.errstate(over="ignore", invalid="ignore"):
        for at, _ in pieces(x3.shape, block):
            source, target = x3[at], out3[at]
            flat = _fill(source, block, kind.real)
            shape = (flat.size // (block * source.shape[2]), block, source.shape[2])
            result = flat if in_place and np.may_share_memory(flat, target) else _flat_or_new(
                target, kind.real, flat.size)
            machine(shape)(flat, result)
            _put(result, target, (source.shape[0], -1, source.shape[2]))
    return out


def quantize_slow(x, fmt="e2m1", rule="floor", axis=-1, block=32, rounding="even", rng=None):
    """The definition of `quantize`, on whole arrays."""
    x, f, axis = _check(x, fmt, rule, axis, block, rounding, rng)
    last = np.moveaxis(x, axis, -1).astype(np.float64)
    n = last.shape[-1]
    padded = np.concatenate([last, np.zeros((*last.shape[:-1], -n % block))], axis=-1)
    blocks = padded.reshape(*last.shape[:-1], padded.shape[-1] // block, block)
    codes, scales = encode_blocks(blocks, f, rule, rounding, rng)
    return MXArray(np.moveaxis(codes.reshape(padded.shape), -1, axis),
                   np.moveaxis(scales, -1, axis), f.name, x.shape, axis, block)


def dequantize_slow(mx, dtype=np.float32):
    """The definition of `dequantize`, on whole arrays."""
    f, _, _ = _check_mx(mx)
    last = np.moveaxis(mx.codes, mx.axis, -1)
    blocks = last.reshape(*last.shape[:-1], last.shape[-1] // mx.block, mx.block)
    x = decode_blocks(blocks, np.moveaxis(mx.scales, mx.axis, -1), f)
    x = x.reshape(last.shape)[..., :mx.shape[mx.axis]]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.moveaxis(x, -1, mx.axis).astype(dtype)


def _kind(dtype):
    return DOUBLE if dtype == np.float64 else SINGLE


def _as_three(x, axis, copy=True):
    """[..., n, ...] -> [A, n, B] with `axis` in the middle; a view if that is possible."""
    count = [int(np.prod(part, dtype=np.int64)) for part in (x.shape[:axis], x.shape[axis + 1:])]
    three = x.reshape(count[0], x.shape[axis], count[1])
    if not copy and x.size and not np.may_share_memory(three, x):
        raise ValueError(f"out, of shape {x.shape} and strides {x.strides}, cannot be written in "
                         "blocks without a copy: give a C-contiguous array")
    return three


def _codes_at(block_at, block):
    """Where the codes of some blocks are, from where the blocks' scales are."""
    rows, blocks, columns = block_at
    return rows, slice(blocks.start * block, blocks.stop * block), columns


def _fill(source, block, real):
    """A piece [r, n, w], flat, as `real`, its blocks filled up with zeros; itself if it can be."""
    r, n, w = source.shape
    full = -(-n // block) * block
    if n == full and source.dtype == real and source.flags.c_contiguous:
        return source.reshape(-1)
    box = np.zeros((r, full, w), real)
    box[:, :n] = source
    return box.reshape(-1)


def _flat_or_new(target, real=np.uint8, size=None):
    """`target`, flat, if results can be written straight to it; else a new array."""
    size = target.size if size is None else size
    if target.dtype == real and target.size == size and target.flags.c_contiguous:
        return target.reshape(-1)
    return np.empty(size, real)


def _put(flat, target, shape=None):
    """Bring results to where they belong, unless they were written there."""
    if not np.may_share_memory(flat, target):
        full = flat.reshape(target.shape if shape is None else shape)
        np.copyto(target, full[:, :target.shape[1]], casting="unsafe")


def _check(x, fmt, rule, axis, block, rounding, rng):
    f, x = find(fmt), check_float("x", x)
    check_rule(rule)
    check_rounding(rounding, rng)
    if block < 2 or block & (block - 1):
        raise ValueError(f"block={block}; expected a power of two from 2 on (MX has 32)")
    return x, f, _check_axis(x.shape, axis)


def _check_axis(shape, axis):
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis={axis}; x has shape {shape}" + (
            "" if shape else ": blocks need at least one axis, give x.reshape(1)"))
    return axis % len(shape)


def _check_out(out, shape, dtype=None):
    if not isinstance(out, np.ndarray) or out.shape != tuple(shape):
        raise ValueError(f"out has shape {np.shape(out)}; expected {tuple(shape)}")
    if out.dtype.name not in FLOATS or dtype not in (None, out.dtype):
        raise ValueError(f"out has dtype {out.dtype}; expected "
                         f"{dtype or 'float16, bfloat16, float32 or float64'}")


def _check_mx(mx):
    """The Format, codes [A, n_blocks * block, B] and scales [A, n_blocks, B] of an MXArray."""
    f, codes, scales = find(mx.fmt), np.asarray(mx.codes), np.asarray(mx.scales)
    axis = _check_axis(mx.shape, mx.axis)
    n_blocks = -(-mx.shape[axis] // mx.block)
    for name, array, n in (("codes", codes, n_blocks * mx.block), ("scales", scales, n_blocks)):
        expected = (*mx.shape[:axis], n, *mx.shape[axis + 1:])
        if array.shape != expected:
            raise ValueError(f"{name} have shape {array.shape}; expected {expected}: {mx.shape} in "
                             f"blocks of {mx.block} along axis {axis}")
    if scales.dtype != np.uint8:
        raise ValueError(f"scales have dtype {scales.dtype}; expected uint8, an E8M0 byte each")
    check_codes(codes, f)
    return f, _as_three(codes, axis), _as_three(scales, axis)
