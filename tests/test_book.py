"""The chapters and the prose pages: complete, linked, readable without eyes, honest in outputs.

That stored outputs are what the code prints is nbval's business. Here is what a fresh run cannot
tell: what must be there, and what must not.
"""
import importlib
import json
import pathlib
import re
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import build_book  # noqa: E402
import check_site  # noqa: E402

pytestmark = pytest.mark.book

HEADINGS = ("Question", "You will build", "Idea", "Equation", "Code", "Check", "Experiment",
            "Traps", "Exercises", "Where next")
TAGS = {"hide-input", "hide-output", "hide-cell", "remove-input", "remove-output", "remove-cell",
        "exercise-check", "exercise-stub", "exercise-solution", "nbval-ignore-output"}
UNREPEATABLE_PER_CHAPTER = 2
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROSE = sorted([*(ROOT / "book").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "tests").rglob("*.md"),
                *(ROOT / "benchmarks").glob("*.md")])


def joined(text):
    return text if isinstance(text, str) else "".join(text)


class Chapter:
    """A notebook, read once."""

    def __init__(self, path):
        self.path = path
        self.cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        self.code = [c for c in self.cells if c["cell_type"] == "code"]
        self.markdown = "\n\n".join(joined(c["source"]) for c in self.cells
                                    if c["cell_type"] == "markdown")

    def headings(self, level):
        plain = re.sub(r"^(```|~~~|:::).*?^\1", "", self.markdown, flags=re.M | re.S)
        return re.findall(rf"^{'#' * level} (.+?)\s*$", plain, re.M)


def tags(cell):
    return cell["metadata"].get("tags", [])


def text_of(cell):
    """Everything a cell printed, as text."""
    parts = []
    for output in cell["outputs"]:
        parts.append(joined(output.get("text", "")))
        parts += [joined(v) for k, v in output.get("data", {}).items() if k.startswith("text/")]
    return "\n".join(parts)


chapters = pytest.mark.parametrize("chapter", [Chapter(p) for p in PATHS],
                                   ids=lambda c: c.path.stem)


def toc_files():
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    return [toc["root"]] + [c["file"] for part in toc["parts"] for c in part["chapters"]]


def test_every_chapter_is_in_the_table_of_contents_in_order():
    listed = [f.removeprefix("notebooks/") for f in toc_files() if f.startswith("notebooks/")]
    assert listed == [p.stem for p in PATHS]
    assert listed, "a book without chapters"


def test_a_chapters_number_is_its_place():
    """Sphinx numbers pages in order, so a chapter that is not written yet keeps its place."""
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    numbered = [c["file"].rpartition("/")[2].removeprefix("planned_")[:2]
                for part in toc["parts"] if part.get("numbered") for c in part["chapters"]]
    assert numbered == [f"{i:02d}" for i in range(1, len(numbered) + 1)]


def test_every_prose_page_is_in_the_table_of_contents():
    listed = {f.removeprefix("book/") for f in toc_files() if f.startswith("book/")}
    assert listed == {p.stem for p in (ROOT / "book").glob("*.md")}


@chapters
def test_headings(chapter):
    assert len(chapter.headings(1)) == 1, "one title"
    assert joined(chapter.cells[0]["source"]).startswith("# "), "the title comes first"
    found = chapter.headings(2)
    at = [next((i for i, h in enumerate(found) if word.lower() in h.lower()), None)
          for word in HEADINGS]
    missing = [word for word, i in zip(HEADINGS, at, strict=True) if i is None]
    assert not missing, f"no heading with {missing}; there are {found}"
    assert at == sorted(at), f"the headings come in the order {HEADINGS}; here {found}"


@chapters
def test_the_front_page_leads_to_it_by_its_title(chapter):
    intro = (ROOT / "book" / "intro.md").read_text(encoding="utf-8")
    links = dict(re.findall(r"\[([^\]]+)\]\(\.\./notebooks/(\w+)\.ipynb\)", intro))
    titles = {stem: title for title, stem in links.items()}
    assert titles.get(chapter.path.stem) == chapter.headings(1)[0]


@chapters
def test_every_figure_has_a_text(chapter):
    figures = 0
    for cell in chapter.code:
        pictures = [o for o in cell["outputs"] if "image/png" in o.get("data", {})]
        assert len(pictures) <= 1, f"{cell['id']}: one figure a cell, so that each has its own text"
        for output in pictures:
            text = joined(output["data"].get("text/plain", ""))
            assert text.startswith("Figure: "), f"{cell['id']}: use show_figure(fig, alt=...)"
            alt = text.removeprefix("Figure: ")
            assert len(alt.split()) >= 8, f"{cell['id']}: {alt!r} says too little"
            stored = cell["metadata"].get("mystnb", {}).get("image", {}).get("alt")
            assert stored == alt, f"{cell['id']}: run `make outputs`, the stored text is stale"
            figures += 1
    assert figures, "a chapter has at least one figure"
    bare = re.search(r"!\[\s*\]\(|<img(?![^>]*\balt=)", chapter.markdown)
    assert not bare, "a picture without text"


@chapters
def test_exercises(chapter):
    order = [(kind, cell) for cell in chapter.code for kind in tags(cell)
             if kind.startswith("exercise-")]
    kinds = [kind.removeprefix("exercise-") for kind, _ in order]
    count = kinds.count("stub")
    assert count >= 3, f"{count} exercises; three or more"
    assert kinds == ["check", "stub", "solution"] * count, f"order of the cells: {kinds}"
    titles = re.findall(r"^### Exercise (\d+): \S", chapter.markdown, re.M)
    assert titles == [str(i + 1) for i in range(count)]
    for kind, cell in order:
        text = text_of(cell)
        if kind == "exercise-stub":
            assert text.startswith("not yet: "), f"{cell['id']}: stub printed {text!r}"
            assert text.strip() != "not yet: AssertionError", f"{cell['id']}: say what is missing"
        elif kind == "exercise-solution":
            assert text.strip() == "passed", f"{cell['id']}: the solution printed {text!r}"
            assert "hide-cell" in tags(cell), f"{cell['id']}: fold the solution away"


@chapters
def test_stored_outputs_are_fit_to_compare(chapter):
    counts = [cell["execution_count"] for cell in chapter.code]
    assert counts == list(range(1, len(counts) + 1)), "run it from top to bottom: `make outputs`"
    ids = [cell["id"] for cell in chapter.cells]
    assert len(set(ids)) == len(ids)
    unrepeatable = 0
    for cell in chapter.code:
        strange = set(tags(cell)) - TAGS
        assert not strange, f"{cell['id']}: tags {strange}"
        unrepeatable += "nbval-ignore-output" in tags(cell)
        last = joined(cell["source"]).rstrip()[-1:]
        assert last != ";", f"{cell['id']}: nbval does not honour a final ;"
        for output in cell["outputs"]:
            assert output["output_type"] != "error", f"{cell['id']}: an error is stored"
            assert output.get("name") != "stderr", f"{cell['id']}: prints to stderr"
        text = text_of(cell)
        for what, pattern in {
                "an address": r"0x[0-9a-f]{6,}", "a bare figure": r"Figure size|<Figure",
                "a NumPy repr": r"np\.(float|int|bool)|\barray\(\[", "a dtype repr": r"dtype=",
                "a negative zero": r"(?<![\w.])-0(\.0*)?(?![\w.])",
                "a path of one machine": r"/(home|root|tmp|work|usr|Users)/"}.items():
            if "text/markdown" not in str(cell["outputs"]):       # `source` shows code
                assert not re.search(pattern, text), f"{cell['id']}: prints {what}:\n{text[:400]}"
    assert unrepeatable <= UNREPEATABLE_PER_CHAPTER, f"{unrepeatable} cells are not compared"


def documents():
    for path in PROSE:
        yield path, path.read_text(encoding="utf-8")
    for path in PATHS:
        yield path, Chapter(path).markdown


def without_code(text):
    text = re.sub(r"^(`{3,})(?!\{).*?^\1`*\s*$", "", text, flags=re.M | re.S)
    return re.sub(r"(?<![}`])`[^`\n]+`(?!`)", "", text)


def test_links_citations_and_labels_resolve():
    bib = set(re.findall(r"^@\w+\{(\w+),", (ROOT / "book" / "references.bib").read_text(), re.M))
    everything = list(documents())
    labels = {"equations": set(), "places": set()}
    for _, text in everything:
        labels["equations"] |= set(re.findall(r"\$\$\s*\((eq-[\w-]+)\)", text))
        labels["equations"] |= set(re.findall(r"^:label:\s*(\S+)", text, re.M))
        labels["places"] |= set(re.findall(r"^\(([\w-]+)\)=\s*$", text, re.M))
    faults = []
    for path, text in everything:
        where = path.relative_to(ROOT)
        for role, body in re.findall(r"\{(\w+(?::\w+)?)\}`([^`]+)`", text):
            target = re.sub(r"^.*<(.+)>$", r"\1", body, flags=re.S).strip()
            if role.startswith("cite"):
                faults += [f"{where}: no entry {key}" for key in re.split(r"\s*,\s*", target)
                           if key not in bib]
            elif role == "eq" and target not in labels["equations"]:
                faults.append(f"{where}: no equation {target}")
            elif role == "ref" and target not in labels["places"] | labels["equations"]:
                faults.append(f"{where}: no place {target}")
            elif role == "doc" and not any((path.parent / f"{target}{end}").is_file()
                                           for end in (".md", ".ipynb")):
                faults.append(f"{where}: no page {target}")
        for url in re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", without_code(text)):
            file, _, place = url.partition("#")
            if re.match(r"[a-z]+:", url) or not file:
                continue
            if not (path.parent / file).exists():
                faults.append(f"{where}: broken link {url}")
    assert not faults, "\n".join(faults)
    assert len(labels["equations"]) == sum(
        len(re.findall(r"\$\$\s*\(eq-[\w-]+\)|^:label:\s*eq-", text, re.M))
        for _, text in everything), "an equation's label is used twice"


def resolve(name):
    """The object behind a dotted name of the package."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", ["glossary", "api", "notation"])
def test_every_code_name_exists(page):
    text = (ROOT / "book" / f"{page}.md").read_text(encoding="utf-8")
    names = set(re.findall(r"(?:`|automodule:: )(k3np\.[\w.]+\w)", text))
    for name in names:
        resolve(name)
    if page == "glossary":
        assert names
        entries = re.split(r"\n(?=\S)", text.split(":::{glossary}")[1].split("\n:::")[0].strip())
        for entry in entries:
            number = re.search(r"Chapter (\d+)\.\s*$", entry)
            assert number, f"say the chapter at the end of: {entry.splitlines()[0]}"
            assert any(p.name.startswith(f"{int(number[1]):02d}_") for p in PATHS), entry
        heads = [entry.splitlines()[0].casefold() for entry in entries]
        assert heads == sorted(heads), "entries in alphabetical order"


def test_the_ledger_has_a_link_for_each_verdict():
    text = (ROOT / "book" / "claims.md").read_text(encoding="utf-8")
    verdicts = ("reproduced exactly", "by calculation", "in a toy", "measured by others")
    rows = [r.split("|") for r in re.findall(r"^\|(.+)\|\s*$", text, re.M)[2:]]
    assert rows
    for row in rows:
        claim, verdict, figure, link = (cell.strip() for cell in row)
        assert verdict.lower().startswith(verdicts), f"{claim}: verdict {verdict!r}"
        assert figure and re.search(r"\]\(\.\./notebooks/\w+\.ipynb", link), f"{claim}: {link!r}"


def test_the_readme_example_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


GOOD_PAGE = """<html><head><link rel="stylesheet" href="a.css"><link rel="canonical"
href="https://elsewhere.org/"></head><body><a href="https://elsewhere.org/">out</a>
<a href="b.html#there">in</a><img src="p.png" alt="a picture"></body></html>"""


def site(folder, page=GOOD_PAGE, css="p { background: url(p.png) }"):
    folder.mkdir(exist_ok=True)
    (folder / "a.html").write_text(page)
    (folder / "b.html").write_text("<html><body><h1 id='there'>b</h1></body></html>")
    (folder / "a.css").write_text(css)
    (folder / "p.png").write_bytes(b"")
    return check_site.problems(folder)


@pytest.mark.parametrize("old, new, says", [
    ('href="a.css"', 'href="https://cdn.org/a.css"', "another host"),
    ("</body>", '<script src="//cdn.org/x.js"></script></body>', "another host"),
    ("</body>", "<style>@import 'https://fonts.org/x';</style></body>", "another host"),
    ("b.html#there", "c.html", "broken link"),
    ("b.html#there", "b.html#where", "no such place"),
    ('src="p.png"', 'src="q.png"', "not there"),
    ('alt="a picture"', 'alt=""', "without alt text")])
def test_the_site_check_sees_a_fault(tmp_path, old, new, says):
    assert site(tmp_path / "site") == []
    found = site(tmp_path / "site", GOOD_PAGE.replace(old, new))
    assert len(found) == 1 and says in found[0]


def test_the_site_check_reads_styles(tmp_path):
    found = site(tmp_path / "site", css="@font-face { src: url('https://fonts.org/f.woff2') }")
    assert len(found) == 1 and "another host" in found[0]


def test_a_notebook_runs_again_when_what_it_imports_changed():
    found = build_book.imported("from k3np.situ import situ_glu")
    names = {str(p.relative_to(ROOT)) for p in found}
    assert {"k3np/__init__.py", "k3np/situ.py", "k3np/ops.py"} <= names
    assert "k3np/config.py" not in names
    assert build_book.imported("import numpy as np") == []
