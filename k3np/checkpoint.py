"""Checkpoints in the released layout: look into one, load it, read it piece by piece.

A folder holds `config.json`, shards in the safetensors format and an index that says which tensor
lies in which shard. Nothing in it is executed and nothing outside it is read. The extra
`checkpoint` (safetensors, ml_dtypes) is needed. `checkpoint_save` writes the same layout.
"""
import functools
import pathlib
import re
from typing import NamedTuple

import numpy as np

from k3np.attnres import start
from k3np.checkpoint_files import (
    INDEX,
    open_shard,
    promised_tensors,
    read_config,
    read_headers,
)
from k3np.config import K3Config
from k3np.count import parameter_shapes, stored_heads
from k3np.embed import embed
from k3np.model import cut, decoder_layer, head
from k3np.mx.pack import unpack
from k3np.mx.quantize import dequantize
from k3np.tree import nest

MAX_TENSORS = 1 << 22                        # the released checkpoint has 497,220
LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")
PAIR = re.compile(r"(.*\.experts\.\d+\.w[123]\.weight)_(packed|scale)")


class Report(NamedTuple):
    """What `inspect` found: `cfg`; `tensors` by name; `missing` and `unexpected`, names; `wrong`, a
    sentence for each tensor that is not what the config asks for; `n_bytes` of all tensors."""
    cfg: K3Config
    tensors: dict
    missing: list
    unexpected: list
    wrong: list
    n_bytes: int


class ExpertMatrices:
    """One matrix of every routed expert, packed as stored; `m[e]` is decoded when it is used.

    It stands where an array [E, out, in] may stand. The one class here that is more than a record:
    it makes reading and decoding look like indexing.

    Args: fetch, function from e to the pair (packed [out,in/2], scale [out,in/32]), both uint8;
        shape (E, out, in); dtype of what is decoded.
    """

    def __init__(self, fetch, shape, dtype):
        self.fetch, self.shape, self.dtype, self.ndim = fetch, tuple(shape), np.dtype(dtype), 3

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, e):
        if not 0 <= e < len(self):
            raise IndexError(f"expert {e} is outside 0..{len(self) - 1}")
        return decode(*self.fetch(int(e)), self.dtype)


def decode(packed, scale, dtype=np.float32):
    """Values of an MXFP4 pair: packed [out,in/2] and scale [out,in/32], uint8 -> [out,in]."""
    return dequantize(unpack({"weight_packed": packed, "weight_scale": scale}), dtype)


def inspect(folder):
    """Say what a checkpoint holds without loading it: only headers are read.

    Args: folder, path of a checkpoint in the released layout.
    Returns: Report.
    Raises: FileNotFoundError for a folder or file that is not there; ValueError naming the file
        (and tensor) for one that is malformed or lies outside the folder.
    """
    folder = pathlib.Path(folder)
    cfg, tensors = read_config(folder), {}
    for shard, promised in promised_tensors(folder).items():
        for tensor in read_headers(folder, shard, promised):
            if tensor.name in tensors:
                raise ValueError(f"{folder / shard}: tensor {tensor.name} is also in "
                                 f"{tensors[tensor.name].shard}")
            tensors[tensor.name] = tensor
    expected = _expected(folder, cfg, tensors)
    both = sorted(set(expected) & set(tensors))
    wrong = [why for name in both if (why := _wrong(tensors[name], *expected[name], cfg))]
    return Report(cfg, tensors, sorted(set(expected) - set(tensors)),
                  sorted(set(tensors) - set(expected)), wrong,
                  sum(t.n_bytes for t in tensors.values()))


def load(folder, dtype=np.float32, packed=False):
    """Load a whole checkpoint.

    Args: folder, a checkpoint in the released layout, its experts packed or plain; dtype that all
        float tensors are converted to, float32 or float64; packed, whether quantised experts stay
        packed in memory and are decoded when used (`ExpertMatrices`).
    Returns: (cfg, params), params the nested tree of `k3np.tree.nest`; A_log as stored.
    Raises: FileNotFoundError; ValueError naming file and tensor: missing or unexpected tensors,
        shapes or dtypes that are not the config's, half of a packed pair, scales that are NaN,
        headers that are cut or lie, files that leave the folder.
    """
    dtype = _float_dtype(dtype)
    folder, report = _checked(folder)
    keep = _in_memory if packed else _decoded
    return report.cfg, nest(_read(folder, report, report.tensors, dtype, keep))


def stream(folder, dtype=np.float32, lazy=True):
    """Read a checkpoint piece by piece, so that one piece is in memory at a time.

    Args: folder; dtype; lazy, whether packed experts stay in the file until they are used, so that
        a layer of the real checkpoint costs what its chosen experts cost; else all are decoded.
    Yields: ("embed", tree) with embed_tokens, vision tower and projector; (i, layer) for each
        layer, its own parameters; ("head", tree) with norm, lm_head and the last mixture.
    Raises: as `load`, the scales of lazy experts when they are used.
    """
    dtype = _float_dtype(dtype)
    folder, report = _checked(folder)
    pieces = {"embed": [], **{i: [] for i in range(report.cfg.num_hidden_layers)}, "head": []}
    for name in report.tensors:
        layer = LAYER.fullmatch(name)
        first = name.startswith(("vision_tower.", "mm_projector.", "language_model.model.embed"))
        pieces[int(layer[1]) if layer else "embed" if first else "head"].append(name)
    if report.cfg.tie_word_embeddings:
        pieces["head"].append("language_model.model.embed_tokens.weight")
    for key, names in pieces.items():
        yield key, _strip(nest(_read(folder, report, names, dtype,
                                     _in_file if lazy else _decoded)), key)


def run_streamed(folder, input_ids, images=None, dtype=np.float32, last=None, progress=None):
    """Logits of a checkpoint that does not fit into memory: `forward`, layer by layer.

    Held at once: one piece of `stream` (and what is being read of the next), the Depth, a decoded
    expert. There is no cache.

    Args: folder; input_ids, images, last as in `k3np.model.forward`; dtype; progress, called with
        (pieces done, pieces in all).
    Returns: logits [B,T',N].
    """
    cfg = read_config(pathlib.Path(folder))
    for key, tree in stream(folder, dtype):
        if key == "embed":
            state = start(embed(tree, input_ids, cfg, images))
        elif key == "head":
            value = head(cut(state, last), tree, cfg)
        else:
            state = decoder_layer(state, tree, cfg, key)[0]
        del tree                                         # before the next piece is read
        if progress:
            progress(cfg.num_hidden_layers + 1 if key == "head" else 0 if key == "embed"
                     else key + 1, cfg.num_hidden_layers + 1)
    return value


def _float_dtype(dtype):
    if dtype not in (np.float32, np.float64, "float32", "float64", float):
        raise ValueError(f"dtype={dtype!r}; weights are computed with in float32 or float64")
    return np.dtype(dtype)


def _strip(tree, key):
    return tree if isinstance(key, str) else tree["language_model"]["model"]["layers"][str(key)]


def _expected(folder, cfg, tensors):
    """`parameter_shapes`, but an expert that is stored plain, under `.weight`, may stay so."""
    n_tensors = (cfg.num_hidden_layers * (6 * cfg.num_experts + 40)
                 + 6 * (cfg.vision_config.vt_num_hidden_layers if cfg.vision_config else 0))
    if n_tensors > MAX_TENSORS:
        raise ValueError(f"{folder / 'config.json'}: describes {n_tensors} tensors; more than "
                         f"{MAX_TENSORS} are no model")
    try:
        expected = parameter_shapes(cfg)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    for name in [n for n in expected if n.endswith("_packed")]:
        base = name.removesuffix("_packed")
        if base in tensors:
            (out, half), _ = expected.pop(name)
            del expected[f"{base}_scale"]
            expected[base] = (out, 2 * half), cfg.dtype
    return expected


def _wrong(tensor, shape, dtype, cfg):
    heads = cfg.linear_attn_config.num_heads
    shapes = [tuple(shape)]
    if tensor.name.endswith("A_log"):                    # padded as released, or not
        shapes = [(heads,), (stored_heads(heads),)]
    if tensor.shape not in shapes:
        return (f"{tensor.shard}: tensor {tensor.name} has shape {tensor.shape}; config.json gives "
                f"{tuple(shape)}")
    if (tensor.dtype == "uint8") != (dtype == "uint8"):
        return f"{tensor.shard}: tensor {tensor.name} has dtype {tensor.dtype}; expected {dtype}"
    return None


def _checked(folder):
    """The folder and the report of a checkpoint with which nothing is wrong; else ValueError."""
    folder, report = pathlib.Path(folder), inspect(folder)
    for what, names in (("is missing", report.missing), ("is not in the model that config.json "
                        "describes", report.unexpected)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"{folder / _whereabouts(names[0], report)}: tensor {names[0]} "
                             f"{what}{more}")
    if report.wrong:
        raise ValueError(f"{folder}/{report.wrong[0]}")
    return folder, report


def _whereabouts(name, report):
    """The shard that holds a tensor, or, of one that is missing, the one that holds its half."""
    other = re.sub(r"_(packed|scale)$", lambda m: {"packed": "_scale", "scale": "_packed"}[m[1]],
                   name)
    for candidate in (name, other):
        if candidate in report.tensors:
            return report.tensors[candidate].shard
    return INDEX


def _read(folder, report, names, dtype, keep):
    """Arrays by name. `keep` says what becomes of an expert's packed matrices."""
    opened = functools.cache(lambda shard: open_shard(folder, shard))

    def tensor(name):
        return opened(report.tensors[name].shard).get_tensor(name)

    def pair(base):
        scale = tensor(f"{base}_scale")
        if (scale == 255).any():
            row, group = np.argwhere(scale == 255)[0]
            raise ValueError(f"{folder / report.tensors[f'{base}_scale'].shard}: tensor "
                             f"{base}_scale has the byte 255, NaN, at row {row}, group {group}")
        return tensor(f"{base}_packed"), scale
    flat, experts = {}, {}
    for name in names:
        packed = PAIR.fullmatch(name)
        if not packed:
            flat[name] = tensor(name).astype(dtype)
        elif packed[2] == "packed":
            prefix, e, matrix = EXPERT.fullmatch(packed[1]).groups()
            experts.setdefault(f"{prefix}.{matrix}", {})[int(e)] = packed[1]
    for name, bases in experts.items():
        out, half = report.tensors[f"{bases[0]}_packed"].shape
        flat[name] = keep(pair, bases, (len(bases), out, 2 * half), dtype)
    return flat


def _decoded(pair, bases, shape, dtype):
    stacked = np.empty(shape, dtype)
    for e, base in bases.items():
        stacked[e] = decode(*pair(base), dtype)
    return stacked


def _in_memory(pair, bases, shape, dtype):
    stored = {e: pair(base) for e, base in bases.items()}
    return ExpertMatrices(stored.__getitem__, shape, dtype)


def _in_file(pair, bases, shape, dtype):
    return ExpertMatrices(lambda e: pair(bases[e]), shape, dtype)
