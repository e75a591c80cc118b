"""Golden vectors: cases made by other people's code, read in this package's layout."""
import json
import pathlib

import numpy as np

from k3np.tree import nest


def _folder():
    here = pathlib.Path(__file__).resolve().parent.parent
    for folder in (here / "tests" / "golden", pathlib.Path("../tests/golden"),
                   pathlib.Path("tests/golden")):
        if folder.is_dir():
            return folder
    raise FileNotFoundError("no folder tests/golden beside the package or the notebook: "
                            "golden cases come with the repository, not with the wheel")


def _with_prefix(key):
    """Name under "param." or "grad_param.": the vision cases leave that prefix out."""
    name = key.removeprefix("grad_")
    if not name.startswith(("vision_tower.", "mm_projector.")):
        return key
    return f"param.{name}" if name == key else f"grad_param.{name}"


def golden(name):
    """Read the golden case `name`, such as "kda_1".

    Returns: dict of its arrays by name; where the case has parameters, also "param" and
        "grad_param" as trees (see `nest`; a gradient that the case lacks is zero); "meta" holds
        the JSON beside it.
    Raises: FileNotFoundError naming the file.
    """
    path = _folder() / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}: no such golden case in {path.parent}")
    case, trees = {}, {"param": {}, "grad_param": {}}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            prefix, _, rest = _with_prefix(key).partition(".")
            (trees[prefix] if prefix in trees else case)[rest if prefix in trees else key] = \
                arrays[key]
    flat = trees["grad_param"]
    if flat:
        trees["grad_param"] = {name: flat.get(name, np.zeros_like(array))
                               for name, array in trees["param"].items()}
    case.update({prefix: nest(tree) for prefix, tree in trees.items() if tree})
    case["meta"] = json.loads(path.with_suffix(".json").read_text(encoding="utf8"))
    return case


def golden_json(name):
    """Read the JSON `name`, such as "supernode/measurements", beside the golden cases.

    Raises: FileNotFoundError naming the file.
    """
    path = _folder() / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}: no such file in {path.parent}")
    return json.loads(path.read_text(encoding="utf-8"))
