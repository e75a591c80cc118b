"""The one way a chapter prints numbers, draws figures, shows code and checks an exercise.

Outputs are compared to the letter when the notebooks are tested, so numbers are printed with few
digits, far above the noise of float64, and without negative zeros, addresses or times.
"""
import base64
import inspect
import io
import math

import numpy as np

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#6B6B6B")
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY)   # Okabe and Ito: safe for colour-blind eyes
PAPER = "#FAFAF7"                                       # opaque, so that dark mode changes nothing


def number(x, digits=4):
    """One scalar as text: integers in full, with separators; floats to `digits` significant."""
    if isinstance(x, (bool, np.bool_)):
        return "yes" if x else "no"
    if isinstance(x, (int, np.integer)):
        return f"{int(x):,}"
    if isinstance(x, (float, np.floating)):
        x = float(x)
        text = "0" if abs(x) < 1e-300 else f"{x:.{digits}g}"
        return f"{float(text):,.0f}" if 10_000 <= abs(float(text)) < 1e12 else text
    return str(x)


def _array(a, digits, tiny):
    a, places = np.asarray(a), None
    if a.dtype.kind == "f":
        a = np.where(np.abs(a) < tiny, 0.0, a)                              # no 1e-17
        top = np.abs(a[np.isfinite(a)]).max(initial=0)
        places = digits - 1 - (math.floor(math.log10(top)) if 0 < top < 0.1 else 0)
        a = np.round(a, places) + 0.0                                       # and no -0.0
    return np.array2string(a, precision=places, suppress_small=True, max_line_width=96,
                           separator=" ", floatmode="maxprec", threshold=80)


def show(digits=4, tiny=1e-12, **named):
    """Print each named value on a line of its own: scalars in `digits` digits, arrays rounded.

    Args: digits, significant digits (in an array: of its largest entry when that is below 0.1,
        otherwise digits - 1 decimals); tiny, array entries below it print as 0; named, the values.
    """
    width = max(len(name) for name in named)
    for name, value in named.items():
        if isinstance(value, np.ndarray) and value.ndim:
            text = _array(value, digits, tiny)
        elif isinstance(value, (list, tuple)):
            text = "  ".join(number(v, digits) for v in value)
        else:
            text = number(value, digits)
        pad = "\n" + " " * (width + 2)
        print(f"{name:<{width}}  {text.replace(chr(10), pad)}")


def table(header, rows, digits=4):
    """Print rows under a header, columns of numbers (and "") right-aligned.

    Args: header, a list of names; rows, lists of the same length; digits, significant digits.
    Raises: ValueError when a row's length is not the header's.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"row {row!r} has {len(row)} entries; the header has {len(header)}")
    cells = [[number(v, digits) for v in row] for row in rows]
    right = [all(not isinstance(r[i], str) or not r[i] for r in rows) for i in range(len(header))]
    widths = [max(len(c[i]) for c in [list(header), *cells]) for i in range(len(header))]

    def line(parts):
        return "  ".join(p.rjust(w) if r else p.ljust(w)
                         for p, w, r in zip(parts, widths, right)).rstrip()
    print(line(header))
    print("  ".join("-" * w for w in widths))
    for c in cells:
        print(line(c))


def below(error, bound):
    """An error as text that no machine changes: "< 1e-10", or the figure if it fails."""
    return f"< {bound:.0e}" if error < bound else f"{error:.2e}, NOT below {bound:.0e}"


def figure(columns=1, rows=1, width=7.2, height=3.4, **kwargs):
    """Matplotlib figure and axes in the book's style.

    Args: columns, rows of axes; width, height in inches of the whole; kwargs for plt.subplots.
    Returns: (fig, ax), ax an array when there are several.
    """
    import matplotlib
    import matplotlib.pyplot as plt
    matplotlib.rcParams.update({
        "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
        "axes.prop_cycle": matplotlib.cycler(color=PALETTE), "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "grid.color": "#DDDDD6",
        "grid.linewidth": 0.6, "axes.axisbelow": True, "font.size": 10, "axes.titlesize": 10.5,
        "axes.titlelocation": "left", "legend.frameon": False, "lines.linewidth": 1.8,
        "font.family": "DejaVu Sans"})
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **kwargs)


def show_figure(fig, alt):
    """Display a figure as PNG with a text for those who do not see it, and close it.

    Args: fig, a matplotlib figure; alt, what the figure shows, in a sentence or two.
    Raises: ValueError when the text is too short to say anything.
    """
    import matplotlib.pyplot as plt
    from IPython.display import display
    if len(alt.split()) < 6:
        raise ValueError(f"alt={alt!r}: say what is seen, in a sentence")
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    plt.close(fig)
    display({"image/png": base64.b64encode(buffer.getvalue()).decode(),
             "text/plain": f"Figure: {' '.join(alt.split())}"}, raw=True)


def source(*functions):
    """Show the source of package functions as it stands in the file, docstring left out."""
    from IPython.display import display
    parts = []
    for f in functions:
        text = inspect.getsource(getattr(f, "vjp", f))
        if f.__doc__:
            lines = text.split("\n")
            start = next(i for i, s in enumerate(lines) if s.strip().startswith(('"""', 'r"""')))
            quotes = lines[start].count('"""')
            stop = start if quotes > 1 else next(
                i for i in range(start + 1, len(lines)) if '"""' in lines[i])
            text = "\n".join(lines[:start] + lines[stop + 1:])
        parts.append(text.rstrip())
    code = "\n\n\n".join(parts)
    display({"text/markdown": f"```python\n{code}\n```", "text/plain": code}, raw=True)


def attempt(check, fn):
    """Run an exercise's checker on a function and print "passed" or "not yet: why"."""
    try:
        check(fn)
    except Exception as error:                          # a reader's code may fail in any way
        reason = str(error).split("\n")[0] or type(error).__name__
        print(f"not yet: {reason}")
    else:
        print("passed")
