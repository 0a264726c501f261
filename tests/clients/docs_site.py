#!/usr/bin/python3
"""The documents as pages (make docs): they are built without a complaint, load nothing from
elsewhere, and each link in them leads to a page, heading or file that is there. Skipped (77)
without Sphinx, myst-parser and furo. Each check is first seen to catch a planted mistake."""
import html.parser
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
MAX_PICTURES = 300 * 1024  # of docs/pictures together: the tree is cloned by everybody


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids.update(v for k, v in attrs if k in ("id", "name") and v)
        if tag == "a" and a.get("href"):
            self.links.append(a["href"])
        if tag == "link" and a.get("rel") not in ("canonical", "index", "search", "next", "prev"):
            self.loads.append(a.get("href") or "")
        for key in ("src", "data", "poster", "srcset"):
            if a.get(key):
                self.loads.append(a[key])


def outside(reference):
    return reference.startswith("//") or urllib.parse.urlsplit(reference).scheme in ("http",
                                                                                     "https")


def page_problems(site, path, pages):
    page = pages[path]
    here = os.path.dirname(path)
    for reference in page.loads:
        if outside(reference):
            yield f"{path} loads {reference} from elsewhere"
    for reference in page.links + page.loads:
        parts = urllib.parse.urlsplit(reference)
        if outside(reference) or parts.scheme:
            continue
        target = os.path.normpath(os.path.join(here, urllib.parse.unquote(parts.path)))
        target = path if not parts.path else target
        if not os.path.exists(os.path.join(site, target)):
            yield f"{path} links to {reference}, which is not there"
        elif parts.fragment and target in pages and urllib.parse.unquote(
                parts.fragment) not in pages[target].ids:
            yield f"{path} links to {reference}: there is no such heading"


def style_problems(path, text):
    for m in re.finditer(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text):
        if outside(m.group(1) or m.group(2)):
            yield f"{path} loads {m.group(0)} from elsewhere"


def problems(site):
    pages, found = {}, []
    for folder, _, names in os.walk(site):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), site)
            if not name.endswith((".html", ".css")):
                continue
            with open(os.path.join(folder, name), encoding="utf-8") as f:
                text = f.read()
            found += style_problems(path, text)
            if name.endswith(".html"):
                pages[path] = Page(text)
    for path in pages:
        found += page_problems(site, path, pages)
    return found, len(pages)


def look_at_ourselves():
    planted = {
        "a.html": '<a href="b.html#there">x</a><p id="here"><a href="#here">y</a>',
        "b.html": '<script src="https://cdn.example/x.js"></script><a href="c.html">z</a>',
        "s.css": "@import 'https://fonts.example/f.css'; p{background:url(data:image/png,x)}",
    }
    with tempfile.TemporaryDirectory() as site:
        for name, text in planted.items():
            with open(os.path.join(site, name), "w", encoding="utf-8") as f:
                f.write(text)
        found, _ = problems(site)
    want = [
        "no such heading", "b.html loads https://cdn.example/x.js", "c.html, which is not there",
        "s.css loads"
    ]
    assert len(found) == len(want) and all(any(w in f for f in found) for w in want), found


def main():
    look_at_ourselves()
    if any(importlib.util.find_spec(m) is None for m in ("sphinx", "myst_parser", "furo")):
        print("skipped: no Sphinx, myst-parser or furo (scripts/install-deps --only-docs)")
        return 77
    with tempfile.TemporaryDirectory() as out:
        site = os.path.join(out, "site")
        built = subprocess.run([os.path.join(ROOT, "scripts", "build-docs"), site], check=False,
                               capture_output=True, text=True)
        if built.returncode:
            print(built.stdout + built.stderr)
            return 1
        found, n = problems(site)
        for must in ("index.html", "docs/site/index.html", "README.html", "docs/words.html",
                     "docs/tutorial-first-model.html", "bench/results/README.html"):
            if not os.path.exists(os.path.join(site, must)):
                found.append(f"{must} is missing")
    pictures = os.path.join(ROOT, "docs", "pictures")
    size = sum(os.path.getsize(os.path.join(pictures, f)) for f in os.listdir(pictures))
    if size > MAX_PICTURES:
        found.append(f"docs/pictures has {size} bytes, at most {MAX_PICTURES}")
    print("\n".join(found))
    print(f"docs_site: {n} pages, {len(found)} problems, {size} bytes of pictures")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
