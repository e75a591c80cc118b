"""Who is wired to whom: topologies as explicit links, each with a capacity.

A fabric lists its links and, for each pair of ranks, the links that a message crosses. Every link
has one direction. A switch has no limit of its own: only links can be full. Routes are fixed, and
nothing finds a way around a broken link.
"""
import dataclasses
import math
from typing import Any

import numpy as np

NONE = -1                                # fills a path that is shorter than the longest


@dataclasses.dataclass(frozen=True, eq=False)
class Fabric:
    """Links and routes. `link_names` [L]; `capacity` [L], bytes/s one way; `paths` [P,P,J], link
    numbers, NONE at the end; `alpha_s` [P,P], fixed time of a message; `node` [P], which node a
    rank sits in. Collectives are methods: `fabric.all_reduce(arrays, algorithm="ring")`."""
    name: str
    link_names: tuple
    capacity: Any
    paths: Any
    alpha_s: Any
    node: Any

    @property
    def n_ranks(self):
        return len(self.node)


def _positive(**named):
    for name, value in named.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value}: a link needs a finite bandwidth above zero; take a "
                             "broken link away with without()")


def _ranks(**named):
    for name, value in named.items():
        if value != int(value) or value < 1:
            raise ValueError(f"{name}={value}: there must be at least one")


def _build(name, links, routes, alpha_s, node=None):
    """links: {link name: bytes/s}; routes: {(src, dst): names}; alpha_s: seconds, or [P,P]."""
    n = 1 + max((dst for _, dst in routes), default=0) if node is None else len(node)
    number = {link: i for i, link in enumerate(links)}
    paths = np.full((n, n, max(map(len, routes.values()), default=1)), NONE, np.int64)
    for (src, dst), route in routes.items():
        paths[src, dst, :len(route)] = [number[link] for link in route]
    alpha = np.array(np.broadcast_to(np.asarray(alpha_s, float), (n, n)))
    if not (np.isfinite(alpha).all() and (alpha >= 0).all()):
        raise ValueError("alpha_s: a message cannot take less than no time")
    np.fill_diagonal(alpha, 0.0)
    node = np.zeros(n, np.int64) if node is None else np.asarray(node, np.int64)
    return Fabric(name, tuple(links), np.array(list(links.values()), float), paths, alpha, node)


def star(n, bytes_per_s, alpha_s=0.0, core_bytes_per_s=None, name=None):
    """One switch: each rank has a link out and a link in.

    Args: n, ranks; bytes_per_s of each link; alpha_s, fixed time of a message; core_bytes_per_s,
        what the switch carries in all, if that is a limit.
    Returns: Fabric.
    Raises: ValueError for no ranks, or a bandwidth of zero.
    """
    _ranks(n=n)
    _positive(bytes_per_s=bytes_per_s, core_bytes_per_s=core_bytes_per_s or 1.0)
    links = {f"rank {r} {way}": bytes_per_s for way in ("out", "in") for r in range(n)}
    core = ("core",) if core_bytes_per_s else ()
    links.update({link: core_bytes_per_s for link in core})
    routes = {(s, d): (f"rank {s} out", *core, f"rank {d} in")
              for s in range(n) for d in range(n) if s != d}
    return _build(name or f"star of {n}", links, routes, alpha_s, [0] * n)


def two_tier(n_nodes, per_node, inside_bytes_per_s, nic_bytes_per_s, oversubscription=1,
             rails=False, inside_alpha_s=0.0, nic_alpha_s=0.0, name=None):
    """Nodes with a switch inside, and a NIC for each rank to the switches outside.

    Args: n_nodes, per_node; inside_bytes_per_s and nic_bytes_per_s of each link; oversubscription,
        how many times the NICs of a node together exceed its uplink; rails, whether NIC i of every
        node hangs on a switch of its own, so that a message to another index first crosses inside;
        inside_alpha_s, nic_alpha_s, fixed time of a message.
    Returns: Fabric.
    Raises: ValueError for bandwidths of zero, or rails with oversubscription.
    """
    _ranks(n_nodes=n_nodes, per_node=per_node)
    _positive(inside_bytes_per_s=inside_bytes_per_s, nic_bytes_per_s=nic_bytes_per_s,
              oversubscription=oversubscription)
    if rails and oversubscription != 1:
        raise ValueError(f"oversubscription={oversubscription} with rails: a rail's switch has no "
                         "uplink to share; use 1")
    n, g = n_nodes * per_node, per_node
    node = np.arange(n) // g
    links = {f"rank {r} {way}": speed for what, speed in
             (("", inside_bytes_per_s), ("nic ", nic_bytes_per_s))
             for way in (f"{what}out", f"{what}in") for r in range(n)}
    if oversubscription != 1:
        links.update({f"node {i} {way}": g * nic_bytes_per_s / oversubscription
                      for way in ("up", "down") for i in range(n_nodes)})
    routes = {}
    for s in range(n):
        for d in range(n):
            if node[s] == node[d]:
                route = (f"rank {s} out", f"rank {d} in") if s != d else ()
            elif rails:
                by = node[s] * g + d % g                            # the rank here on d's rail
                hop = () if by == s else (f"rank {s} out", f"rank {by} in")
                route = (*hop, f"rank {by} nic out", f"rank {d} nic in")
            elif oversubscription != 1:
                route = (f"rank {s} nic out", f"node {node[s]} up", f"node {node[d]} down",
                         f"rank {d} nic in")
            else:
                route = (f"rank {s} nic out", f"rank {d} nic in")
            routes[s, d] = route
    alpha = np.where(node[:, None] == node, inside_alpha_s, nic_alpha_s)
    return _build(name or f"{n_nodes} nodes of {g}", links, routes, alpha, node)


def _steps(src, dst, k, ties):
    """Signed steps from src to dst round a ring of k, the short way; `ties` decides at k/2."""
    forward = (dst - src) % k
    clockwise = 2 * forward < k or (2 * forward == k and (ties == "clockwise" or src % 2 == 0))
    return forward if clockwise else forward - k


def torus(shape, bytes_per_s, alpha_s=0.0, hop_s=0.0, ties="split", name=None):
    """A grid that is closed in each direction; messages go the short way, one dimension at a time.

    Args: shape, ranks along each dimension; bytes_per_s of each link, of which a rank has two out
        in each dimension; alpha_s, fixed time of a message, and hop_s more for each link; ties, at
        half way round: "clockwise", or "split" (even ranks clockwise, odd ones not).
    Returns: Fabric.
    Raises: ValueError for an empty shape, an unknown ties, a bandwidth of zero.
    """
    shape = tuple(int(k) for k in shape)
    _ranks(**{f"shape[{i}]": k for i, k in enumerate(shape)})
    _positive(bytes_per_s=bytes_per_s)
    if ties not in ("split", "clockwise") or not shape:
        raise ValueError(f"shape={shape}, ties={ties!r}: give at least one dimension, and "
                         "\"split\" or \"clockwise\"")
    places = list(np.ndindex(*shape))
    rank = {place: r for r, place in enumerate(places)}

    def link(r, i, up):
        axis = f" axis {i}" if len(shape) > 1 else ""
        return f"rank {r}{axis} {'up' if up else 'down'}"
    links = {link(r, i, up): bytes_per_s for i in range(len(shape)) for up in (True, False)
             for r in range(len(places))}
    routes = {}
    for start in places:
        for end in places:
            here, route = list(start), []
            for i, k in enumerate(shape):
                steps = _steps(start[i], end[i], k, ties)
                for _ in range(abs(steps)):
                    route.append(link(rank[tuple(here)], i, steps > 0))
                    here[i] = (here[i] + (1 if steps > 0 else -1)) % k
            routes[rank[start], rank[end]] = tuple(route)
    n = len(places)
    hops = np.array([[len(routes[s, d]) for d in range(n)] for s in range(n)])
    return _build(name or "torus " + " x ".join(map(str, shape)), links, routes,
                  alpha_s + hop_s * hops, [0] * n)


def ring(n, bytes_per_s, alpha_s=0.0, hop_s=0.0, ties="split", name=None):
    """Each rank wired to two neighbours, both ways: a torus of one dimension (see `torus`)."""
    return torus((n,), bytes_per_s, alpha_s, hop_s, ties, name or f"ring of {n}")


def full_mesh(n, bytes_per_s, alpha_s=0.0, name=None):
    """A link from every rank to every other. Args: n; bytes_per_s of each link; alpha_s."""
    _ranks(n=n)
    _positive(bytes_per_s=bytes_per_s)
    pairs = [(s, d) for s in range(n) for d in range(n) if s != d]
    return _build(name or f"mesh of {n}", {f"rank {s} to {d}": bytes_per_s for s, d in pairs},
                  {(s, d): (f"rank {s} to {d}",) for s, d in pairs}, alpha_s, [0] * n)


# Effective bandwidths, bytes/s one way, which are below the data sheet's; and fixed times.
_NVLINK_ALPHA = "3.4 us: NCCL's own table for a step over NVLink, protocol Simple"
_NDR = "NIC 46 GB/s of 50: a maintainer of NCCL expects 46 to 48 at 400 Gb/s (nccl-tests 290)"
PRESETS = {
    "h100": (8, 370e9, 46e9, 3.4e-6, 14e-6, "8 GPUs, NVLink 4, 450 GB/s on paper; 370: a "
             f"maintainer of NCCL (nccl-tests 212); {_NVLINK_ALPHA}; {_NDR}"),
    "h200": (8, 365e9, 46e9, 3.4e-6, 14e-6, "8 GPUs, NVLink 4, 450 GB/s on paper; 365: ring "
             f"all-reduce of 8 GiB in stas00/ml-engineering; {_NVLINK_ALPHA}; {_NDR}"),
    "b200": (8, 680e9, 46e9, 3.4e-6, 14e-6, "8 GPUs, NVLink 5, 900 GB/s on paper; 680: ring "
             f"all-reduce of 8 GiB in stas00/ml-engineering; {_NVLINK_ALPHA}; {_NDR}"),
    "nvl72": (72, 660e9, 92e9, 3.4e-6, 14e-6, "72 GPUs, NVLink 5, 900 GB/s on paper; 660: "
              f"all-to-all over 4 to 64 GPUs in OCI's GB300 logs; {_NVLINK_ALPHA}; NIC 92: two of "
              "46, assumed (the same logs imply 24 between two racks, an untuned network)"),
    "cloudmatrix384": (384, 392e9, None, 0.929e-6, None, "384 NPUs, 392 GB/s each on the unified "
                       "bus; 0.93 us for one hop; both from second-hand notes of arXiv 2506.12708 "
                       "and 2607.06202, not checked against the papers"),
}


def preset(name, n=None, n_nodes=1):
    """A machine by name: `PRESETS` holds its numbers and where each comes from.

    Args: name, a key of PRESETS; n, ranks in a node if fewer than all; n_nodes, joined by NICs.
    Returns: Fabric, a star or two tiers.
    Raises: ValueError for an unknown name, more ranks than there are, or nodes without NICs.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; there are {', '.join(PRESETS)}")
    most, inside, nic, alpha, nic_alpha, _ = PRESETS[name]
    n = most if n is None else n
    if n > most:
        raise ValueError(f"n={n}: one {name} has {most} ranks; use n_nodes")
    if n_nodes == 1:
        return star(n, inside, alpha, name=name)
    if nic is None:
        raise ValueError(f"n_nodes={n_nodes}: no bandwidth between two of {name} is known here")
    return two_tier(n_nodes, n, inside, nic, inside_alpha_s=alpha, nic_alpha_s=nic_alpha,
                    name=f"{n_nodes} x {name}")


def links_of(fabric, which):
    """Numbers of the links meant by a link's name, by a rank (all that bear its), or a list."""
    if isinstance(which, (list, tuple)):
        return np.unique(np.concatenate([links_of(fabric, w) for w in which]))
    if isinstance(which, str):
        if which not in fabric.link_names:
            raise ValueError(f"{fabric.name} has no link {which!r}; it has "
                             f"{', '.join(fabric.link_names[:4])}, ...")
        return np.array([fabric.link_names.index(which)])
    if not 0 <= which < fabric.n_ranks:
        raise ValueError(f"rank {which}: {fabric.name} has ranks 0 to {fabric.n_ranks - 1}")
    names = [i for i, name in enumerate(fabric.link_names)
             if name.startswith(f"rank {which} ") or name.endswith(f" to {which}")]
    return np.array(names, np.int64)


def degrade(fabric, which, factor):
    """The same fabric with links that keep only `factor` of their capacity.

    Args: fabric; which, a link's name, a rank (all links of its own) or a list of those; factor.
    Returns: Fabric.
    Raises: ValueError for a factor that is not above zero, or an unknown link.
    """
    if not (np.isfinite(factor) and factor > 0):
        raise ValueError(f"factor={factor}: must be above zero; use without() for a broken link")
    capacity = fabric.capacity.copy()
    capacity[links_of(fabric, which)] *= factor
    return dataclasses.replace(fabric, capacity=capacity)


def without(fabric, which):
    """The same fabric with links cut. Routes stay as they are: pairs that used one are cut off.

    Args: fabric; which, as in `degrade`.
    Returns: Fabric, with empty paths between ranks that no longer reach each other.
    """
    cut = np.isin(fabric.paths, links_of(fabric, which)).any(-1)
    for rank in which if isinstance(which, (list, tuple)) else [which]:
        if not isinstance(rank, str):
            cut[rank] = cut[:, rank] = True
    return dataclasses.replace(fabric, paths=np.where(cut[..., None], NONE, fabric.paths))


def check_connected(fabric, src, dst):
    """Raise ValueError naming the first pair of ranks that has no route. src, dst [F]."""
    src, dst = np.asarray(src), np.asarray(dst)
    lost = (src != dst) & (fabric.paths[src, dst, 0] == NONE)
    if lost.any():
        i = int(lost.argmax())
        raise ValueError(f"rank {src[i]} cannot reach rank {dst[i]} in {fabric.name}: a link on "
                         "their route was taken away")


def alpha_beta(fabric, same_node=None):
    """The fixed time and the bandwidth of the slowest pair, each for itself: what the closed forms
    need. Args: fabric; same_node, True or False for pairs inside or across nodes only.
    Returns: (alpha_s, bytes_per_s); (0, infinity) when there is no such pair."""
    n = fabric.n_ranks
    pairs = ~np.eye(n, dtype=bool)
    if same_node is not None:
        pairs &= (fabric.node[:, None] == fabric.node) == same_node
    if not pairs.any():
        return 0.0, math.inf
    paths = fabric.paths[pairs]
    slowest = np.where(paths == NONE, np.inf, fabric.capacity[paths]).min()
    return float(fabric.alpha_s[pairs].max()), float(slowest)
