"""The supernode: ranks, the links between them, arrays that move and the time it takes.

`fabric` says who is wired to whom, `flow` how messages share links, `schedules` who sends what in
which round, `engine` moves arrays by them and times them, `collectives` gives them to `Fabric` as
methods, `trace` shows what happened when.
"""
from k3np.supernode import collectives as _methods  # noqa: F401  (it gives Fabric its methods)
from k3np.supernode.fabric import (
    PRESETS,
    Fabric,
    degrade,
    full_mesh,
    preset,
    ring,
    star,
    torus,
    two_tier,
    without,
)

__all__ = ["PRESETS", "Fabric", "degrade", "full_mesh", "preset", "ring", "star", "torus",
           "two_tier", "without"]
