"""Training through rounding: quantised values forwards, a stand-in for the gradient backwards.

Rounding has slope zero wherever it has one. A straight-through estimator pretends that the
quantiser is the identity ("pass"), or the identity within the range that the block can hold and
constant outside ("clip").
"""
import numpy as np

from k3np.mx.formats import decode_e8m0, find
from k3np.mx.quantize import dequantize, fake_quantize, quantize
from k3np.ops import differentiable, linear

GRADIENTS = ("pass", "clip")


@differentiable
def straight_through(x, fmt="e2m1", rule="floor", axis=-1, block=32, gradient="pass"):
    """Fake quantisation with a straight-through gradient.

    Args: x [...], floats; fmt, rule, axis, block as in `quantize`; gradient, "pass" (the cotangent
        passes unchanged) or "clip" (it is zero where |x| exceeds scale times largest element).
    Returns: y [...], the values that survive quantising, in x's dtype.
    Raises: ValueError for an unknown choice.
    Source: report §4.1.4 for what is quantised; the estimator is Bengio, Léonard and Courville's;
        which variant K3 used is not published.
    """
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient={gradient!r}; known are {', '.join(GRADIENTS)}")
    if gradient == "pass":
        return (fake_quantize(x, fmt, rule, axis, block),
                lambda ct: (ct, None, None, None, None, None))
    mx = quantize(x, fmt, rule, axis, block)
    limit = np.repeat(decode_e8m0(mx.scales, np.float64) * find(fmt).max, block, axis=mx.axis)
    limit = limit[tuple(slice(n) for n in mx.shape)]                 # without the filling
    inside = np.abs(x) <= limit
    return (dequantize(mx, np.asarray(x).dtype),
            lambda ct: (np.where(inside, ct, 0), None, None, None, None, None))


@differentiable
def linear_qat(x, w, x_fmt="e4m3", w_fmt="e2m1", x_rule="floor", w_rule="floor", gradient="pass"):
    """A linear map as quantisation-aware training sees it: y = Q(x) Q(W)ᵀ, blocks along the sum.

    Args: x [..., I]; w [O, I], the master weights; x_fmt, w_fmt, x_rule, w_rule; None as a format
        leaves that operand alone; gradient as in `straight_through`.
    Returns: y [..., O]. The cotangents use the quantised operands, in full precision.
    Source: report §4.1.4: experts' weights in MXFP4, their inputs in MXFP8.
    """
    def quantised(a, fmt, rule):
        if fmt is None:
            return a, lambda ct: (ct,)
        return straight_through.vjp(a, fmt, rule, gradient=gradient)
    xq, pull_x = quantised(x, x_fmt, x_rule)
    wq, pull_w = quantised(w, w_fmt, w_rule)
    y, pull_linear = linear.vjp(xq, wq)                              # [..., I] -> [..., O]

    def pullback(ct):
        ct_x, ct_w = pull_linear(ct)
        return pull_x(ct_x)[0], pull_w(ct_w)[0], None, None, None, None, None
    return y, pullback
