"""The documents as static pages, by Sphinx with myst-parser and the theme furo: all three are in
Debian and Ubuntu, read the Markdown that is here as it is, and their pages load nothing from
elsewhere. scripts/build-docs runs it; the folder of the sources is the tree's root."""
import os
import re

project = "tandem"
extensions = ["myst_parser"]
root_doc = "docs/site/index"
include_patterns = [
    "docs/site/index.md", "README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md",
    "*/README.md", "*/*/README.md", "bench/results/*.md"
]
exclude_patterns = ["build/**", "shared/**", "docs/site/static/**"]
html_theme = "furo"
html_title = "tandem"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
myst_heading_anchors = 4
# A block may be of a language that the colouring does not know, or be output beside commands.
suppress_warnings = ["misc.highlighting_failure"]
highlight_language = "none"

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)\)")


def to_source(app, docname, source):
    """A link to a folder becomes its name: a page of the site can be linked and a file taken along,
    a folder cannot. Everything else is Sphinx's to find, or to complain of."""
    here = os.path.dirname(os.path.join(ROOT, docname))

    def plain(m):
        if os.path.isdir(os.path.join(here, m.group(2))):
            return f"{m.group(1)} (`{os.path.relpath(os.path.join(here, m.group(2)), ROOT)}/`)"
        return m.group(0)

    source[0] = LINK.sub(plain, source[0])


def setup(app):
    app.connect("source-read", to_source)
    return {"parallel_read_safe": True}
