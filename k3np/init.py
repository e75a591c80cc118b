"""Random parameters: where training starts, and what tests run on."""
import dataclasses

import numpy as np

from k3np.count import parameter_shapes
from k3np.tree import nest


def init_params(cfg, rng, dtype=np.float64):
    """Random parameters of a model, as a tree under the released names.

    Matrices are normal with cfg.initializer_range (Released); norms are one; queries of Attention
    Residuals are zero, so that depth begins as a plain mean, and so is A_log (Report). How the
    decay bias begins is Unknown: here each channel's half-life is drawn, evenly in its logarithm,
    between 1 and 1000 tokens.

    Args: cfg, K3Config; rng, np.random.Generator; dtype of the arrays.
    Returns: nested dict; nothing in it is packed or padded.
    Source: report §2.1, §2.2 and §3; the released initializer_range.
    """
    flat = {}
    for name, (shape, _) in parameter_shapes(
            dataclasses.replace(cfg, quantization_config=None)).items():
        flat[name] = _draw(name.removesuffix(".weight").rsplit(".", 1)[-1], shape, cfg,
                           rng).astype(dtype)
    return nest(flat)


def _draw(name, shape, cfg, rng):
    lower = cfg.linear_attn_config.gate_lower_bound
    if name == "dt_bias" and lower is not None:          # e^(lower sigmoid(bias)) halves in `half`
        half = 10 ** rng.uniform(0, 3, shape)
        share = np.log(2) / -lower / half
        return np.log(share) - np.log1p(-share)
    if name in ("A_log", "dt_bias", "e_score_correction_bias") or name.endswith("res_proj"):
        return np.zeros(shape)
    if "norm" in name:
        return np.ones(shape)
    if name.endswith("_conv1d"):                         # torch's default for a width of 4
        return rng.uniform(-1, 1, shape) / np.sqrt(shape[-1])
    return rng.normal(0, cfg.initializer_range, shape)
