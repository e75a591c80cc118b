"""What the tests share: relative error, and a gradient check by one directional derivative."""
import inspect

import numpy as np


def rel(a, b):
    """Largest absolute difference over the largest absolute value of the reference `b`."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape} differ"
    assert np.isfinite(a).all(), "a value is not finite"
    return float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-300))


def leaves(tree):
    """Arrays of a nested structure of dicts, tuples, lists and None, in a fixed order."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, (tuple, list)):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree]


def map_tree(f, tree):
    """Apply f to each float array of a nested structure; leave everything else as it is."""
    if isinstance(tree, dict):
        return {key: map_tree(f, child) for key, child in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(f, child) for child in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tree(f, child) for child in tree)
    if isinstance(tree, (np.ndarray, np.floating)) and np.asarray(tree).dtype.kind == "f":
        return f(np.asarray(tree))
    return tree


def dot(tree, other):
    """Sum of products of two structures; None on either side counts as zero."""
    if tree is None or other is None:
        return 0.0
    if isinstance(tree, dict):
        return sum(dot(tree[key], other.get(key)) for key in tree)
    if isinstance(tree, (tuple, list)):
        return sum(dot(a, b) for a, b in zip(tree, other, strict=True))
    if np.asarray(tree).dtype.kind != "f":
        return 0.0
    assert np.shape(tree) == np.shape(other), f"{np.shape(tree)} against {np.shape(other)}"
    return float((np.asarray(tree) * np.asarray(other)).sum())


def same(a, b):
    return len(leaves(a)) == len(leaves(b)) and all(
        np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b)))


def check_grad(f, *args, wrt=None, seed=0, step=1e-6, tol=1e-6, **kwargs):
    """Hold f's pullback against one central difference along a random direction, in float64.

    Also: the pullback has one entry per parameter, gives the same answer twice, and leaves the
    arguments and the cotangent as they were. `wrt` lists the positions to vary (default: every
    argument for which the pullback returns a cotangent).
    """
    rng = np.random.default_rng(seed)
    before = map_tree(np.copy, args)
    value, pullback = f.vjp(*args, **kwargs)
    ct = map_tree(lambda a: rng.standard_normal(a.shape), value)
    ct_before = map_tree(np.copy, ct)
    grads, again = pullback(ct), pullback(ct)
    assert isinstance(grads, tuple), "a pullback returns a tuple"
    parameters = [p for p in inspect.signature(f).parameters.values()
                  if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert len(grads) == len(parameters), f"{len(grads)} cotangents, {len(parameters)} parameters"
    assert same(grads, again), "the second call of the pullback differs"
    assert same(before, args), "the arguments were changed"
    assert same(ct, ct_before), "the cotangent was changed"
    wrt = [i for i in range(len(args)) if grads[i] is not None] if wrt is None else wrt
    assert wrt, "no argument has a gradient"
    direction = [map_tree(lambda a: rng.standard_normal(a.shape), a) if i in wrt else None
                 for i, a in enumerate(args)]

    def shifted(t):
        def move(a, d):
            if isinstance(a, dict):
                return {key: move(a[key], d[key]) for key in a}
            if isinstance(a, (tuple, list)):
                children = [move(x, y) for x, y in zip(a, d)]
                return type(a)(*children) if hasattr(a, "_fields") else type(a)(children)
            return a + t * d if np.asarray(a).dtype.kind == "f" else a
        return [a if direction[i] is None else move(a, direction[i]) for i, a in enumerate(args)]
    numeric = (dot(f(*shifted(step), **kwargs), ct)
               - dot(f(*shifted(-step), **kwargs), ct)) / (2 * step)
    analytic = sum(dot(direction[i], grads[i]) for i in wrt)
    scale = max(abs(analytic), abs(numeric), 1e-3)
    assert abs(analytic - numeric) < tol * scale, (
        f"{f.__qualname__}: pullback {analytic:.12g}, central difference {numeric:.12g}")
