"""Parameter trees: nested dicts whose keys are the released tensor names."""
import numpy as np


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


def map_tree(f, tree):
    """Apply f to each array of nested dicts."""
    if isinstance(tree, dict):
        return {key: map_tree(f, child) for key, child in tree.items()}
    return f(tree)


def merge(a, b):
    """Union of two trees; where both have an array, their sum. Cotangents of shared parameters."""
    if not isinstance(a, dict):
        return a + b
    return {key: merge(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key))
            for key in {**a, **b}}


def fill(tree, like):
    """`tree` with zeros for what `like` has and it lacks: parameters that took no part."""
    if not isinstance(like, dict):
        return np.zeros_like(like) if tree is None else tree
    return {key: fill(None if tree is None else tree.get(key), child)
            for key, child in like.items()}
