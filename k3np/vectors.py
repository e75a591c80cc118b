"""Golden vectors: cases made by other people's code, read in this package's layout."""
import json
import pathlib

import numpy as np


def _folder():
    here = pathlib.Path(__file__).resolve().parent.parent
    for folder in (here / "tests" / "golden", pathlib.Path("../tests/golden"),
                   pathlib.Path("tests/golden")):
        if folder.is_dir():
            return folder
    raise FileNotFoundError("no folder tests/golden beside the package or the notebook: "
                            "golden cases come with the repository, not with the wheel")


def nest(flat):
    """Turn released names into a parameter tree.

    A name is split at its dots. A module whose only tensor is `weight` becomes that array
    (`q_proj.weight` -> tree["q_proj"]); experts are stacked (`experts.0.w1.weight`, ... ->
    tree["experts"]["w1"] [E, ...]).

    Args: flat, dict from released tensor name to array.
    Returns: nested dict of arrays.
    """
    tree = {}
    for name, array in flat.items():
        node = tree
        *modules, last = name.split(".")
        for module in modules:
            node = node.setdefault(module, {})
        node[last] = array
    return _collapse(tree)


def _collapse(node):
    if not isinstance(node, dict):
        return node
    if set(node) == {"weight"}:
        return node["weight"]
    node = {key: _collapse(child) for key, child in node.items()}
    experts = node.get("experts")
    if isinstance(experts, dict) and experts and all(key.isdigit() for key in experts):
        node["experts"] = {w: np.stack([experts[str(e)][w] for e in range(len(experts))])
                           for w in experts["0"]}
    return node


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
