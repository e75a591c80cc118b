"""What happened when: a trace for Perfetto or chrome://tracing, and a chart of bars."""
import json
import os
import pathlib
import tempfile

import numpy as np


def lanes(trace):
    """For each message a lane of its sender: messages that overlap get different ones. [M]"""
    lane, free = np.zeros(len(trace.src), np.int64), {}
    for i in np.lexsort((trace.dst, trace.start_s, trace.src)):
        ends = free.setdefault(int(trace.src[i]), [])
        first = next((j for j, end in enumerate(ends) if end <= trace.start_s[i]), len(ends))
        ends[first:first + 1] = [trace.finish_s[i]]
        lane[i] = first
    return lane


def chrome_trace(fabric, trace, name=""):
    """The trace as the JSON object that Chrome and Perfetto read: one process a node, threads of a
    rank for messages that overlap, microseconds.

    Args: fabric; trace, of a `Result`; name, put before each message.
    Returns: a dict of lists, numbers and strings.
    """
    events, seen, lane = [], set(), lanes(trace)
    for i in np.lexsort((lane, trace.src)):
        src, dst = int(trace.src[i]), int(trace.dst[i])
        node = int(fabric.node[src]) if src >= 0 else -1
        thread = 1000 * (src + 1) + int(lane[i])
        who = [f"rank {r}" if r >= 0 else "switch" for r in (src, dst)]
        if node not in seen:
            seen.add(node)
            events.append({"name": "process_name", "ph": "M", "pid": node, "tid": 0,
                           "args": {"name": f"node {node}" if node >= 0 else "switch"}})
        if thread not in seen:
            seen.add(thread)
            events.append({"name": "thread_name", "ph": "M", "pid": node, "tid": thread,
                           "args": {"name": who[0] + (f" ({lane[i] + 1})" if lane[i] else "")}})
        link = int(trace.bottleneck[i])
        events.append({
            "name": f"{name} to {who[1]}".strip(), "ph": "X", "pid": node, "tid": thread,
            "ts": float(trace.start_s[i]) * 1e6,
            "dur": float(trace.finish_s[i] - trace.start_s[i]) * 1e6,
            "args": {"bytes": float(trace.n_bytes[i]), "round": int(trace.round[i]),
                     "bottleneck": fabric.link_names[link] if link >= 0 else "none"}})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_trace(path, fabric, trace, name=""):
    """Write the trace as a file, all or nothing: a fault leaves what was there before.

    Args: path, ending in .json; fabric, trace, name, as in `chrome_trace`.
    Returns: the path.
    """
    return write_json(path, chrome_trace(fabric, trace, name))


def write_json(path, value):
    """Write a JSON object as a file, all or nothing. Args: path; value. Returns: the path."""
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    text = json.dumps(value)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        pathlib.Path(unfinished).unlink(missing_ok=True)
        raise
    return path


def gantt(ax, trace, color_by="round", unit_s=1e-6, labels=True):
    """Draw each message as a bar in its sender's row, on matplotlib axes.

    Args: ax; trace; color_by, "round" or "dst"; unit_s of the axis of time; labels, whether a bar
        says where it goes.
    """
    from k3np.show import BLUE, GREY, PALETTE, RED
    lane = lanes(trace)
    senders = sorted(set(trace.src.tolist()))
    row = {src: i for i, src in enumerate(senders)}
    count = {src: 1 + int(lane[trace.src == src].max()) for src in senders}
    for i in range(len(trace.src)):
        src, dst = int(trace.src[i]), int(trace.dst[i])
        height = 0.84 / count[src]
        start, long = trace.start_s[i] / unit_s, (trace.finish_s[i] - trace.start_s[i]) / unit_s
        color = PALETTE[int(trace.round[i] if color_by == "round" else dst) % len(PALETTE)]
        low = row[src] - 0.42 + lane[i] * height
        ax.broken_barh([(start, long)], (low, height), facecolor=color, edgecolor="white",
                       linewidth=0.6)
        if labels and height > 0.3:
            ax.text(start + long / 2, low + height / 2, str(dst) if dst >= 0 else "s", ha="center",
                    va="center", fontsize=7,
                    color="white" if color in (BLUE, RED, GREY) else "black")
    ax.set(yticks=range(len(senders)), xlabel=f"time, {'us' if unit_s == 1e-6 else 's'}",
           yticklabels=[str(s) if s >= 0 else "switch" for s in senders], ylabel="sender")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
