"""How the benchmarks measure: calls in turn, so that a busy moment hits all alike."""
import statistics
import time


def seconds_in_turn(calls, repeats, clock=time.perf_counter):
    """Seconds of each call, a list each: one round to warm up, then `repeats` rounds in turn.

    `clock` time.process_time counts CPU time, which on one thread of a quiet machine is the time
    that passes, and on a shared one leaves out the time given to others.
    """
    seconds = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return seconds


def interleaved(calls, repeats):
    """Median seconds of each call."""
    return {name: statistics.median(s) for name, s in seconds_in_turn(calls, repeats).items()}
