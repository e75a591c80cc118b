"""Layers dealt over stages, micro-batches sent through them: who works when, and who waits.

A schedule is a list of events. Each stage has an order of work; a piece of work starts when its
stage is free and what it needs has arrived. Nothing else is assumed, so that bubbles are counted
and not computed. Times may be integers or fractions; then the counts are exact.
"""
from typing import Any, NamedTuple

from k3np.attnres import count_pipeline


class Event(NamedTuple):
    """A piece of work: `stage` computes chunk `chunk` of the model for micro-batch `micro_batch`
    from `start` to `end`; `kind` is "forward" or "backward"."""
    stage: int
    start: Any
    end: Any
    micro_batch: int
    kind: str
    chunk: int


def _check(n_stages, n_micro, n_virtual):
    for name, n in (("n_stages", n_stages), ("n_micro", n_micro), ("n_virtual", n_virtual)):
        if type(n) is not int or n < 1:
            raise ValueError(f"{name} must be a whole number, one or more; got {n!r}")
    if n_virtual > 1 and n_micro % n_stages:
        raise ValueError(f"n_micro={n_micro} is not a multiple of n_stages={n_stages}: the "
                         "interleaved schedule deals micro-batches in groups of that size")


def stage_order(stage, n_stages, n_micro, n_virtual=1, kind="1f1b"):
    """What a stage does, in order: list of (kind, chunk, micro-batch).

    1F1B: a few forwards first, as many as there are stages behind; then a forward and a backward in
    turn; then the backwards that are left. With V chunks a stage the forwards come in groups of P
    micro-batches, chunk after chunk, and the backwards likewise from the last chunk down.
    GPipe: all forwards, then all backwards.

    Args: stage, 0..P-1; n_stages P; n_micro m; n_virtual V, chunks a stage (chunk c is stage c mod
        P's); kind, "1f1b" or "gpipe".
    Raises: ValueError for an unknown kind, or m no multiple of P where V > 1.
    Source: the schedule named in report §5.2; order as in Megatron-LM's, from its description.
    """
    _check(n_stages, n_micro, n_virtual)
    if kind not in ("1f1b", "gpipe"):
        raise ValueError(f"kind={kind!r}; known are '1f1b' and 'gpipe'")
    P, V, total = n_stages, n_virtual, n_micro * n_virtual

    def piece(i, what):
        if V == 1:
            return what, stage, i
        group, j = divmod(i, P * V)
        v, k = divmod(j, P)
        return what, (v if what == "forward" else V - 1 - v) * P + stage, group * P + k
    ahead = P - 1 - stage if V == 1 else 2 * (P - 1 - stage) + (V - 1) * P
    warmup = total if kind == "gpipe" else min(total, ahead)
    order = [piece(i, "forward") for i in range(warmup)]
    for i in range(total - warmup):
        order += [piece(warmup + i, "forward"), piece(i, "backward")]
    return order + [piece(i, "backward") for i in range(total - warmup, total)]


def schedule(n_stages, n_micro, n_virtual=1, forward=1, backward=2, hop=0, kind="1f1b"):
    """Run the orders of all stages: list of `Event`, sorted by start.

    Args: n_stages P; n_micro m; n_virtual V; forward, backward, time of one chunk for one
        micro-batch, any unit; hop, time from a chunk to the next (one number, or one for each of
        the PV - 1 hops: backward takes the same way and time); kind as in `stage_order`.
    Returns: list of 2 P V m events.
    Raises: ValueError for sizes, times below zero, or a wrong number of hops.
    """
    _check(n_stages, n_micro, n_virtual)
    chunks = n_stages * n_virtual
    hops = list(hop) if hasattr(hop, "__len__") else [hop] * (chunks - 1)
    if len(hops) != chunks - 1:
        raise ValueError(f"hop has {len(hops)} entries; {chunks} chunks have {chunks - 1} hops")
    if min([forward, backward, *hops]) < 0:
        raise ValueError("forward, backward and hop are times: zero or more")
    todo = [stage_order(s, n_stages, n_micro, n_virtual, kind)[::-1] for s in range(n_stages)]
    free, done, events = [0] * n_stages, {}, []

    def ready(what, c, m):
        """When its input has arrived; None while that is unknown."""
        if what == "forward":
            before = (("forward", c - 1, m), hops[c - 1]) if c else None
        else:
            before = (("backward", c + 1, m), hops[c]) if c + 1 < chunks else \
                (("forward", c, m), 0)
        if before is None:
            return 0
        return done[before[0]] + before[1] if before[0] in done else None
    moved = True
    while moved:
        moved = False
        for s, work in enumerate(todo):
            while work and (arrival := ready(*work[-1])) is not None:
                what, c, m = work.pop()
                start = max(free[s], arrival)
                free[s] = done[what, c, m] = start + (forward if what == "forward" else backward)
                events.append(Event(s, start, free[s], m, what, c))
                moved = True
    assert not any(todo), "the orders of the stages wait for each other"
    return sorted(events, key=lambda e: (e.start, e.stage))


def bubble(events):
    """Share of the stages' time in which they wait, counted: 1 - work / (stages x makespan).

    The result is exact (a Fraction) where the times are fractions.
    """
    stages = 1 + max(e.stage for e in events)
    return 1 - sum(e.end - e.start for e in events) / (stages * max(e.end for e in events))


def bubble_share(n_stages, n_micro, n_virtual=1):
    """The same in closed form, for hops that take no time: (P - 1) / (V m + P - 1)."""
    _check(n_stages, n_micro, n_virtual)
    return (n_stages - 1) / (n_virtual * n_micro + n_stages - 1)


def in_flight(events):
    """Most activations that each stage holds at once: chunks forwarded and not yet backwarded."""
    held = [0] * (1 + max(e.stage for e in events))
    most = held[:]
    for e in sorted(events, key=lambda e: (e.end, e.kind == "forward")):
        held[e.stage] += 1 if e.kind == "forward" else -1
        most[e.stage] = max(most[e.stage], held[e.stage])
    return most


class Message(NamedTuple):
    """Blocks of Attention Residuals that leave stage `src` for `dst` when a forward ends."""
    time: Any
    src: int
    dst: int
    micro_batch: int
    n_blocks: int


def block_messages(events, per_chunk=1, cached=True):
    """What Attention Residuals add to a schedule: finished blocks, sent along with the stream.

    Args: events of `schedule`; per_chunk, blocks finished in a chunk; cached, whether a stage keeps
        what it received until the micro-batch ends.
    Returns: (messages, peak): list of `Message`; the most block vectors, for each token of a
        micro-batch, that each stage holds at once. Without a cache a chunk's blocks are dropped
        after its forward and the peak is that of one message.
    Source: `k3np.attnres.count_pipeline` for the sizes; the report, §5.2.2, for when they are
        freed.
    """
    chunks, stages = 1 + max(e.chunk for e in events), 1 + max(e.stage for e in events)
    sizes = count_pipeline(stages, chunks // stages, per_chunk, cached)
    messages, held, peak = [], [0] * stages, [0] * stages
    for e in sorted(events, key=lambda e: (e.end, e.kind == "forward")):
        if e.kind == "forward" and e.chunk + 1 < chunks:
            dst, n = (e.stage + 1) % stages, sizes[e.chunk]
            messages.append(Message(e.end, e.stage, dst, e.micro_batch, n))
            held[dst] += n if cached else 0
            peak[dst] = max(peak[dst], held[dst] if cached else n)
        elif e.kind == "backward" and cached and e.chunk < stages and e.stage == e.chunk:
            held[e.stage] -= sum(sizes[c] for c in range(chunks - 1)   # its micro-batch ends here
                                 if (c + 1) % stages == e.stage)
    return messages, peak
