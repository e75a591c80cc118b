"""What this book asks of Sphinx beyond its configuration.

1. No page mentions a remote script: sphinx-thebe, which Jupyter Book always loads, is taken out.
2. The API page lists every module there is, so that none is forgotten.
3. Docstrings are written to be read in a terminal; here their sections become lists, their
   indented lines stay as they are, and no character of theirs is taken for markup.
"""
import dataclasses
import pkgutil
import re

import k3np

SECTIONS = ("Args", "Returns", "Raises", "Source", "Departs", "Keeps", "Note", "Yields")
HEAD = re.compile(rf"({'|'.join(SECTIONS)}):(?:\s+(.*)|$)")


def drop_thebe(app, pagename, templatename, context, doctree):
    def keep(script):
        text = f"{getattr(script, 'filename', script)} {getattr(script, 'attributes', '')}"
        return "thebe" not in text.lower()
    context["script_files"] = [s for s in context.get("script_files", []) if keep(s)]
    if "body" in context:
        context["body"] = re.sub(
            r'<script type="text/x-thebe-config">.*?</script>\s*'
            r'(<script>kernelName = .*?</script>)?', "", context["body"], flags=re.S)


def list_modules(app, docname, source):
    if "<!-- every module -->" not in source[0]:
        return
    modules = [m for m in pkgutil.walk_packages(k3np.__path__, "k3np.") if "._" not in m.name]
    source[0] = source[0].replace("<!-- every module -->", "\n\n".join(
        f"## `{m.name}`\n\n```{{eval-rst}}\n.. automodule:: {m.name}\n"
        + ("```" if m.ispkg else "   :members:\n```") for m in modules))


def api_is_outdated(app, env, added, changed, removed):
    return {"book/api"} & set(env.all_docs)


def plain(text):
    """Escape reStructuredText, keeping `code`."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    return "".join(f"``{p.strip('`')}``" if p.startswith("`") and len(p) > 1
                   else re.sub(r"([\\*|`_])", r"\\\1", p) for p in parts)


def indent_of(line):
    return len(line) - len(line.lstrip())


def blocks(lines):
    """Yield ("section", name, lines), ("text", lines) and ("verbatim", lines) in order."""
    kind, name, held = None, None, []
    for line in [*lines, ""]:
        head = HEAD.match(line)
        blank = not line.strip()
        want = ("section" if head else "text" if line[:1].strip() else
                kind if kind == "section" else "verbatim") if not blank else None
        if held and (blank or head or want != kind):
            yield kind, name, held
            kind, held = None, []
        if blank:
            continue
        if head:
            kind, name, held = "section", head[1], [head[2]] if head[2] else []
            if not held:
                held = [""]
        else:
            kind, name = want, name if want == "section" else None
            held.append(line)


def entries(lines):
    """Join the continuation lines of a section's entries."""
    lines = [line for line in lines if line.strip()]
    if not lines:
        return []
    base = min(map(indent_of, lines))
    out = []
    for line in lines:
        if indent_of(line) > base and out:
            out[-1] += " " + line.strip()
        else:
            out.append(line.strip())
    return out


def tidy_docstring(app, what, name, obj, options, lines):
    out = []
    for kind, section, held in blocks(list(lines)):
        if kind == "text":
            out += [plain(" ".join(s.strip() for s in held)), ""]
        elif kind == "verbatim":
            base = min(map(indent_of, held))
            out += ["::", "", *("    " + s[base:] for s in held), ""]
        elif held[0]:                               # the text began beside the section's name
            out += [f"**{section}** " + plain(" ".join(s.strip() for s in held)), ""]
        else:
            found = entries(held)
            if section == "Args":
                out += [f"**{section}**", ""]
                for entry in found:
                    arg, _, rest = entry.partition(":")
                    if rest and len(arg) < 60:
                        out += [f"* ``{arg.strip()}``: {plain(rest.strip())}"]
                    else:
                        out += [f"* {plain(entry)}"]
                out += [""]
            else:
                out += [f"**{section}** " + plain(" ".join(found)), ""]
    lines[:] = out


def short_signature(app, what, name, obj, options, signature, annotation):
    """A configuration's fields are its docstring's business, not forty arguments of a call."""
    return ("(...)", None) if what == "class" and dataclasses.is_dataclass(obj) else None


def skip_fields(app, what, name, obj, skip, options):
    """The fields of a NamedTuple are told in its docstring."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app):
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", short_signature)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("source-read", list_modules)
    app.connect("env-get-outdated", api_is_outdated)
    app.connect("autodoc-process-docstring", tidy_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
