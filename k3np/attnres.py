"""Attention Residuals: each sub-layer reads a learned mixture over depth, not a running sum.

A model is a row of sub-layers (attention and feed-forward count separately). What they wrote lies
in a `Depth`: the finished blocks, and the sum of the block that is being written. One number tells
the three forms apart, the block size in sub-layers: `None` never finishes a block, which is an
ordinary residual stream; 1 finishes one each time, which is full AttnRes; K3 has 24 (12 layers).
"""
import collections
from typing import Any, NamedTuple

import numpy as np

from k3np.ops import check_floats, differentiable, softmax


class Depth(NamedTuple):
    """What sub-layers wrote: `blocks`, finished sources [B,T,d], oldest first, the embedding first
    of all; `partial`, the running sum [B,T,d], None between `begin_block` and the next `add`."""
    blocks: tuple
    partial: Any


class InterBlock(NamedTuple):
    """Softmax over finished blocks, not divided yet, for Q queries: `top` [Q,B,T], the largest
    logit; `total` [Q,B,T], sum of e^(logit - top); `mixed` [Q,B,T,d], the sum weighed by them."""
    top: Any
    total: Any
    mixed: Any


def _logit(v, u, eps):
    """Logits of one source against combined queries, and 1 / rms. v [B,T,d]; u [d] or [d,Q]."""
    r = 1 / np.sqrt((v * v).mean(axis=-1) + eps)                         # [B,T,d] -> [B,T]
    return v @ u * (r if u.ndim == 1 else r[..., None]), r


def depth_weights(sources, norm_weight, query, eps=1e-5):
    """Share of each source in the mixture: softmax over depth of <query, RMSNorm(source)>.

    Args: as `attn_res`. Returns: [n,B,T], summing to one over the first axis.
    """
    u = _combine(sources, norm_weight, query)
    return softmax(np.stack([_logit(v, u, eps)[0] for v in sources]), axis=0)


@differentiable
def attn_res(sources, norm_weight, query, eps=1e-5):
    """Mix sources over depth: h = sum_i p_i v_i, p = softmax_i <w, g v_i / rms(v_i)>.

    Keys are normalised, values are not, and nothing divides by sqrt(d).

    Args: sources, list of n arrays [B,T,d]; norm_weight g [d]; query w [d] or [1,d], the learned
        pseudo-query; eps on the mean of squares.
    Returns: h [B,T,d]. The pullback gives a tuple with a cotangent for each source.
    Raises: ValueError for no source and for shapes or dtypes that do not agree.
    Source: report §2.2; _apply_attn_res of the released code; naive_attnres of
        flash-linear-attention.
    Departs: g and w are multiplied first and no source is copied; the numbers are the same.
    """
    u = _combine(sources, norm_weight, query)                            # [d]
    logits, rs = zip(*(_logit(v, u, eps) for v in sources))
    p, pull_softmax = softmax.vjp(np.stack(logits), axis=0)              # n [B,T] -> [n,B,T]
    mixed = sum(p_i[..., None] * v for p_i, v in zip(p, sources))

    def pullback(ct):
        ct_logits = pull_softmax(np.stack([(ct * v).sum(axis=-1) for v in sources]))[0]
        ct_sources, ct_u = [], 0
        for v, r, z, p_i, ct_z in zip(sources, rs, logits, p, ct_logits):
            slope = (ct_z * r)[..., None]
            ct_sources.append(p_i[..., None] * ct
                              + slope * (u - (z * r / u.size)[..., None] * v))
            ct_u = ct_u + (slope * v).reshape(-1, u.size).sum(axis=0)
        return (tuple(ct_sources), ct_u * np.reshape(query, -1),
                (ct_u * norm_weight).reshape(np.shape(query)), None)
    return mixed, pullback


def start(embedding):
    """Depth before the first sub-layer: no finished block; the embedding [B,T,d] is the sum."""
    return Depth((), embedding)


def starts_block(sublayer, block_size):
    """Whether the sum is finished after the mixture of this sub-layer (zero-based) was taken.

    Args: sublayer, 2 layer for attention and 2 layer + 1 for the feed-forward; block_size in
        sub-layers, None for never.
    """
    return block_size is not None and sublayer % block_size == 0


def sources_of(state):
    """Sources in order: the finished blocks, then the running sum if there is one."""
    return [*state.blocks] + ([] if state.partial is None else [state.partial])


@differentiable
def mix(state, norm_weight, query, eps=1e-5):
    """`attn_res` over the sources of a Depth; its pullback gives a Depth of cotangents.

    Args: state, Depth; norm_weight [d]; query [d] or [1,d]; eps.
    Returns: h [B,T,d], the input of the next sub-layer (or of the final norm).
    """
    h, pull = attn_res.vjp(sources_of(state), norm_weight, query, eps)

    def pullback(ct):
        ct_sources, *rest = pull(ct)
        n = len(state.blocks)
        return Depth(ct_sources[:n], None if state.partial is None else ct_sources[n]), *rest
    return h, pullback


@differentiable
def begin_block(state):
    """Finish the running sum: it becomes a block, and the next `add` starts a new sum."""
    if state.partial is None:
        raise ValueError("begin_block: nothing was added since the last block began")
    value = Depth((*state.blocks, state.partial), None)
    return value, lambda ct: (Depth(tuple(ct.blocks[:-1]), ct.blocks[-1]),)


@differentiable
def add(state, out):
    """Add a sub-layer's output [B,T,d] to the running sum, or begin the sum with it."""
    new = state.partial is None
    value = Depth(state.blocks, out if new else state.partial + out)
    return value, lambda ct: (Depth(tuple(ct.blocks), None if new else ct.partial), ct.partial)


def plus(a, b):
    """Sum of two cotangents of one Depth; None is zero. A state that was read twice needs it."""
    def total(x, y):
        return y if x is None else x if y is None else x + y
    if len(a.blocks) != len(b.blocks):
        raise ValueError(f"plus: {len(a.blocks)} blocks and {len(b.blocks)}")
    return Depth(tuple(map(total, a.blocks, b.blocks)), total(a.partial, b.partial))


def run(embedding, norm_weights, queries, branches, block_size, eps=1e-5):
    """Run a row of sub-layers, each on its mixture over depth, and take the output's mixture.

    Args: embedding [B,T,d]; norm_weights, queries [n+1,d], the last for the output; branches, n
        functions [B,T,d] -> [B,T,d]; block_size in sub-layers: None, 1 (full) or more (block).
    Returns: (list of the n+1 mixtures [B,T,d], the final Depth).
    """
    state, mixtures = start(embedding), []
    for s, branch in enumerate(branches):
        mixtures.append(mix(state, norm_weights[s], queries[s], eps))
        if starts_block(s, block_size):
            state = begin_block(state)
        state = add(state, branch(mixtures[-1]))
    return [*mixtures, mix(state, norm_weights[-1], queries[-1], eps)], state


def run_two_phase(embedding, norm_weights, queries, branches, block_size, eps=1e-5):
    """`run`, but finished blocks are read once for all queries of a block. Same arguments, result.

    Source: report §5.4.2; Algorithm 1 of the AttnRes report.
    """
    state, mixtures, stats, first = start(embedding), [], None, 0
    for s in range(len(branches) + 1):
        mixtures.append(state.partial if stats is None else merge(
            stats, s - first, state.partial, norm_weights[s], queries[s], eps))
        if s == len(branches):
            return mixtures, state
        if starts_block(s, block_size):
            state, first = begin_block(state), s + 1
            group = slice(first, first + block_size)     # the next block's first query included
            stats = inter_block(state.blocks, norm_weights[group], queries[group], eps)
        state = add(state, branches[s](mixtures[-1]))


def inter_block(blocks, norm_weights, queries, eps=1e-5):
    """Phase 1: attend to the finished blocks with all queries that will meet just these.

    Args: blocks, N arrays [B,T,d]; norm_weights, queries [Q,d]. Returns: InterBlock.
    """
    if not blocks:
        raise ValueError("inter_block: no finished block; begin one before phase 1")
    u = (norm_weights * queries).T                                       # [d,Q]
    logits = np.stack([_logit(v, u, eps)[0] for v in blocks])            # [N,B,T,Q]
    top = logits.max(axis=0)
    e = np.moveaxis(np.exp(logits - top), -1, 1)                         # [N,Q,B,T]
    mixed = sum(e_n[..., None] * v for e_n, v in zip(e, blocks))         # [Q,B,T,d]
    return InterBlock(np.moveaxis(top, -1, 0), e.sum(axis=0), mixed)


def merge(stats, i, partial, norm_weight, query, eps=1e-5):
    """Phase 2: fold the running sum into row i of phase 1 by one step of an online softmax.

    Args: stats, InterBlock; i, which of its queries; partial [B,T,d]; norm_weight, query [d].
    Returns: h [B,T,d], equal to the direct mixture.
    """
    logit = _logit(partial, norm_weight * np.reshape(query, -1), eps)[0]
    top = np.maximum(stats.top[i], logit)
    old, new = np.exp(stats.top[i] - top), np.exp(logit - top)           # [B,T], both <= 1
    mixed = old[..., None] * stats.mixed[i] + new[..., None] * partial
    return mixed / (old * stats.total[i] + new)[..., None]


def _combine(sources, norm_weight, query):
    """Check what is mixed and return norm_weight * query [d]."""
    if not len(sources):
        raise ValueError("attn_res needs at least one source; the embedding is the first")
    shape = np.shape(sources[0])
    for i, v in enumerate(sources):
        if np.shape(v) != shape:
            raise ValueError(f"sources[{i}] has shape {np.shape(v)} and sources[0] {shape}; "
                             "sources of one mixture share their shape")
    if np.shape(norm_weight) != shape[-1:]:
        raise ValueError(f"norm_weight has shape {np.shape(norm_weight)}; expected "
                         f"{shape[-1:]}, the width of the sources {shape}")
    if np.shape(query) not in (shape[-1:], (1, *shape[-1:])):
        raise ValueError(f"query has shape {np.shape(query)}; expected {shape[-1:]} or "
                         f"{(1, *shape[-1:])}, the width of the sources {shape}")
    check_floats(norm_weight=norm_weight, query=query,
                 **{f"sources[{i}]": v for i, v in enumerate(sources)})
    return norm_weight * np.reshape(query, -1)


# What it costs: each closed form has a simulation beside it that moves named vectors and counts.

def io_vectors(form, n_blocks=8, block_size=24):
    """Vectors of width d read and written a token and sub-layer, layers' own traffic left out.

    Args: form, "residual" (3), "block" (N/S + 5) or "full" (S + N), the last two in two phases;
        n_blocks N; block_size S in sub-layers. Source: Table 1 of the AttnRes report.
    """
    return {"residual": 3, "block": n_blocks / block_size + 5,
            "full": block_size + n_blocks}[form]


def count_io(form, n_blocks=8, block_size=24):
    """Walk through one block, in which n_blocks sources wait, and count what crosses the memory.

    "block" has n_blocks finished sources; "full" has the outputs of n_blocks - 1 earlier blocks.
    A mixture goes straight into the next norm and is not written.

    Returns: list of (reads, writes), one for each of the block_size sub-layers; phase 1 is shared
        out evenly. The closed form is their mean ("full": the last, which has most to read).
    """
    n_far = {"residual": 0, "block": n_blocks, "full": (n_blocks - 1) * block_size}[form]
    memory, moved = {("far", i) for i in range(n_far)} | {"sum"}, collections.Counter()

    def read(name):
        if name not in memory:
            raise KeyError(f"{name} is read before it is written")
        moved["read"] += 1

    def write(name):
        memory.add(name)
        moved["write"] += 1
    if form != "residual":                                               # phase 1
        for i in range(n_far):
            read(("far", i))
        for s in range(block_size):
            write(("phase 1", s))
    shared, counts = dict(moved), []
    for s in range(block_size):                                          # phase 2
        moved.clear()
        memory.add(("out", s - 1))                                       # written by its layer
        if form != "residual":
            read(("phase 1", s))
        near = [("out", j) for j in range(s)] if form == "full" else ["sum", ("out", s - 1)]
        for name in near:
            read(name)
        if form != "full":
            write("sum")
        counts.append(tuple(shared.get(kind, 0) / block_size + moved[kind]
                            for kind in ("read", "write")))
    return counts


def blocks_n_bytes(n_tokens, n_blocks=8, d=7168, n_bytes=2, n_shards=1):
    """Bytes that the block vectors of n_tokens take on each of n_shards devices."""
    return n_blocks * n_tokens * d * n_bytes // n_shards


def pipeline_blocks(n_stages, n_virtual, per_chunk=1, cached=True):
    """Block vectors sent a token through an interleaved pipeline, forward.

    C = P V chunks; naive C(C-1)/2 N; with a cache on each stage [P(P-1)/2 + (V-1) P²] N.

    Args: n_stages P; n_virtual V, chunks a stage; per_chunk N, blocks finished in a chunk; cached,
        whether a stage keeps what it received. Source: §4.1 of the AttnRes report, report §5.2.2.
    """
    chunks = n_stages * n_virtual
    hops = (n_stages * (n_stages - 1) // 2 + (n_virtual - 1) * n_stages ** 2 if cached
            else chunks * (chunks - 1) // 2)
    return hops * per_chunk


def count_pipeline(n_stages, n_virtual, per_chunk=1, cached=True, keep_own=False):
    """Send blocks along the chunks 0..PV-1, chunk c on stage c mod P; count them hop by hop.

    Args: as `pipeline_blocks`; keep_own, whether a stage keeps also the blocks that it made.
    Returns: list of the number of blocks sent at each of the PV - 1 hops.
    """
    made, cache, hops = [], [set() for _ in range(n_stages)], []
    for chunk in range(n_stages * n_virtual):
        mine = cache[chunk % n_stages]
        if chunk:
            sent = [b for b in made if not (cached and b in mine)]
            mine.update(sent)
            hops.append(len(sent))
        new = [(chunk, i) for i in range(per_chunk)]
        made += new
        if keep_own:
            mine.update(new)
    return hops
