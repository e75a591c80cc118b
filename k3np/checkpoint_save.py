"""Writing checkpoints in the released layout, all or nothing."""
import ctypes
import json
import os
import pathlib
import shutil

import numpy as np

from k3np.checkpoint import EXPERT, LAYER, PAIR, ExpertMatrices
from k3np.checkpoint_files import INDEX
from k3np.count import parameter_shapes
from k3np.mx.pack import pack
from k3np.mx.quantize import quantize


def save(folder, cfg, params, overwrite=False, rule="floor"):
    """Write a checkpoint in the released layout: a shard a layer, an index, the config.

    It is written beside its place under another name and put there by one rename. A process that
    dies before leaves the old folder as it was, and its own under `.NAME.saving-...`.
    What is written follows cfg: cfg.dtype, float32 for the tensors that the release keeps so, MXFP4
    pairs and a padded A_log where it has a `quantization_config`. Experts that are still packed are
    written byte for byte.

    Args: folder, the place; cfg, K3Config; params, the tree; overwrite, whether a folder that is
        already there is replaced; rule, the scale rule (see `k3np.mx.quantize`) for experts that
        are not packed yet.
    Raises: FileExistsError; ValueError naming a tensor that is missing, unknown, of another shape,
        not finite.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and not (overwrite and folder.is_dir()):
        raise FileExistsError(f"{folder} is already there: choose another place"
                              + (", or say overwrite=True" if folder.is_dir() else ""))
    expected = parameter_shapes(cfg)
    _check_names(params, expected)
    scratch = folder.parent / f".{folder.name}.saving-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        _write(scratch, cfg, params, expected, rule)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(scratch, cfg, params, expected, rule):
    save_file = _save_file()
    groups = {}
    for name in expected:
        layer = LAYER.fullmatch(name)
        groups.setdefault(int(layer[1]) if layer else name.split(".")[0], []).append(name)
    weight_map, total = {}, 0
    for number, names in enumerate(groups.values(), 1):
        shard = f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        tensors = {}
        for name in names:
            tensors.update(_stored(params, name, expected, rule))
        for name, array in tensors.items():
            weight_map[name], total = shard, total + array.nbytes
        save_file(tensors, scratch / shard, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for name, value in ((INDEX, index), ("config.json", cfg.to_json())):
        (scratch / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf8")
    for path in (*scratch.iterdir(), scratch):
        _sync(path)


def _save_file():
    try:
        import ml_dtypes  # noqa: F401  (makes NumPy know bfloat16)
        from safetensors.numpy import save_file
    except ImportError:
        raise ImportError("writing checkpoints needs an extra; in the repository's "
                          "folder: pip install -e '.[checkpoint]'") from None
    return save_file


def _stored(params, name, expected, rule):
    """What is written under a name; under that of a pair's first half, both halves."""
    pair = PAIR.fullmatch(name)
    if pair and pair[2] == "scale":
        return {}
    shape, dtype = expected[name]
    match = EXPERT.fullmatch(pair[1] if pair else name)
    array = _find(params, f"{match[1]}.{match[3]}" if match else name)
    if pair and isinstance(array, ExpertMatrices):
        packed, scale = array.fetch(int(match[2]))
        arrays = {name: packed, f"{pair[1]}_scale": scale}
    elif pair:
        values = np.asarray(array[int(match[2])], np.float32)
        _check_finite(pair[1], values)
        both = pack(quantize(values, "e2m1", rule))
        arrays = {name: both["weight_packed"], f"{pair[1]}_scale": both["weight_scale"]}
    else:
        array = array[int(match[2])] if match else np.asarray(array)
        if name.endswith("A_log") and len(array) < shape[0]:
            array = np.pad(array, (0, shape[0] - len(array)))
        _check_finite(name, array)
        with np.errstate(over="ignore"):                 # looked at in the next line
            stored = array.astype(np.dtype(dtype))       # bfloat16 by ml_dtypes
        if not np.isfinite(stored.astype(np.float64)).all():
            raise ValueError(f"params: {name} has entries up to {np.abs(array).max():.3g}, more "
                             f"than {dtype} can hold")
        arrays = {name: stored}
    for key, value in arrays.items():
        if value.shape != tuple(expected[key][0]):
            raise ValueError(f"params: {key} has shape {value.shape}; cfg gives "
                             f"{tuple(expected[key][0])}")
    return {key: np.ascontiguousarray(value) for key, value in arrays.items()}


def _check_finite(name, array):
    if not np.isfinite(array).all():
        raise ValueError(f"params: {name} holds NaN or infinity")


def _find(params, name):
    node = params
    for part in name.removesuffix(".weight").split("."):
        if not isinstance(node, dict) or part not in node:
            raise ValueError(f"params: {name} is missing")
        node = node[part]
    return node["weight"] if isinstance(node, dict) and "weight" in node else node


def _check_names(params, expected, path=""):
    known = {EXPERT.sub(r"\1.\3", PAIR.sub(r"\1", name)).removesuffix(".weight")
             for name in expected}

    def walk(node, path):
        for key, child in node.items():
            name = f"{path}.{key}" if path else key
            if isinstance(child, dict):
                walk(child, name)
            elif name.removesuffix(".weight") not in known:
                raise ValueError(f"params: {name} is not in the model that cfg describes")
    walk(params, "")


def _put_in_place(scratch, folder):
    """Rename; an old folder and the new one change places in one step where the system can."""
    if not folder.exists():
        os.rename(scratch, folder)
    elif not _exchange(scratch, folder):
        old = scratch.with_name(f"{scratch.name}.old")
        os.rename(folder, old)
        os.rename(scratch, folder)
        shutil.rmtree(old)
    _sync(folder.parent)


def _exchange(a, b):
    """Let two folders change names at once. Whether that could be done (Linux can)."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2                             # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


def _sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
