"""Check a built book: it asks no other host for anything, and no link inside it is broken.

    python tools/check_site.py build/_build/html

A link that a reader may click leads where it likes. What the page itself loads (scripts, styles,
pictures, fonts, frames) must lie in the folder.
"""
import html.parser
import pathlib
import re
import sys
import urllib.parse

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src",
         "audio": "src", "embed": "src", "object": "data", "track": "src"}
LOADING_RELS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect",
                "dns-prefetch", "manifest", "apple-touch-icon"}
TEMPLATES = {"webpack-macros.html", "sbt-webpack-macros.html"}      # left in _static by the theme
CSS_URL = re.compile(r"""(?:url\(\s*|@import\s+)["']?(?P<url>[^"')\s;]+)""")
CSS_COMMENT = re.compile(r"/\*.*?\*/", re.S)
REMOTE = re.compile(r"^(https?:)?//|^(ftp|ws|wss):", re.I)


class Page(html.parser.HTMLParser):
    """What one page loads, links to, and can be linked at; and pictures without a text."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.loads, self.links, self.ids, self.no_alt, self.styles = [], [], set(), [], []
        self.in_style = False

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get("id"):
            self.ids.add(attrs["id"])
        if tag == "a" and attrs.get("name"):
            self.ids.add(attrs["name"])
        if tag in LOADS and attrs.get(LOADS[tag]):
            self.loads.append(attrs[LOADS[tag]])
        for part in (attrs.get("srcset") or "").split(","):
            if part.strip():
                self.loads.append(part.split()[0])
        if tag == "link" and LOADING_RELS & set((attrs.get("rel") or "").lower().split()):
            self.loads.append(attrs.get("href") or "")
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag == "img" and not (attrs.get("alt") or "").strip():
            self.no_alt.append((attrs.get("src") or "")[:80])
        if tag == "meta" and (attrs.get("http-equiv") or "").lower() == "refresh":
            self.links.append((attrs.get("content") or "").partition("url=")[2].strip("'\" "))
        if attrs.get("style"):
            self.styles.append(attrs["style"])
        self.in_style = tag == "style"

    def handle_endtag(self, tag):
        self.in_style = False

    def handle_data(self, data):
        if self.in_style:
            self.styles.append(data)


def css_urls(text):
    return [m["url"] for m in CSS_URL.finditer(CSS_COMMENT.sub("", text))]


def problems(root):
    """Every fault of the site under `root`, as lines of text."""
    root = pathlib.Path(root).resolve()
    paths = sorted(p for p in root.rglob("*.html") if p.name not in TEMPLATES)
    if not paths:
        return [f"{root}: no page"]
    pages, found = {}, []
    for path in paths:
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        pages[path] = page

    def target(origin, url):
        """The file and fragment that a relative url names; None when it leaves the site."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme or parts.netloc:
            return None
        name = urllib.parse.unquote(parts.path)
        file = origin if not name else (root / name.lstrip("/") if name.startswith("/")
                                        else origin.parent / name).resolve()
        file = file / "index.html" if file.is_dir() else file
        return file, urllib.parse.unquote(parts.fragment)

    def check_load(origin, url):
        where = origin.relative_to(root)
        if REMOTE.match(url):
            found.append(f"{where}: loads from another host: {url}")
        elif not url.startswith(("data:", "blob:", "#")):
            hit = target(origin, url)
            if hit and not hit[0].is_file():
                found.append(f"{where}: loads a file that is not there: {url}")

    for path, page in pages.items():
        where = path.relative_to(root)
        for url in page.loads + [u for text in page.styles for u in css_urls(text)]:
            check_load(path, url)
        for url in page.links:
            hit = target(path, url)
            if hit is None or url.startswith("javascript:"):
                continue
            file, fragment = hit
            if not file.is_file():
                found.append(f"{where}: broken link: {url}")
            elif fragment and file in pages and fragment not in pages[file].ids:
                found.append(f"{where}: no such place in the page: {url}")
        found += [f"{where}: picture without alt text: {src}" for src in page.no_alt]
    for path in sorted(root.rglob("*.css")):
        for url in css_urls(path.read_text(encoding="utf-8", errors="replace")):
            check_load(path, url)
    return sorted(set(found))


def main():
    found = problems(sys.argv[1] if len(sys.argv) > 1 else "build/_build/html")
    print("\n".join(found) or "no request leaves the host, no link is broken")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
