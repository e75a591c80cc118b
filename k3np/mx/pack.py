"""MXFP4 arrays as the bytes of checkpoints, in named layouts.

| layout | tensors | order of the nibbles |
|---|---|---|
| compressed-tensors | weight_packed [.., n/2], weight_scale [.., n/32] | low nibble: even element |
| gpt-oss | blocks [.., n/32, 16], scales [.., n/32] | the same |
| gguf | data [.., n/32, 17]: scale byte, then 16 bytes | low nibbles: first half of the block |

All hold E2M1 codes in blocks of 32 along the last axis, n a multiple of 32. Kimi K3 is released in
the first. The second is gpt-oss's file; its loader also exchanges two axes, which is not done here.
"""
import numpy as np

from k3np.mx.formats import E2M1, check_codes
from k3np.mx.quantize import MXArray

LAYOUTS = {"compressed-tensors": ("weight_packed", "weight_scale"),
           "gpt-oss": ("blocks", "scales"),
           "gguf": ("data",)}
BLOCK = 32
PIECE = 32768                       # bytes worked on at once: what fits a cache


def pack_nibbles(codes):
    """Two codes a byte, the even element in the low nibble. [.., n] -> [.., n/2].

    Raises: ValueError for an odd n or codes above 15.
    """
    codes = check_codes(codes, E2M1)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes have shape {codes.shape}; two share a byte, so the last axis must "
                         "be even: append a code of 0")
    words = np.ascontiguousarray(codes).view("<u2").reshape(-1)      # low byte: even element
    packed = np.empty(words.size, np.uint8)
    for i in range(0, words.size, PIECE):
        word = words[i:i + PIECE]
        np.copyto(packed[i:i + PIECE], word | word >> 4, casting="unsafe")
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_nibbles(packed):
    """One code a byte from two: [.., n/2] -> [.., n], low nibble first. The values are uint8."""
    packed = _bytes("packed", packed)
    flat, words = np.ascontiguousarray(packed).reshape(-1), np.empty(packed.size, "<u2")
    for i in range(0, flat.size, PIECE):
        word = flat[i:i + PIECE].astype("<u2")
        np.bitwise_and(word | word << 4, 0x0F0F, out=words[i:i + PIECE])
    return words.view(np.uint8).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack(mx, layout="compressed-tensors"):
    """Bytes of a quantised array in a checkpoint's layout.

    Args: mx, an MXArray of "e2m1" in blocks of 32 along its last axis; layout, see LAYOUTS.
    Returns: dict of uint8 arrays, keyed by the layout's tensor names.
    Raises: ValueError for another format, axis or block, or a last axis that 32 does not divide.
    """
    _check_layout(layout)
    n = mx.shape[-1]
    if (mx.fmt, mx.axis, mx.block) != ("e2m1", len(mx.shape) - 1, BLOCK):
        raise ValueError(f"layout {layout!r} holds e2m1 in blocks of 32 along the last axis; this "
                         f"is {mx.fmt} in blocks of {mx.block} along axis {mx.axis} of {mx.shape}")
    if n % BLOCK:
        raise ValueError(f"the last axis of {mx.shape} is {n}, which 32 does not divide; layout "
                         f"{layout!r} keeps no true length: pad the array before quantising it")
    lead, n_blocks = mx.shape[:-1], n // BLOCK
    if layout == "compressed-tensors":
        return {"weight_packed": pack_nibbles(mx.codes), "weight_scale": mx.scales.copy()}
    if layout == "gpt-oss":
        return {"blocks": pack_nibbles(mx.codes).reshape(*lead, n_blocks, 16),
                "scales": mx.scales.copy()}
    halves = mx.codes.reshape(*lead, n_blocks, 2, 16)
    data = np.empty((*lead, n_blocks, 17), np.uint8)
    data[..., 0] = mx.scales
    data[..., 1:] = halves[..., 0, :] | halves[..., 1, :] << 4       # j with j + 16
    return {"data": data}


def unpack(tensors, layout="compressed-tensors"):
    """The quantised array that a checkpoint's bytes hold; undoes `pack` bit by bit.

    Args: tensors, dict of uint8 arrays under the layout's names; layout, see LAYOUTS.
    Returns: MXArray.
    Raises: ValueError for a missing name, a dtype that is not uint8, or lengths that do not fit.
    """
    names = _check_layout(layout)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"tensors lack {', '.join(missing)}; layout {layout!r} consists of "
                         f"{' and '.join(names)}")
    first, *rest = (_bytes(name, tensors[name]) for name in names)
    if layout == "compressed-tensors":
        codes, scales = unpack_nibbles(first), rest[0]
    else:
        length = {"gpt-oss": 16, "gguf": 17}[layout]
        if first.ndim < 2 or first.shape[-1] != length:
            raise ValueError(f"{names[0]} has shape {first.shape}; the last axis of layout "
                             f"{layout!r} holds {length} bytes, a block")
        if layout == "gpt-oss":
            codes, scales = unpack_nibbles(first), rest[0]
        else:
            scales, nibbles = first[..., 0].copy(), first[..., 1:]
            codes = np.stack([nibbles & 15, nibbles >> 4], axis=-2)  # [.., G, 2, 16]
            codes = codes.reshape(*first.shape[:-1], BLOCK)
        codes = codes.reshape(*first.shape[:-2], -1)
    n = codes.shape[-1]
    if n % BLOCK or scales.shape != (*codes.shape[:-1], n // BLOCK):
        raise ValueError(f"{names[-1]} of shape {scales.shape} does not fit {names[0]} of shape "
                         f"{first.shape}, {n} codes a row: one scale byte belongs to 32 codes")
    return MXArray(codes, scales, "e2m1", codes.shape, codes.ndim - 1, BLOCK)


def _check_layout(layout):
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; known are {', '.join(LAYOUTS)}")
    return LAYOUTS[layout]


def _bytes(name, array):
    array = np.asarray(array)
    if array.dtype != np.uint8 or array.ndim == 0:
        raise ValueError(f"{name} has dtype {array.dtype} and shape {array.shape}; expected an "
                         "array of uint8")
    return array
