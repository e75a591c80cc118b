"""The doors of a checkpoint's folder: every byte from outside comes in through these functions.

They open only regular files that lie in the folder itself, of bounded size where they are read at
once, and execute nothing. What they refuse, they refuse with the file's name.
"""
import json
import os
from math import prod
from typing import Any, NamedTuple

from k3np.config import K3Config
from k3np.count import N_BYTES

INDEX = "model.safetensors.index.json"
STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "U8": "uint8"}
MAX_INDEX_BYTES = 1 << 27                    # the released one has about half of it
MAX_CONFIG_BYTES = 1 << 20                   # the released one has about 4 kB


class Tensor(NamedTuple):
    """A tensor of a checkpoint as its shard's header describes it. `dtype` is a NumPy name."""
    name: str
    shape: tuple
    dtype: str
    n_bytes: int
    shard: str


def read_headers(folder, shard, promised):
    """Tensor for each tensor of a shard; ValueError if one that the index promises is not there."""
    handle = open_shard(folder, shard)
    present = sorted(handle.keys())
    lost = sorted(promised - set(present))
    if lost:
        raise ValueError(f"{folder / shard}: tensor {lost[0]} is missing; {INDEX} says that it is "
                         "here")
    for name in present:
        piece = handle.get_slice(name)
        shape, kind = tuple(piece.get_shape()), piece.get_dtype()
        if kind not in STORED:
            raise ValueError(f"{folder / shard}: tensor {name} has dtype {kind}; known are "
                             f"{', '.join(STORED)}")
        dtype = STORED[kind]
        n_bytes = N_BYTES[dtype] * prod(shape)
        yield Tensor(name, shape, dtype, n_bytes, shard)


def read_json(path, max_bytes):
    """The value in a JSON file; ValueError naming it if it is longer than max_bytes or broken."""
    if path.stat().st_size > max_bytes:
        raise ValueError(f"{path}: {path.stat().st_size} bytes; such a file has at most "
                         f"{max_bytes}")
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None


def inside(folder, name):
    """The path of a file that must lie in the folder itself, links followed."""
    path = folder / name
    if name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name:
        raise ValueError(f"{folder / INDEX}: shard name {name!r} is not a plain file name")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"{path}: a link that leaves the folder; copy the file there")
    return path


def read_config(folder):
    """The K3Config of a folder; every complaint names the file."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    path = inside(folder, "config.json")
    whole = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(whole, dict):
        raise ValueError(f"{path}: not a JSON object")
    try:
        return K3Config.from_json(whole)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def promised_tensors(folder):
    """The tensor names that the index promises, by shard; a single file needs no index."""
    if not (folder / INDEX).exists():
        if (folder / "model.safetensors").exists():
            return {inside(folder, "model.safetensors").name: set()}
        raise FileNotFoundError(f"{folder / INDEX}: no such file, and no model.safetensors either")
    index = read_json(inside(folder, INDEX), MAX_INDEX_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(
            isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{folder / INDEX}: weight_map must map tensor names to file names")
    shards = {}
    for name, shard in weight_map.items():
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        inside(folder, shard)
    return shards


def open_shard(folder, shard) -> Any:
    """A handle on a shard, its header read and held against its length by safetensors."""
    try:
        import ml_dtypes  # noqa: F401  (makes NumPy know bfloat16)
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("reading checkpoints needs an extra; in the repository's "
                          "folder: pip install -e '.[checkpoint]'") from None
    try:
        return safe_open(inside(folder, shard), framework="np")
    except SafetensorError as error:
        raise ValueError(f"{folder / shard}: not a whole safetensors file: {error}") from None
