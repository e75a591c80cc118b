"""Small differentiable functions that every part of K3 is built from.

A differentiable function is written once, as NumPy that returns ``(value, pullback)``, and
decorated. Called, it gives the value; its ``.vjp`` gives both. The pullback takes a cotangent
shaped like the value (a tuple for a tuple, ``None`` for zero) and returns a tuple with one entry
for each parameter of the signature: an array, a dict for a dict of parameters, ``None`` for a
choice. It is a pure closure: it may be called twice and changes nothing in place.
"""
import functools

import numpy as np

REGISTRY = {}


def differentiable(fn):
    """Make `fn`, which returns (value, pullback), return the value; keep the pair as `.vjp`."""
    @functools.wraps(fn)
    def value_only(*args, **kwargs):
        return fn(*args, **kwargs)[0]
    value_only.vjp = fn
    REGISTRY[f"{fn.__module__}.{fn.__qualname__}"] = value_only
    return value_only


def unbroadcast(ct, shape):
    """Sum a cotangent over the axes that broadcasting added or stretched.

    Args: ct, an array; shape, the shape that the argument had before broadcasting.
    Returns: an array of that shape.
    """
    extra = ct.ndim - len(shape)
    ct = ct.sum(axis=tuple(range(extra))) if extra else ct
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and ct.shape[i] != 1)
    return ct.sum(axis=stretched, keepdims=True) if stretched else ct


def check_shapes(**arrays):
    """Hold arrays against named shapes and return the sizes.

    Args: name=(array, "B T H K") pairs; a letter means one size everywhere, a number itself, and
        a leading "..." any axes. `None` arrays are passed over.
    Returns: dict from letter to size.
    Raises: ValueError naming the argument, its shape and the expected one.
    """
    sizes, seen = {}, {}
    for name, (array, spec) in arrays.items():
        if array is None:
            continue
        shape, axes = np.shape(array), spec.split()
        if axes[0] == "...":
            axes = axes[1:]
            shape = shape[len(shape) - len(axes):] if len(shape) >= len(axes) else shape
        fits = len(shape) == len(axes)
        known = ", ".join(f"{a}={sizes[a]} (from {seen[a]})" for a in axes if a in sizes)
        for a, n in zip(axes, shape if fits else ()):
            if not a.isdigit() and a not in sizes:
                sizes[a], seen[a] = n, name
            fits = fits and n == (int(a) if a.isdigit() else sizes[a])
        if not fits:
            raise ValueError(f"{name} has shape {np.shape(array)}; expected "
                             f"[{', '.join(spec.split())}]{' with ' + known if known else ''}")
    return sizes


def check_floats(**arrays):
    """Raise ValueError unless every array given (not None) is float32 or float64 and all agree."""
    kinds = {}
    for name, array in arrays.items():
        if array is None:
            continue
        dtype = np.asarray(array).dtype
        if dtype not in (np.float32, np.float64):
            raise ValueError(f"{name} has dtype {dtype}; expected float32 or float64: "
                             f"convert it with {name}.astype(np.float32)")
        kinds[name] = dtype
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{n} {d}" for n, d in kinds.items())
        raise ValueError(f"dtypes differ: {listed}; convert them to one")


@differentiable
def linear(x, w):
    """Apply a weight stored [out, in]: y = x Wᵀ.

    Args: x [..., I]; w [O, I].
    Returns: y [..., O].
    Source: the released checkpoint's layout (torch.nn.Linear without bias).
    """
    y = x @ w.T                                              # [..., I] -> [..., O]

    def pullback(ct):
        flat_ct, flat_x = ct.reshape(-1, w.shape[0]), x.reshape(-1, w.shape[1])
        return ct @ w, flat_ct.T @ flat_x
    return y, pullback


@differentiable
def sigmoid(x):
    """Logistic function 1 / (1 + e^-x), from e^-|x| so that nothing overflows. x [...] -> [...]."""
    e = np.exp(-np.abs(x))
    s = np.where(x >= 0, 1 / (1 + e), e / (1 + e))
    return s, lambda ct: (ct * s * (1 - s),)


@differentiable
def softplus(x):
    """log(1 + e^x) as max(x, 0) + log1p(e^-|x|). x [...] -> [...]."""
    y = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return y, lambda ct: (ct * sigmoid(x),)


@differentiable
def silu(x):
    """x sigmoid(x), also called swish. x [...] -> [...]."""
    s = sigmoid(x)
    return x * s, lambda ct: (ct * s * (1 + x * (1 - s)),)


@differentiable
def softmax(x, axis=-1):
    """e^x / sum e^x along `axis`, the maximum subtracted first; -inf gives an exact zero.

    Args: x [...]; axis, the axis that sums to one. A slice of -inf alone gives NaN.
    Returns: p, shaped like x.
    """
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    p = e / e.sum(axis=axis, keepdims=True)
    return p, lambda ct: (p * (ct - (p * ct).sum(axis=axis, keepdims=True)), None)


@differentiable
def rms_norm(x, w, eps=1e-5):
    """Divide by the root mean square over the last axis, then weigh: w x / sqrt(mean x² + eps).

    Args: x [..., D]; w [D]; eps added to the mean of squares.
    Returns: y [..., D].
    Source: KimiRMSNorm of the released code (the weight multiplies directly, no 1 + w).
    """
    r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)              # [..., 1]
    unit = x * r

    def pullback(ct):
        ct_unit = ct * w
        ct_x = r * (ct_unit - unit * (ct_unit * unit).mean(axis=-1, keepdims=True))
        return ct_x, unbroadcast(ct * unit, np.shape(w)), None
    return unit * w, pullback


@differentiable
def l2_norm(x, eps=1e-6):
    """Divide by the length over the last axis: x / sqrt(sum x² + eps); eps is on the sum.

    Args: x [..., K]. Returns: y [..., K].
    Source: the l2norm of flash-linear-attention that KDA applies to q and k.
    """
    r = 1 / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)
    y = x * r
    return y, lambda ct: (r * (ct - y * (ct * y).sum(axis=-1, keepdims=True)), None)


@differentiable
def causal_conv(x, w, state=None):
    """Depthwise causal convolution of width W: y_t = sum_j w[:, j] x_{t-W+1+j}.

    Args: x [B,T,C]; w [C,1,W] (or [C,W]), its last tap multiplies the current token;
        state [B,W-1,C], the inputs before x (zeros when None).
    Returns: y [B,T,C]. The next state is the last W-1 rows of [state, x].
    Raises: ValueError for shapes that do not agree (some caches keep W rows: pass the last W-1).
    Source: ShortConvolution of the released code, without its SiLU.
    """
    taps = w.reshape(w.shape[0], w.shape[-1])                                # [C,W]
    width, T = taps.shape[1], x.shape[1]
    check_shapes(w=(taps, "C W"), x=(x, "B T C"), state=(state, f"B {width - 1} C"))
    before = np.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype) if state is None else state
    u = np.concatenate([before, x], axis=1)                                  # [B,W-1+T,C]
    y = sum(u[:, j:j + T] * taps[:, j] for j in range(width))

    def pullback(ct):
        ct_u, ct_taps = np.zeros_like(u), np.empty_like(taps)
        for j in range(width):
            ct_u[:, j:j + T] += ct * taps[:, j]
            ct_taps[:, j] = (ct * u[:, j:j + T]).sum(axis=(0, 1))
        ct_state = None if state is None else ct_u[:, :width - 1]
        return ct_u[:, width - 1:], ct_taps.reshape(w.shape), ct_state
    return y, pullback


@differentiable
def cross_entropy(logits, targets, ignore_index=-100):
    """Mean negative log-likelihood of the targets, in nats.

    Args: logits [..., N]; targets [...], integers below N or `ignore_index` (left out).
    Returns: a scalar.
    Raises: ValueError for shapes that do not agree, targets outside the vocabulary, none to count.
    """
    if np.shape(targets) != logits.shape[:-1]:
        raise ValueError(f"targets has shape {np.shape(targets)}; expected {logits.shape[:-1]}, "
                         f"the shape of logits {logits.shape} without its last axis")
    keep = targets != ignore_index
    picked = np.where(keep, targets, 0)
    if not keep.any():
        raise ValueError(f"targets holds only ignore_index={ignore_index}: nothing to average")
    if picked.min() < 0 or picked.max() >= logits.shape[-1]:
        raise ValueError(f"targets must lie in 0..{logits.shape[-1] - 1}; found "
                         f"{picked.min()}..{picked.max()}")
    top = logits.max(axis=-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(log_p, picked[..., None], axis=-1)[..., 0]    # [..., N] -> [...]
    count = int(keep.sum())
    value = -np.where(keep, chosen, 0).sum() / count

    def pullback(ct):
        ct_logits = np.exp(log_p)
        np.put_along_axis(ct_logits, picked[..., None],
                          np.take_along_axis(ct_logits, picked[..., None], -1) - 1, axis=-1)
        return np.where(keep[..., None], ct_logits * (ct / count), 0), None, None
    return value, pullback


def round_bf16(x):
    """Round to bfloat16 (8 bits of significand, ties to even) and keep the array's own dtype.

    Args: x, float32 or float64 of any shape (float64 is rounded to float32 first).
    Returns: an array of the same shape and dtype whose values are exact in bfloat16.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded &= np.uint32(0xFFFF0000)
    values = np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))
    return values.astype(np.asarray(x).dtype).reshape(np.shape(x))
