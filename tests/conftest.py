"""Counts what ran, kind by kind, and with --all-kinds refuses a run in which a kind did not.

A suite that lost its notebooks or its golden vectors would pass faster than ever. So the kinds are
counted where every worker's reports come together, printed, and a kind at zero fails the run. So
does a test without a kind, a test left out without a reason, and a chapter over its time.
Time is the processor time of the chapter's kernel, on one thread, its imports included.
"""
import collections
import os

import psutil
import pytest

KINDS = ("property", "grad", "golden", "traps", "errors", "book")   # markers; and nbval's cells
BUDGET_S = {"15": 120.0}                                            # chapter number: seconds
DEFAULT_BUDGET_S = 30.0

# Kernels and workers inherit these: stored outputs must not depend on the machine.
for _name, _value in (("OPENBLAS_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "1"),
                      ("MKL_NUM_THREADS", "1"), ("PYTHONHASHSEED", "0"),
                      ("JUPYTER_PLATFORM_DIRS", "1")):
    os.environ.setdefault(_name, _value)

passed = collections.Counter()
left_out = []                                # (node id, reason)
seconds = collections.Counter()              # notebook: seconds of processor time of its kernel
missing = []                                 # why the run is refused


def pytest_addoption(parser):
    parser.addoption("--all-kinds", action="store_true",
                     help="fail unless every kind of test ran (what `make test` asks)")


def is_cell(item):
    return type(item).__name__ == "IPyNbCell"


def pytest_collection_modifyitems(items):
    """Write an item's kinds into its reports, which travel from the workers."""
    for item in items:
        kinds = [k for k in KINDS if item.get_closest_marker(k)]
        item.user_properties.append(("kinds", ["nbval"] if is_cell(item) else kinds))


class KernelClock:
    """Note the processor time that a notebook's kernel has used: a busy machine adds none.

    A plugin of its own, because hooks of this file reach only the tests beside it.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        try:
            return (yield)
        finally:
            if is_cell(item):
                used = psutil.Process(item.parent.kernel.km.provisioner.pid).cpu_times()
                item.user_properties.append(("cpu_s", used.user + used.system))


def pytest_configure(config):
    config.pluginmanager.register(KernelClock())


def pytest_runtest_logreport(report):
    properties = dict(report.user_properties)
    kinds = properties.get("kinds", [])
    if "cpu_s" in properties:
        notebook = report.nodeid.split("::")[0]
        seconds[notebook] = max(seconds[notebook], properties["cpu_s"])
    if report.skipped:
        if hasattr(report, "wasxfail"):
            reason = report.wasxfail
        else:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        left_out.append((report.nodeid, reason.removeprefix("Skipped:").strip()))
    elif report.passed and report.when == "call":
        passed.update(kinds or ["no kind"])


def budget(notebook):
    return BUDGET_S.get(os.path.basename(notebook)[:2], DEFAULT_BUDGET_S)


def on_controller(config):
    return not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if not (on_controller(session.config) and session.config.getoption("--all-kinds")):
        return
    for kind in (*KINDS, "nbval"):
        if not passed[kind]:
            missing.append(f"no test of the kind `{kind}` passed: did the whole kind not run?")
    if passed["no kind"]:
        missing.append(f"{passed['no kind']} tests carry no kind: mark them ({', '.join(KINDS)})")
    for node, reason in left_out:
        if reason in ("", "unconditional skip"):
            missing.append(f"{node} was left out without a reason")
    for notebook, time_s in seconds.items():
        if time_s > budget(notebook):
            missing.append(f"{notebook} took {time_s:.0f} s of {budget(notebook):.0f} s")
    if missing and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if not on_controller(config):
        return
    write = terminalreporter
    if passed or left_out or missing:
        write.section("what ran")
        extra = ["no kind"] if passed["no kind"] else []
        for kind in (*KINDS, "nbval", *extra):
            write.line(f"{kind:<9} {passed[kind]:>6,} passed")
    for notebook, time_s in sorted(seconds.items()):
        write.line(f"{notebook:<44} {time_s:6.1f} s of {budget(notebook):.0f} s")
    for node, reason in left_out:
        write.line(f"NOT RUN  {node}: {reason or 'no reason given'}", yellow=True, bold=True)
    for why in missing:
        write.line(f"REFUSED  {why}", red=True, bold=True)
