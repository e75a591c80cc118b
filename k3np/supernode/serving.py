"""What a step of decoding costs on a group of accelerators: bytes read, bytes sent, fixed costs.

A step gives each sequence in flight one more token. Every accelerator (a rank) reads its share of
the weights, of the caches and of the KDA states; rows go to experts and back; and each operation
costs something before its first byte moves. The parts are added up: nothing overlaps, unless
`Step.overlapped_s` is asked. Rates are what the data sheet of the memory says and what was measured
on the wires, so a part is a lower bound; what software adds is one number, `layer_s`.
"""
import math
from typing import NamedTuple

from k3np.count import (
    N_BYTES,
    cache_bytes,
    checkpoint_bytes,
    decode_flop,
    layer_counts,
    parameters,
)
from k3np.supernode.copies import expected_distinct, row_bytes
from k3np.supernode.fabric import PRESETS


class Machine(NamedTuple):
    """An accelerator and its wires: `fabric`, a key of PRESETS; memory's size and rate; arithmetic
    in bfloat16 and, for experts, in 8 bits, dense."""
    fabric: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    flop_per_s: float
    expert_flop_per_s: float


# The makers' data sheets, read in others' summaries; where those differ in memory, the smaller.
# The wires: see PRESETS.
MACHINES = {
    "h200x8": Machine("h200", 141e9, 4.8e12, 0.99e15, 1.98e15),
    "b200x8": Machine("b200", 180e9, 8e12, 2.25e15, 4.5e15),
    "b300x8": Machine("b200", 270e9, 8e12, 2.25e15, 4.5e15),
    "nvl72": Machine("nvl72", 186e9, 8e12, 2.5e15, 5e15),
    "gb300": Machine("nvl72", 279e9, 8e12, 2.5e15, 5e15),
}
# Fixed costs in seconds, and where each comes from. They decide, and are the least known.
FIXED = {
    "op_s": (10e-6, "Assumed", "dispatch or combine inside one domain; nobody has published it for "
             "an NVL72; 37 us over NICs (DeepEP), 74 to 110 us on CloudMatrix384 (second-hand)"),
    "nic_op_s": (42e-6, "Measured", "the same over NICs: between 37 us, the fixed part of DeepEP's "
                 "low-latency dispatch on H800, and 50 us"),
    "reduce_s": (8e-6, "Measured", "all-reduce inside a domain: near 8 us in a profile of a pruned "
                 "K3 at TP8 (vLLM issue 55261); NCCL's own tables say 15 to 56 us"),
    "nic_reduce_s": (51e-6, "Derived", "the same over NICs: 43 us more, from two layouts of K3 on "
                     "16 H200 (mnmehta), one of which crosses nodes in 186 all-reduces"),
    "layer_s": (0.0, "Assumed", "kernels of a layer beyond the bytes they read; 0 is a bound"),
}
PARTS = ("experts", "dense", "cache", "state", "wire", "operations", "kernels")


class Step(NamedTuple):
    """Seconds of a step: `parts`, by PARTS; `time_s`, their sum; `touched`, experts of a layer that
    the batch needs; `limited`, "bytes" or "flop" for experts, dense and cache; `n_nodes` joined."""
    parts: dict
    time_s: float
    touched: float
    limited: dict
    n_nodes: int

    @property
    def overlapped_s(self):
        """The step if every byte on the wire hid behind reading or computing, or the reverse."""
        busy = sum(self.parts[x] for x in ("experts", "dense", "cache", "state"))
        wire = self.parts["wire"]
        return max(busy, wire) + self.parts["operations"] + self.parts["kernels"]


def _whole(**named):
    for name, n in named.items():
        if type(n) is not int or n < 1:
            raise ValueError(f"{name} must be a whole number, one or more; got {n!r}")


def _machine(machine):
    if machine not in MACHINES:
        raise ValueError(f"machine {machine!r} is unknown; there are {', '.join(MACHINES)}")
    return MACHINES[machine]


def domains(machine, ranks):
    """How many nodes (or racks) `ranks` ranks fill, evenly. Raises: ValueError when they do not."""
    _whole(ranks=ranks)
    most = PRESETS[_machine(machine).fabric][0]
    n_nodes = -(-ranks // most)
    if ranks % n_nodes:
        raise ValueError(f"ranks={ranks} do not fill {n_nodes} {machine} of {most} evenly")
    return n_nodes


def _layout(cfg, machine, ranks, tp, dcp, experts):
    _whole(tp=tp, dcp=dcp)
    n_nodes = domains(machine, ranks)
    if ranks % tp or cfg.num_attention_heads % tp:
        raise ValueError(f"tp={tp} must divide ranks={ranks} and the "
                         f"{cfg.num_attention_heads} heads")
    if tp % dcp:
        raise ValueError(f"dcp={dcp} must divide tp={tp}: a group's ranks share its caches")
    if experts not in ("ep", "tp") or (experts == "tp" and tp != ranks):
        raise ValueError(f"experts={experts!r}: 'ep' deals them out; 'tp' cuts each over all ranks "
                         f"and needs tp=ranks, here {tp} and {ranks}")
    if experts == "ep" and cfg.num_experts % ranks:
        raise ValueError(f"{cfg.num_experts} experts do not divide over ranks={ranks}")
    return n_nodes


def expected_experts(n_experts, top_k, n_tokens):
    """Experts of a layer that a batch needs, on average, when all choices are as likely.

    E (1 - (1 - k/E)^T).

    Args: n_experts E; top_k k; n_tokens T, may be a fraction. Returns: a float.
    """
    if not 0 < top_k <= n_experts or n_tokens < 0:
        raise ValueError(f"top_k={top_k} of n_experts={n_experts} for n_tokens={n_tokens}: k must "
                         "be within 1 to E, and T zero or more")
    return n_experts * (1 - (1 - top_k / n_experts) ** n_tokens)


def weight_bytes(cfg):
    """Bytes of weights by the way they are shared out: dict.

    experts: dealt over the ranks; dense: read in each step by every group of ranks that share
    attention; looked_up: the input table and the vision tower, kept and not read.
    """
    p = parameters(cfg)
    idle = N_BYTES[cfg.dtype] * (p["vision"] + p["projector"]
                                 + (0 if cfg.tie_word_embeddings else p["embed"]))
    group = 32 if cfg.quantization_config else None
    routed = p["routed_experts"]
    experts = routed // 2 + routed // group if group else N_BYTES[cfg.dtype] * routed
    return {"experts": experts, "dense": checkpoint_bytes(cfg) - experts - idle, "looked_up": idle}


def reduce_bytes_s(n_bytes, tp, per_node, inside_bytes_per_s, nic_bytes_per_s):
    """Wire time of an all-reduce over tp ranks: by a ring, or, over several nodes, hierarchically.

    2 (g-1)/g n/B_u + 2 (N-1)/N (n/g)/B_o, with g ranks in each of N nodes.
    """
    g = min(tp, per_node)
    N = tp // g
    over = 2 * (N - 1) / N * (n_bytes / g) / nic_bytes_per_s if N > 1 else 0.0
    return 2 * (g - 1) / g * n_bytes / inside_bytes_per_s + over


def exchange_s(cfg, machine, ranks, tokens, fmt, dedup="node", violation=0.0):
    """Wire time of one dispatch or combine of a layer, all ranks alike.

    Args: tokens on each rank; fmt of a row, "mxfp8" out and "bf16" back; dedup, what crosses a NIC:
        one row a "node", a "rank", or a copy ("none"); violation, the fullest rank over the mean.
    Returns: seconds: the NIC's time or the links' inside, whichever is longer.
    """
    most, inside, nic, *_ = PRESETS[_machine(machine).fabric]
    N, E, k = domains(machine, ranks), cfg.num_experts, cfg.num_experts_per_token
    if dedup not in ("node", "rank", "none"):
        raise ValueError(f"dedup={dedup!r}; known are 'node', 'rank' and 'none'")
    row = row_bytes(cfg.routed_expert_hidden_size or cfg.hidden_size, fmt)
    distinct = float(expected_distinct(ranks, E, k))
    links = distinct * (1 - 1 / ranks) / inside
    if N > 1:
        across = {"node": float(expected_distinct(N, E, k)), "rank": distinct, "none": k}[dedup]
        links = max(links, across * (1 - 1 / N) / nic)
    return tokens * row * links * (1 + violation)


def decode_step(cfg, machine, ranks, batch, context, tp=1, dcp=1, experts="ep", tokens=1,
                dedup="node", violation=0.0, cache_itemsize=2, state_itemsize=4,
                op_s=FIXED["op_s"][0], nic_op_s=FIXED["nic_op_s"][0],
                reduce_s=FIXED["reduce_s"][0], nic_reduce_s=FIXED["nic_reduce_s"][0],
                layer_s=FIXED["layer_s"][0]):
    """One step of decoding for all sequences in flight, part by part.

    Attention, shared experts and projections are cut over `tp` ranks, and copied ranks/tp times.
    A latent cache serves all heads, so each rank of such a group reads it whole, unless `dcp` ranks
    each hold a share of the tokens. A KDA state is cut by heads. Reading and arithmetic of a part
    go on at once: the longer counts.

    Args: cfg; machine, a key of MACHINES; ranks, accelerators; batch, sequences in flight on all of
        them together; context, tokens that each has behind it; tp, ranks that share a layer's
        attention; dcp, ranks of those that share a cache; experts, "ep" dealt out or "tp" cut;
        tokens, new ones a sequence and step (1, or 1 + drafted); dedup, violation, as in
        `exchange_s`; cache_itemsize, state_itemsize, bytes a value; op_s, nic_op_s, reduce_s,
        nic_reduce_s, layer_s: fixed costs in seconds, `FIXED` says what and where from.
    Returns: Step.
    Raises: ValueError for unknown names and sizes that do not divide.
    """
    N = _layout(cfg, machine, ranks, tp, dcp, experts)
    _whole(batch=batch, tokens=tokens)
    m, (_, inside, nic, *_) = _machine(machine), PRESETS[_machine(machine).fabric]
    n, weights, p = layer_counts(cfg), weight_bytes(cfg), parameters(cfg)
    d, new = cfg.hidden_size, batch * tokens
    groups = ranks // tp
    mine = -(-batch // groups)                               # sequences of the fullest group
    cached, flop = cache_bytes(cfg, context, cache_itemsize, state_itemsize), decode_flop(
        cfg, context)

    touched = expected_experts(cfg.num_experts, cfg.num_experts_per_token, new)
    idle = 1 - cfg.num_experts_per_token / cfg.num_experts
    routed_flop = 2 * p["routed_experts"] * (1 - idle)
    pairs = {
        "experts": (weights["experts"] * touched / cfg.num_experts / ranks / m.hbm_bytes_per_s,
                    routed_flop * new / ranks * (1 + violation) / m.expert_flop_per_s),
        "dense": (weights["dense"] / tp / m.hbm_bytes_per_s,
                  (flop["matmul"] - routed_flop) * mine * tokens / tp / m.flop_per_s),
        "cache": (mine * cached["mla"] / dcp / m.hbm_bytes_per_s,
                  flop["attention"] * mine * tokens / tp / m.flop_per_s)}
    parts = {name: max(pair) for name, pair in pairs.items()}
    limited = {name: ("bytes", "flop")[pair[1] > pair[0]] for name, pair in pairs.items()}
    parts["state"] = 2 * mine * (cached["kda_state"] + cached["kda_conv"]) / tp / m.hbm_bytes_per_s

    per_node, wide = ranks // N, tp > ranks // N             # does attention itself cross nodes?
    one_reduce = nic_reduce_s if wide else reduce_s
    parts["wire"] = parts["operations"] = 0.0
    if experts == "ep" and ranks > 1:
        parts["wire"] = n["moe"] * sum(
            exchange_s(cfg, machine, ranks, mine * tokens / tp, fmt, dedup, violation)
            for fmt in ("mxfp8", "bf16"))
        parts["operations"] = 2 * n["moe"] * (nic_op_s if N > 1 else op_s)
    if tp > 1:                                               # after attention, and after the MLP
        times = 2 * cfg.num_hidden_layers
        parts["wire"] += times * reduce_bytes_s(2 * d * mine * tokens, tp, per_node, inside,
                                                nic or math.inf)
        parts["operations"] += times * one_reduce
    if dcp > 1:                                              # queries to all, outputs back
        r, slots = cfg.kv_lora_rank, cfg.qk_rope_head_dim
        sent = 2 * cfg.num_attention_heads * (2 * r + slots) * mine * tokens * (1 - 1 / dcp)
        crossing = dcp > per_node
        parts["wire"] += n["mla"] * sent / (nic if crossing else inside)
        parts["operations"] += 2 * n["mla"] * (nic_reduce_s if crossing else reduce_s)
    parts["kernels"] = cfg.num_hidden_layers * layer_s
    parts = {name: parts[name] for name in PARTS}
    return Step(parts, sum(parts.values()), touched, limited, N)


class Capacity(NamedTuple):
    """Bytes on the fullest rank: `weights`; `free` for sequences (below zero: the model does not
    fit); `sequence`, of one of its sequences; and `batch`, how many fit on all ranks together."""
    weights: float
    free: float
    sequence: float
    batch: int


def capacity(cfg, machine, ranks, context, tp=1, dcp=1, experts="ep", reserve=0.1,
             cache_itemsize=2, state_itemsize=4):
    """Whether the weights fit, and how many sequences of `context` tokens beside them.

    Args: as in `decode_step`; reserve, share of the memory kept for everything else (Assumed).
    Returns: Capacity.
    """
    _layout(cfg, machine, ranks, tp, dcp, experts)
    w, c = weight_bytes(cfg), cache_bytes(cfg, context, cache_itemsize, state_itemsize)
    weights = w["experts"] / ranks + (w["dense"] + w["looked_up"]) / tp
    free = _machine(machine).hbm_bytes * (1 - reserve) - weights
    sequence = c["mla"] / dcp + (c["kda_state"] + c["kda_conv"]) / tp
    return Capacity(weights, free, sequence, max(0, int(free // sequence)) * (ranks // tp))


def best_step(cfg, machine, ranks, batch, context, **fixed):
    """The fastest step over all tp and dcp that divide and fit. Experts are dealt out.

    Args: as in `decode_step`, fixed costs among them.
    Returns: (Step, tp, dcp), or None where nothing fits.
    """
    best = None
    for tp in (t for t in range(1, ranks + 1)
               if ranks % t == 0 and cfg.num_attention_heads % t == 0):
        for dcp in (1, tp) if tp > 1 else (1,):
            if capacity(cfg, machine, ranks, context, tp, dcp).batch < batch:
                continue
            step = decode_step(cfg, machine, ranks, batch, context, tp, dcp, **fixed)
            if best is None or step.time_s < best[0].time_s:
                best = step, tp, dcp
    return best


def accepted_tokens(acceptance, n_draft):
    """Tokens a step that verifies n drafted ones yields on average: (1 - a^(n+1)) / (1 - a).

    Each drafted token is kept with probability a as long as those before it were; one more comes
    from the model itself. Args: acceptance a, within 0 to 1; n_draft n. Returns: a float.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is no probability")
    return math.fsum(acceptance ** i for i in range(n_draft + 1))


def transfer_s(n_bytes, bytes_per_s, t0_s=0.0, links=1):
    """Time to hand bytes over: t0 + n / (links B)."""
    if not (bytes_per_s > 0 and links > 0 and n_bytes >= 0):
        raise ValueError(f"n_bytes={n_bytes}, bytes_per_s={bytes_per_s}, links={links}: sizes are "
                         "zero or more, rates above zero")
    return t0_s + n_bytes / (links * bytes_per_s)


def handover_s(cfg, context, prefill_s, bytes_per_s, t0_s=0.0, links=1):
    """From the start of a prefill until another machine can decode: (after it, layer by layer).

    After it: prefill + transfer. Layer by layer: each layer leaves when it is done, so only what
    the wire is behind, at least the last layer, is left: max(prefill, transfer) + last.
    """
    whole = transfer_s(cache_bytes(cfg, context)["total"], bytes_per_s, t0_s, links)
    last = whole / cfg.num_hidden_layers
    return prefill_s + whole, max(prefill_s, whole) + last


def ring_penalty(ranks, nodes, ratio):
    """BLIS: how much slower a ring gets over nodes whose wires are `ratio` times slower."""
    return 1 + (ratio - 1) * (nodes - 1) / (ranks - 1)


def all_to_all_penalty(ranks, nodes, ratio):
    """BLIS: the same for an all-to-all: nearly every message leaves its node."""
    return 1 + (ratio - 1) * (ranks - ranks // nodes) / (ranks - 1)


# NCCL's tables (tuning.cc), us: a call, and a step over NVLink, by protocol.
NCCL_RING_US = {"LL": (6.6, 0.6), "LL128": (14.0, 1.9), "Simple": (8.4, 3.4)}


def nccl_ring_s(ranks, protocol="Simple"):
    """What an all-reduce by a ring costs before its bytes, by NCCL's own tables."""
    call, hop = NCCL_RING_US[protocol]
    return (call + 2 * (ranks - 1) * hop) * 1e-6


def step_trace(named_steps):
    """Steps as the JSON object that Chrome and Perfetto read: a process each, a bar a part.

    Args: named_steps, pairs of (name, Step). Returns: a dict of lists, numbers and strings.
    """
    events = []
    for pid, (name, step) in enumerate(named_steps):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0,
                       "args": {"name": name}})
        at = 0.0
        for part, time_s in step.parts.items():
            events.append({"name": part, "ph": "X", "pid": pid, "tid": 0, "ts": at * 1e6,
                           "dur": time_s * 1e6,
                           "args": {"limited by": step.limited.get(part, "")}})
            at += time_s
    return {"traceEvents": events, "displayTimeUnit": "ms"}
