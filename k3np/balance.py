"""Choosing k of E experts for every token, and the bias that gives experts equal loads.

A router scores every expert for every token. A bias [E] is added to choose, and only to choose:
what an expert's output is weighted by are the scores themselves. Quantile Balancing finds the next
bias from a batch in one step. What it replaced stands at the end, under the same signature.
"""
from typing import Any, NamedTuple

import numpy as np

from k3np.ops import check_floats, differentiable


class Assignment(NamedTuple):
    """What `balanced_assignment` found: `indices` [m,k]; `bias` [E], under which each token's top
    k are just these; `loads` [E]; `n_sweeps`, how often both sides took their turn."""
    indices: Any
    bias: Any
    loads: Any
    n_sweeps: int


@differentiable
def route(scores, bias, top_k, n_group=1, topk_group=1, renormalise=True, scale=1.0):
    """Choose the top_k experts of score + bias; weigh them by their scores. The report's Eq. 13.

    T = argtop-k(s + b);  p_j = scale s_j / (sum over T of s + 1e-20). Ties: the experts come by
    score + bias, descending, and among equals by index, ascending; so does the cut.

    Args: scores [..., E]; bias [E]; n_group, topk_group: with more than one group, a token chooses
        inside the topk_group groups whose two best experts have the largest sum of score + bias
        (K3 has one group); renormalise, whether to divide by the sum (never at top_k = 1).
    Returns: (indices [..., k], weights [..., k]).
    Raises: ValueError for top_k >= E, no tokens, scores or a bias that are not finite, groups that
        do not divide E or cannot hold top_k.
    Source: report §2.3.3; KimiMoEGate of the released code, whose order of ties is undefined.
    Departs: experts of a group that was not chosen are out for good; the released code gives them
        a score of 0, which beats a chosen group's negative score + bias.
    """
    _check(scores, bias, top_k)
    if n_group < 1:
        raise ValueError(f"n_group={n_group} must be at least 1")
    biased = scores + bias
    if n_group > 1:
        biased = _keep_groups(biased, n_group, topk_group, top_k)
    indices = _top(biased, top_k)                                        # [..., E] -> [..., k]
    chosen = np.take_along_axis(scores, indices, axis=-1)
    divide = renormalise and top_k > 1
    total = chosen.sum(axis=-1, keepdims=True) + 1e-20 if divide else 1
    weights = scale * chosen / total

    def pullback(ct):
        ct_chosen = np.zeros_like(weights) if ct[1] is None else scale * ct[1] / total
        if divide:
            ct_chosen = ct_chosen - (ct_chosen * chosen).sum(axis=-1, keepdims=True) / total
        ct_scores = np.zeros_like(scores)
        np.put_along_axis(ct_scores, indices, ct_chosen, axis=-1)
        return ct_scores, None, None, None, None, None, None
    return (indices, weights), pullback


def _top(x, k):
    """Indices of the k largest, by value descending and then by index: [..., E] -> [..., k]."""
    rows = x.reshape(-1, x.shape[-1])
    keep = rows >= _largest(rows, k - 1, axis=1)[:, None]
    tied = np.flatnonzero(keep.sum(axis=1) > k)          # equals on both sides of the cut: sort
    keep[tied[:, None], np.argsort(-rows[tied], axis=1, kind="stable")[:, k:]] = False
    indices = np.nonzero(keep)[1].reshape(-1, k)
    order = np.argsort(-np.take_along_axis(rows, indices, axis=1), axis=1, kind="stable")
    return np.take_along_axis(indices, order, axis=1).reshape(*x.shape[:-1], k)


def _keep_groups(biased, n_group, topk_group, top_k):
    """Put -inf wherever an expert's group is not among the topk_group best of its token."""
    E = biased.shape[-1]
    size = E // n_group
    if E % n_group or size < 2 or not 1 <= topk_group <= n_group or topk_group * size < top_k:
        raise ValueError(f"n_group={n_group}, topk_group={topk_group}: groups must divide E={E}, "
                         f"hold at least two experts each, and the chosen ones top_k={top_k}")
    grouped = biased.reshape(*biased.shape[:-1], n_group, size)
    best = np.partition(grouped, size - 2, axis=-1)[..., -2:].sum(axis=-1)
    out = np.ones(best.shape, bool)
    np.put_along_axis(out, _top(best, topk_group), False, axis=-1)
    return np.where(out[..., None], -np.inf, grouped).reshape(biased.shape)


def expert_loads(indices, n_experts):
    """Tokens of each expert: indices [..., k] -> [E], whole numbers that sum to tokens times k."""
    return np.bincount(np.reshape(indices, -1), minlength=n_experts).astype(np.int64)


def max_violation(loads):
    """How far the fullest expert exceeds the mean load: max / mean - 1; zero when balanced."""
    return float(loads.max() / loads.mean() - 1)


def load_variation(loads):
    """Coefficient of variation of the loads: standard deviation / mean; zero when balanced."""
    return float(loads.std() / loads.mean())


def dead_experts(loads):
    """Number of experts that no token chose."""
    return int((loads == 0).sum())


def cutoffs(scores, bias, top_k):
    """The (k+1)-th largest score + bias of each token: what an expert must beat. [...,E] -> [m]."""
    tokens = _check(scores, bias, top_k)
    return _largest(tokens + bias, top_k, axis=1)


def quantile_bias(scores, bias, top_k, centre=True):
    """Next bias by the exact rule of Quantile Balancing: one expert's quantile of margins.

    b_j = -quantile_{1-k/E} over tokens of (s_ij - alpha_i), less its mean. The report's Eq. 14.
    With q = m k / E the quantile is the (q+1)-th largest of the m margins (q rounded down).

    Args: scores [..., E] of all m tokens of a step; bias [E], with which they were routed, found
        only in the cutoffs alpha; centre, whether to subtract the mean over experts, which no
        choice depends on.
    Returns: [E], for the next step: a batch is never routed by its own bias.
    Raises: ValueError as `route`.
    Source: report §2.3.3 and App. C.
    """
    tokens = _check(scores, bias, top_k)
    margins = tokens - _largest(tokens + bias, top_k, axis=1)[:, None]   # [m,E]
    q = len(tokens) * top_k // len(bias)
    return _centred(-_largest(margins, q, axis=0), centre)


def histogram_counts(scores, bias, top_k, n_bins=1000, chunk=1024):
    """Count required biases alpha_i - s_ij in n_bins equal bins over [min b - 1, max b + 1].

    Counts add: those of a batch are the sum of its parts', whole number by whole number, so that
    it does not matter how tokens lie on devices or in micro-batches.

    Args: scores [..., E] in [0, 1], or an iterable of such parts; bias [E]; chunk, tokens looked
        at together: memory grows with chunk E + n_bins E and not with the number of tokens.
    Returns: [E, n_bins], int64; each row sums to the number of tokens, which may be 0.
    Raises: ValueError as `route`, and for scores outside [0, 1], which the range rests on.
    Source: report App. D.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least one token")
    E, (low, width) = len(bias), _bins(bias, n_bins)
    counts, first = np.zeros(E * n_bins, np.int64), np.arange(E) * n_bins
    for part in [scores] if isinstance(scores, np.ndarray) else scores:
        tokens = _check(part, bias, top_k, empty=True)
        for start in range(0, len(tokens), chunk):
            s = tokens[start:start + chunk]
            if s.min() < 0 or s.max() > 1:
                raise ValueError(f"scores lie in [{s.min():.4g}, {s.max():.4g}]; the histogram's "
                                 "range holds for [0, 1]: pass the sigmoid, not the logits")
            required = _largest(s + bias, top_k, axis=1)[:, None] - s
            at = np.minimum((required - low) / width, n_bins - 1).astype(np.intp)
            counts += np.bincount((np.maximum(at, 0) + first).ravel(), minlength=E * n_bins)
    return counts.reshape(E, n_bins)


def bias_from_counts(counts, bias, top_k, centre=True):
    """Next bias from pooled counts: the q-th smallest required bias, linear within its bin.

    Args: counts [E, n_bins] of `histogram_counts`, summed over all parts; bias [E], the one that
        they were counted with; centre as in `quantile_bias`.
    Returns: [E]. Before centring, at most one bin's width (max b - min b + 2) / n_bins from the
        q-th smallest required bias of the m tokens, q = m k / E (rounded up).
    Raises: ValueError for counts of no tokens, or of differing numbers of tokens.
    Source: report App. D.
    """
    if not 1 <= top_k < len(bias):
        raise ValueError(f"top_k={top_k} must be at least 1 and less than the number of experts, "
                         f"{len(bias)}")
    n_tokens = counts.sum(axis=1)
    if len(counts) != len(bias) or n_tokens[0] == 0 or (n_tokens != n_tokens[0]).any():
        raise ValueError(f"counts has shape {counts.shape} and rows that sum to {n_tokens.min()} "
                         f"to {n_tokens.max()}; expected a row for each of {len(bias)} experts "
                         "and in each the same number of tokens, at least one")
    q = int(n_tokens[0]) * top_k / len(bias)
    up_to = counts.cumsum(axis=1)
    at = (up_to >= q).argmax(axis=1)[:, None]                            # first bin to reach q
    inside = np.take_along_axis(counts, at, axis=1)
    before = np.take_along_axis(up_to, at, axis=1) - inside
    low, width = _bins(bias, counts.shape[1])
    value = low + (at + np.clip((q - before) / inside, 0, 1))[:, 0] * width
    return _centred(value.astype(bias.dtype), centre)


def histogram_bias(scores, bias, top_k, n_bins=1000, centre=True):
    """Next bias as K3 estimates it: `bias_from_counts` of `histogram_counts`. Args as there."""
    return bias_from_counts(histogram_counts(scores, bias, top_k, n_bins), bias, top_k, centre)


def balanced_assignment(scores, top_k, n_sweeps=1000, middle=True):
    """Assign k experts to each token and m k / E tokens to each expert, for the largest score.

    Alternates both sides of the dual, min over alpha, beta of sum max(0, s_ij - alpha_i - beta_j)
    + k sum alpha_i + (m k / E) sum beta_j, with beta = -bias: the report's Alg. 1. Loads that come
    out equal prove the assignment to be a best one.

    Args: scores [m,E]; n_sweeps, the most; middle, whether a side goes to the middle of all its
        minimisers. False takes their end, the (k+1)-th and (q+1)-th largest.
    Returns: Assignment. Its loads are unequal if n_sweeps did not do, or scores tie.
    Raises: ValueError as `route`, and when E does not divide m k.
    Source: report App. C.
    Departs: the middle. From the end of the interval the two sides stop each other: a token whose
        cutoff is expert j has a margin of exactly -b_j, and the threshold stays on such tokens.
    """
    m, E = np.shape(scores)
    bias = np.zeros(E, scores.dtype)
    _check(scores, bias, top_k)
    if m * top_k % E:
        raise ValueError(f"m={m} tokens times top_k={top_k} do not share out evenly over E={E}")
    q = m * top_k // E

    def minimiser(x, rank, axis):
        end = _largest(x, rank, axis)
        return (end + _largest(x, rank - 1, axis)) / 2 if middle else end
    for sweep in range(n_sweeps + 1):
        indices = _top(scores + bias, top_k)
        loads, before = expert_loads(indices, E), bias
        if (loads == q).all() or sweep == n_sweeps:
            break
        alpha = minimiser(scores + bias, top_k, axis=1)
        bias = _centred(-minimiser(scores - alpha[:, None], q, axis=0))
        if np.array_equal(bias, before):
            break
    return Assignment(indices, bias, loads, sweep)


# What Quantile Balancing replaced.

def sign_bias(scores, bias, top_k, rate=1e-3):
    """Next bias of auxiliary-loss-free balancing: b_j + rate sign(mean load - load_j).

    A step of sign descent on the dual of `balanced_assignment`: load_j is its slope in b_j.
    Args: as `quantile_bias`; rate, how far every bias moves. Source: DeepSeek-V3.
    """
    loads = expert_loads(route(scores, bias, top_k)[0], len(bias))
    return bias + (rate * np.sign(loads.mean() - loads)).astype(bias.dtype)


def bip_bias(scores, bias, top_k):
    """Next bias when loads are only capped, not equal: both sides of the dual kept at 0 or above.

    alpha_i = max(0, (k+1)-th largest of s_i + b);  b_j = -max(0, (q+1)-th largest margin).
    Args, returns: as `quantile_bias`; the bias is never positive, hence not centred.
    Source: BIP-based balancing, arXiv:2502.15451, one sweep.
    """
    tokens = _check(scores, bias, top_k)
    alpha = np.maximum(_largest(tokens + bias, top_k, axis=1), 0)
    q = len(tokens) * top_k // len(bias)
    return -np.maximum(_largest(tokens - alpha[:, None], q, axis=0), 0)


@differentiable
def auxiliary_loss(scores, bias, top_k):
    """A loss whose slope pushes scores down where loads are high: sum_j f_j P_j.

    f_j = E load_j / (k m), 1 when balanced; P_j = mean over tokens of s_ij / sum_r s_ir.
    Args: as `quantile_bias`. Returns: a scalar, 1 when balanced. The pullback takes loads as fixed.
    Source: DeepSeek-V2 and -V3; the Switch Transformer for k = 1.
    """
    tokens = _check(scores, bias, top_k)
    (m, E), total = tokens.shape, tokens.sum(axis=1, keepdims=True)
    f = E / (top_k * m) * expert_loads(route(tokens, bias, top_k)[0], E).astype(scores.dtype)
    share = tokens / total

    def pullback(ct):
        ct_tokens = ct / m * (f - (share @ f)[:, None]) / total
        return ct_tokens.reshape(scores.shape), None, None
    return share.mean(axis=0) @ f, pullback


def _check(scores, bias, top_k, empty=False):
    """Refuse what cannot be routed; give scores as rows [m,E]."""
    E = np.shape(scores)[-1] if np.ndim(scores) else 0
    if np.shape(bias) != (E,):
        raise ValueError(f"bias has shape {np.shape(bias)}; expected [{E}], one number for each "
                         f"expert of scores {np.shape(scores)}")
    if not 1 <= top_k < E:
        raise ValueError(f"top_k={top_k} must be at least 1 and less than the number of experts, "
                         f"{E} in scores {np.shape(scores)}")
    if scores.size == 0 and not empty:
        raise ValueError(f"scores has shape {scores.shape}: there are no tokens to route")
    check_floats(scores=scores, bias=bias)
    for name, array in (("scores", scores), ("bias", bias)):
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinity; there is no order among experts then")
    return scores.reshape(-1, E)


def _largest(x, rank, axis):
    """The entry of `rank` along an axis, the largest having rank 0."""
    at = x.shape[axis] - 1 - rank
    return np.take(np.partition(x, at, axis=axis), at, axis=axis)


def _bins(bias, n_bins):
    """Lower end and width of the histogram's bins. Scores in [0, 1] cannot leave their range."""
    if n_bins < 1:
        raise ValueError(f"n_bins={n_bins} must be at least 1")
    low, high = float(bias.min()) - 1, float(bias.max()) + 1
    return low, (high - low) / n_bins


def _centred(bias, centre=True):
    return bias - bias.mean() if centre else bias
