"""Many conversations, several clusters: who goes where, what is still cached, how long they wait.

A conversation comes back again and again with all that was said and a little more. If the cluster
it comes to still holds its prefix, only the new tokens are read. An event queue plays this out.
"""
import heapq
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

POLICIES = ("random", "idlest", "one", "two")


class Fleet(NamedTuple):
    """Result of `simulate_fleet`. One entry a request: `arrival_s`, `first_token_s` (when its first
    token came), `finish_s`, all nan where refused; `prompt`, `cached` tokens; `cluster` (-1:
    refused). And `busy` [clusters], share of the time spent reading."""
    arrival_s: Any
    first_token_s: Any
    finish_s: Any
    prompt: Any
    cached: Any
    cluster: Any
    busy: Any

    @property
    def hit_rate(self):
        """Share of the prompt tokens of served requests that needed no reading."""
        served = self.cluster >= 0
        return float(self.cached[served].sum() / max(1, self.prompt[served].sum()))

    @property
    def wait_s(self):
        """From arrival to the first token, of the requests that were served."""
        return (self.first_token_s - self.arrival_s)[self.cluster >= 0]


def _cluster(room):
    """A reader that takes one request at a time, and a cache that forgets the oldest."""
    return SimpleNamespace(room=room, used=0, cache=OrderedDict(), queue=deque(), backlog=0,
                           reading=False, busy_s=0.0)


def _keep(cluster, session, tokens):
    cluster.used += tokens - cluster.cache.pop(session, 0)
    cluster.cache[session] = tokens
    while cluster.used > cluster.room:
        cluster.used -= cluster.cache.popitem(last=False)[1]


def simulate_fleet(rng, policy="two", n_clusters=8, n_sessions=200, turns=10, start_tokens=40_000,
                   new_tokens=4_000, answer_tokens=500, sessions_per_s=0.5, think_s=20.0,
                   read_tokens_per_s=70_000.0, token_s=0.02, cache_tokens=3_000_000,
                   budget_tokens=None):
    """Play a fleet: sessions arrive, ask, think and ask again, until every request has its fate.

    A turn's prompt is all before it plus new tokens. A cluster reads one prompt at a time, what is
    cached excepted, then answers; reading is linear in the tokens. Prefixes are kept whole, the
    least recently used go first. Policies: "random"; "idlest", the least waiting tokens; "one"
    cluster fixed for a session; "two" fixed, of which the one where waiting and reading are less.
    Admission: a cluster whose waiting tokens would exceed the budget is not considered, and a
    request that no cluster considers is refused; its session asks again after thinking.

    Args: rng, a Generator; policy; n_clusters; n_sessions; turns, requests of a session;
        start_tokens, new_tokens, answer_tokens, means (the first two exponential); sessions_per_s;
        think_s, mean; read_tokens_per_s of a cluster; token_s, a decoded token; cache_tokens that a
        cluster holds; budget_tokens, waiting tokens that a cluster accepts, or None.
    Returns: Fleet.
    Raises: ValueError for an unknown policy, or sizes and rates that are not above zero.
    Source: report §5.4.3, affinity to the cache; two clusters a session and a budget as read here.
    Departs: the rules in detail, all rates and all lengths are ours.
    """
    positive = dict(n_clusters=n_clusters, n_sessions=n_sessions, turns=turns, think_s=think_s,
                    sessions_per_s=sessions_per_s, read_tokens_per_s=read_tokens_per_s)
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be above zero")
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}; known are {', '.join(POLICIES)}")
    clusters = [_cluster(cache_tokens) for _ in range(n_clusters)]
    homes = [rng.permutation(n_clusters)[:2] for _ in range(n_sessions)]
    starts = np.cumsum(rng.exponential(1 / sessions_per_s, n_sessions))
    said = np.zeros(n_sessions, np.int64)
    rows, events, order = [], [], iter(range(10**12))

    def at(time, what, *args):
        heapq.heappush(events, (float(time), next(order), what, args))

    def choose(session, prompt):
        todo = {int(c): prompt - clusters[c].cache.get(session, 0) for c in (
            homes[session][:1] if policy == "one" else homes[session] if policy == "two"
            else rng.permutation(n_clusters))}
        fits = [c for c in todo if budget_tokens is None
                or clusters[c].backlog + todo[c] <= max(budget_tokens, todo[c])]
        if not fits or policy in ("random", "one"):
            return fits[0] if fits else None
        return min(fits, key=lambda c: clusters[c].backlog + (todo[c] if policy == "two" else 0))

    def ask(now, session, turn, new):
        prompt = int(said[session] + new)
        c = choose(session, prompt)
        rows.append([now, np.nan, np.nan, prompt, 0, -1 if c is None else c])
        if c is None:
            if turn + 1 < turns:
                at(now + rng.exponential(think_s), ask, session, turn + 1, new)
            return
        todo = prompt - clusters[c].cache.get(session, 0)
        clusters[c].backlog += todo
        clusters[c].queue.append((len(rows) - 1, session, turn, prompt, todo))
        read(now, c)

    def read(now, c):
        cluster = clusters[c]
        if cluster.reading or not cluster.queue:
            return
        cluster.reading = True
        row, session, turn, prompt, promised = cluster.queue.popleft()
        cached = cluster.cache.get(session, 0)              # it may be gone since the promise
        took = (prompt - cached) / read_tokens_per_s
        cluster.busy_s += took
        rows[row][4] = cached
        at(now + took, done_reading, c, row, session, turn, prompt, promised)

    def done_reading(now, c, row, session, turn, prompt, promised):
        cluster = clusters[c]
        cluster.reading = False
        cluster.backlog -= promised
        answer = 1 + int(rng.exponential(answer_tokens))
        finish = now + answer * token_s
        rows[row][1:3] = now + token_s, finish
        said[session] = prompt + answer
        at(finish, answered, c, session, turn, prompt + answer)
        read(now, c)

    def answered(now, c, session, turn, tokens):
        _keep(clusters[c], session, tokens)
        if turn + 1 < turns:
            at(now + rng.exponential(think_s), ask, session, turn + 1,
               1 + rng.exponential(new_tokens))

    for s in range(n_sessions):
        at(starts[s], ask, s, 0, 1 + rng.exponential(start_tokens))
    now = 0.0
    while events:
        now, _, what, args = heapq.heappop(events)
        what(now, *args)
    columns = np.array(rows, float)
    return Fleet(*columns[:, :3].T, *columns[:, 3:].T.astype(np.int64),
                 np.array([c.busy_s / now for c in clusters]))
