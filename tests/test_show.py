"""What a chapter prints: digits, zeros, tables, figures, code and the verdict of an exercise."""
import json

import numpy as np
import pytest

from k3np import show as s
from k3np.ops import rms_norm, sigmoid
from k3np.show import attempt, below, figure, number, show, show_figure, source, table


@pytest.mark.property
@pytest.mark.parametrize("x, text", [
    (2_779_484_476_000, "2,779,484,476,000"), (np.int64(-12345), "-12,345"), (True, "yes"),
    (np.False_, "no"), (0.0, "0"), (-0.0, "0"), (1e-320, "0"), (0.12345678, "0.1235"),
    (np.float32(2.5), "2.5"), (9999.6, "10,000"), (2.0555e4, "20,560"),
    (3.4e38, "3.4e+38"), (float("-inf"), "-inf"), (1e-7, "1e-07"), (float("nan"), "nan"),
    ("text", "text"), (None, "None")])
def test_number(x, text):
    assert number(x) == text


@pytest.mark.property
def test_large_floats_get_separators():
    assert number(123456.0, digits=6) == "123,456" and number(1234.5) == "1234"
    assert number(123456.0) == "123,500"                   # rounded to four digits all the same


@pytest.mark.property
def test_show_snaps_zeros_and_keeps_small_arrays_legible(capsys):
    show(x=np.array([-0.0, 1e-17, -0.00004, 1.0]), small=np.array([-1.234567e-5, 2e-6]),
         pair=(1, 0.5), n=3, empty=np.array([]), whole=np.array([[1, 2], [3, 4]]))
    assert capsys.readouterr().out == (
        "x      [0. 0. 0. 1.]\n"
        "small  [-0.00001235  0.000002  ]\n"
        "pair   1  0.5\n"
        "n      3\n"
        "empty  []\n"
        "whole  [[1 2]\n        [3 4]]\n")


@pytest.mark.property
def test_noise_below_the_digits_does_not_show(capsys):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 4))
    show(a=a)
    first = capsys.readouterr().out
    show(a=a + 1e-13 * rng.standard_normal(a.shape))
    assert capsys.readouterr().out == first


@pytest.mark.property
def test_table_aligns_numbers_right_and_words_left(capsys):
    table(["part", "bytes"], [["a", 1_000_000], ["long name", 2]])
    assert capsys.readouterr().out == (
        "part           bytes\n---------  ---------\na          1,000,000\nlong name          2\n")
    table(["a", "b"], [["x", 12], ["y", ""]])
    assert capsys.readouterr().out == "a   b\n-  --\nx  12\ny\n"
    table(["x"], [])
    assert capsys.readouterr().out == "x\n-\n"


@pytest.mark.errors
def test_table_and_alt_text_are_checked():
    with pytest.raises(ValueError, match=r"row \[1\] has 1 entries; the header has 2"):
        table(["a", "b"], [[1]])
    with pytest.raises(ValueError, match="say what is seen"):
        show_figure(None, alt="a line")


@pytest.mark.property
def test_below_hides_the_noise_and_shows_the_failure():
    assert below(3e-13, 1e-10) == "< 1e-10"
    assert below(3e-3, 1e-10) == "3.00e-03, NOT below 1e-10"
    assert "NOT below" in below(float("nan"), 1e-10)


@pytest.mark.property
def test_attempt_gives_a_verdict_and_never_raises(capsys):
    def check(fn):
        assert fn(2) == 4, "2 must give 4\nsecond line"
    attempt(check, lambda x: x * x)
    attempt(check, lambda x: None)
    attempt(check, None)
    attempt(lambda fn: [][1], None)
    attempt(lambda fn: fn / 0, 1)
    def fails_silently(fn):
        raise AssertionError
    attempt(fails_silently, None)
    assert capsys.readouterr().out.splitlines() == [
        "passed", "not yet: 2 must give 4", "not yet: 'NoneType' object is not callable",
        "not yet: list index out of range", "not yet: division by zero",
        "not yet: AssertionError"]


@pytest.fixture
def displayed(monkeypatch):
    """What goes to the notebook, as a list of MIME bundles."""
    import IPython.display
    bundles = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: bundles.append(data))
    return bundles


@pytest.mark.property
def test_source_is_the_code_without_its_docstring(displayed):
    source(sigmoid, rms_norm)
    text = displayed[0]["text/plain"]
    assert "def sigmoid(x):" in text and "def rms_norm(x, w, eps=1e-5):" in text
    assert '"""' not in text and "@differentiable" in text and "ct_unit" in text
    assert displayed[0]["text/markdown"] == f"```python\n{text}\n```"


@pytest.mark.book
def test_a_figure_carries_its_alt_text_is_repeatable_and_has_one_style(displayed):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    for _ in range(2):
        fig, ax = figure()
        ax.plot([0, 1], [1, 0])
        show_figure(fig, alt="A line that falls\n from one to zero.")
    assert displayed[0] == displayed[1]
    assert displayed[0]["text/plain"] == "Figure: A line that falls from one to zero."
    assert set(displayed[0]) == {"image/png", "text/plain"} and json.dumps(displayed[0])
    assert not plt.get_fignums()                                   # closed
    assert matplotlib.rcParams["figure.facecolor"] == s.PAPER      # opaque: dark mode is safe
    fig, axes = figure(columns=2, rows=1)
    assert axes.shape == (2,)
    plt.close(fig)


@pytest.mark.book
def test_palette_differs_in_lightness_or_hue_for_colour_blind_eyes():
    """The Okabe-Ito colours, all distinct; the first two far apart in luminance."""
    def luminance(colour):
        r, g, b = (int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * r ** 2.2 + 0.7152 * g ** 2.2 + 0.0722 * b ** 2.2
    assert len(set(s.PALETTE)) == 7
    assert abs(luminance(s.PALETTE[0]) - luminance(s.PALETTE[1])) > 0.2
