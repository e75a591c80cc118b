"""The error function, which NumPy lacks, and the two GELUs of the vision path.

The tower's feed-forward uses the tanh approximation, the projector the exact form. They differ by
up to 5e-4: little enough to go unnoticed, and far more than the tolerance of a golden vector.
"""
import math

import numpy as np

from k3np.ops import differentiable

ROOT = math.sqrt(2 / math.pi)


@differentiable
def erf(x):
    """Error function, 2/sqrt(pi) * the integral of e^(-s²) from 0 to x.

    One call of Python's `math.erf` an entry, about 0.1 µs each: the projector has few enough.

    Args: x [...], float32 or float64. Returns: y [...], within -1..1; NaN for NaN.
    """
    flat = memoryview(np.ascontiguousarray(x, np.float64).reshape(-1))  # yields Python floats
    y = np.fromiter(map(math.erf, flat), np.float64, flat.shape[0])
    y = y.reshape(np.shape(x)).astype(x.dtype)
    return y, lambda ct: (ct * (2 / math.sqrt(math.pi)) * np.exp(-x * x),)


@differentiable
def gelu(x):
    """Exact GELU: x Φ(x) = x (1 + erf(x / sqrt 2)) / 2. x [...] -> [...].

    Source: torch.nn.GELU(approximate="none"), in the released projector.
    """
    cdf = (1 + erf(x * math.sqrt(0.5))) / 2

    def pullback(ct):
        density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return (ct * (cdf + x * density),)
    return x * cdf, pullback


@differentiable
def gelu_tanh(x):
    """GELU with a tanh for Φ: x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))) / 2. x [...] -> [...].

    Source: torch.nn.GELU(approximate="tanh"), in the blocks of the released tower.
    """
    t = np.tanh(ROOT * (x + 0.044715 * x * x * x))

    def pullback(ct):
        slope = ROOT * (1 + 3 * 0.044715 * x * x)
        return (ct * ((1 + t) / 2 + x * (1 - t * t) * slope / 2),)
    return x * (1 + t) / 2, pullback
