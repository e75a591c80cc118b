"""Kimi Delta Attention: a memory of fixed size that forgets by channel and corrects what it holds.

`recurrent` holds the gate and the definition, `chunk` the same by matrix products, `parallel` one
sequence on several ranks, `layer` the layer around them. Import from here.
"""
from k3np.kda.chunk import kda_chunk, kda_chunkwise
from k3np.kda.layer import KDACache, init_kda_cache, kda_layer, kda_shapes
from k3np.kda.parallel import Segment, combine, context_parallel, kda_segment, reset_gates
from k3np.kda.recurrent import decay_gate, kda_recurrent, softplus_decay_gate

__all__ = ["KDACache", "Segment", "combine", "context_parallel", "decay_gate", "init_kda_cache",
           "kda_chunk", "kda_chunkwise", "kda_layer", "kda_recurrent", "kda_segment", "kda_shapes",
           "reset_gates", "softplus_decay_gate"]
