"""Experts on many ranks: rows are sent to them, computed there, and their outputs come back.

Router, down-projection, norm, up-projection and shared expert run where the token is; only rows of
the latent travel. What travels is real: arrays, or their bytes in a narrower format. How long it
takes is told by a fabric.
"""
from typing import Any, NamedTuple

import numpy as np

from k3np.moe import router
from k3np.mx.quantize import dequantize, quantize
from k3np.ops import check_shapes, linear, rms_norm, round_bf16
from k3np.situ import mlp
from k3np.supernode.collectives import exchange
from k3np.supernode.copies import destinations, relays
from k3np.supernode.engine import routes


class Exchange(NamedTuple):
    """What `expert_parallel_moe` did: `y` [R,S,d]; `loads` [R,E], expert outputs that each rank
    computed; `bytes_out`, `bytes_back`, lists of [R,R] with the bytes from row to column, a matrix
    a stage (two with dedup "node"); what a rank keeps for itself stands on the diagonal."""
    y: Any
    loads: Any
    bytes_out: Any
    bytes_back: Any


class Timing(NamedTuple):
    """Time of an exchange: `time_s` by the fluid engine; `closed_form_s`, fixed times and the
    busiest link's; `bottleneck`, that link's name; `stages`, the Result of each."""
    time_s: float
    closed_form_s: float
    bottleneck: str
    stages: Any


def encode_rows(x, fmt):
    """What is put on the wire: a tuple of arrays whose first axis counts rows.

    Args: x [n,d]; fmt, "mxfp8" (e4m3 and a power of two for each 32), "bf16", or "exact".
    Returns: a tuple; `decode_rows` undoes it.
    """
    if fmt == "mxfp8":
        q = quantize(x, "e4m3")
        return q.codes[:, :x.shape[1]], q.scales
    if fmt == "bf16":
        return ((round_bf16(x.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16),)
    if fmt == "exact":
        return (x,)
    raise ValueError(f"fmt={fmt!r}: rows travel as mxfp8, bf16 or exact")


def decode_rows(message, fmt, dtype):
    """Rows [n,d] from what came over the wire, in the dtype of the computation."""
    if fmt == "mxfp8":
        codes, scales = message
        n, d = codes.shape
        full = np.zeros((n, 32 * scales.shape[1]), np.uint8)
        full[:, :d] = codes
        template = quantize(np.zeros((n, d), np.float32), "e4m3")
        return dequantize(template._replace(codes=full, scales=scales), dtype)
    if fmt == "bf16":
        return (message[0].astype(np.uint32) << 16).view(np.float32).astype(dtype)
    return message[0]


def _n_bytes(message):
    return sum(part.nbytes for part in message)


def expert_parallel_moe(x, p, cfg, dedup="rank", out="exact", back="exact", node=None, quota=None):
    """`latent_moe` with its experts on R ranks and S tokens on each.

    A rank that receives rows adds up, weighted, what its experts make of each, and sends the sum
    back; with dedup "expert" it sends every output, and the token's rank does the weighing. With
    "node" the relay adds up its node's sums before they go back.

    Args: x [R,S,d]; p, cfg, as `latent_moe`, with a latent or without; dedup, node, as
        `count_rows`; out, back, the formats of the rows to the experts and of those from them, as
        `encode_rows`; quota, as `destinations`.
    Returns: Exchange.
    Raises: ValueError for x that is not [R,S,d], experts that R does not divide, unknown choices.
    Source: report §5.2.1 and §5.4.2; DeepEP for the two ways back.
    """
    check_shapes(x=(x, f"R S {cfg.hidden_size}"))
    n_ranks, latent = len(x), cfg.routed_expert_hidden_size
    node, relay = relays(n_ranks, dedup, node)
    routing = router(x, p["gate"], cfg)
    dest = destinations(routing.indices, cfg.num_experts, quota)
    z = linear(x, p["routed_expert_down_proj"]) if latent else x         # [R,S,d] -> [R,S,l]
    loads = np.zeros((n_ranks, cfg.num_experts), np.int64)
    n_stages = 2 if dedup == "node" else 1
    bytes_out, bytes_back = (np.zeros((n_stages, n_ranks, n_ranks), np.int64) for _ in "ob")
    u = np.zeros_like(z)

    def at_experts(q, rows, s, tokens, slots=None):
        """On rank q: rows of tokens of s -> what goes back."""
        here = (dest[s, tokens] == q) if slots is None else np.eye(dest.shape[2], dtype=bool)[slots]
        chosen, sums = routing.indices[s, tokens], np.zeros_like(rows)
        for e in np.unique(chosen[here]):
            i, slot = np.nonzero(here & (chosen == e))
            w = routing.weights[s, tokens[i], slot][:, None] if slots is None else 1
            sums[i] += w * mlp(rows[i], {"gate_proj": p["experts"]["w1"][e],
                                         "up_proj": p["experts"]["w3"][e],
                                         "down_proj": p["experts"]["w2"][e]}, cfg)
            loads[q, e] += len(i)
        return sums

    def send(message, src, dst, ledger):
        ledger[src, dst] += _n_bytes(message)
        return message

    for s in range(n_ranks):
        wire = encode_rows(z[s], out)                    # once a token, whoever gets a copy
        for q in range(n_ranks) if dedup == "expert" else ():
            tokens, slots = np.nonzero(dest[s] == q)
            rows = send(tuple(part[tokens] for part in wire), s, q, bytes_out[0])
            made = at_experts(q, decode_rows(rows, out, z.dtype), s, tokens, slots)
            got = decode_rows(send(encode_rows(made, back), q, s, bytes_back[0]), back, z.dtype)
            np.add.at(u[s], tokens, routing.weights[s, tokens, slots][:, None] * got)
        for q in range(n_ranks) if dedup == "rank" else ():
            tokens = np.flatnonzero((dest[s] == q).any(axis=1))
            rows = send(tuple(part[tokens] for part in wire), s, q, bytes_out[0])
            made = at_experts(q, decode_rows(rows, out, z.dtype), s, tokens)
            u[s, tokens] += decode_rows(
                send(encode_rows(made, back), q, s, bytes_back[0]), back, z.dtype)
        for n in range(relay.shape[1]) if dedup == "node" else ():
            f = relay[s, n]
            tokens = np.flatnonzero((node[dest[s]] == n).any(axis=1))
            held = send(tuple(part[tokens] for part in wire), s, f, bytes_out[0])
            sums = np.zeros((len(tokens), z.shape[2]), z.dtype)
            for q in np.flatnonzero(node == n):
                mine = np.flatnonzero((dest[s, tokens] == q).any(axis=1))
                rows = send(tuple(part[mine] for part in held), f, q, bytes_out[1])
                made = at_experts(q, decode_rows(rows, out, z.dtype), s, tokens[mine])
                sums[mine] += decode_rows(
                    send(encode_rows(made, back), q, f, bytes_back[0]), back, z.dtype)
            u[s, tokens] += decode_rows(
                send(encode_rows(sums, back), f, s, bytes_back[1]), back, z.dtype)
    y = u
    if latent and cfg.latent_moe_use_norm:
        y = rms_norm(y, p["routed_expert_norm"], cfg.rms_norm_eps)
    if latent:
        y = linear(y, p["routed_expert_up_proj"])                        # [R,S,l] -> [R,S,d]
    if cfg.num_shared_experts:
        y = y + mlp(x, p["shared_experts"], cfg)
    return Exchange(y, loads, list(bytes_out), list(bytes_back))


def exchange_time(fabric, stages, t0_s=0.0, overlap=False, batch=0.0):
    """How long an exchange takes on a fabric.

    Fluid: a stage's messages share links, and the next stage starts when all have arrived. Closed
    form: t0 + sum over stages of (alpha + max over links of bytes / bandwidth).

    Args: fabric; stages, a list of [R,R] with bytes from row to column, the diagonal ignored; t0_s,
        a fixed time for all that is no wire (launch, counting, synchronising): measured, never
        derived; overlap, whether all stages run at once, as when a relay hands on what it gets
        while it gets it; batch, as `flow.simulate`.
    Returns: Timing.
    Raises: ValueError for negative bytes, shapes that are not the fabric's, ranks cut off.
    """
    if not len(stages):
        raise ValueError("stages is empty: give at least one matrix [R,R]")
    stages = [sum(map(np.asarray, stages))] if overlap else stages
    results = [exchange(fabric, stage, batch) for stage in stages]
    slowest = max(results, key=lambda r: r.closed_form_s)
    return Timing(t0_s + sum(r.time_s for r in results),
                  t0_s + sum(r.closed_form_s for r in results), slowest.bottleneck, results)


def closed_form_time(fabric, stages, t0_s=0.0, overlap=False):
    """The closed form of `exchange_time` without the fluid engine, for many ranks or many tries.

    Args, Raises: as there. Returns: (time_s, the name of the busiest link).
    """
    stages = [np.array(sum(map(np.asarray, stages)))] if overlap else stages
    total, slowest, name = t0_s, 0.0, ""
    for stage in stages:
        src, dst = np.nonzero(stage * ~np.eye(len(stage), dtype=bool))
        if not len(src):
            continue
        paths, alpha = routes(fabric, src, dst)
        used = paths >= 0
        sizes = np.broadcast_to(stage[src, dst][:, None], paths.shape)
        busy = np.bincount(paths[used], sizes[used], len(fabric.capacity)) / fabric.capacity
        stage_s = float(alpha.max() + busy.max())
        total += stage_s
        if stage_s > slowest:
            slowest, name = stage_s, fabric.link_names[int(busy.argmax())]
    return total, name
