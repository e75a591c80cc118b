"""Microscaling (MX) formats: 32 numbers of 4, 6 or 8 bits that share one power of two.

`formats` holds the elements, `exact` the definition of a block, `fast` the same in cache-sized
pieces, `quantize` arrays, `pack` the bytes of checkpoints, `dot` products, `qat` training through
rounding, `nvfp4` the format beside it. Import from the modules: several functions carry the names
of theirs.
"""
