#!/usr/bin/python3
"""What the documents name is there, and what an operator meets is in the documents: links of
every Markdown file; log events, metrics; numbers of transfer frames and of the decision log's
kinds; lines that CONTRIBUTING.md sends a reader to; words that docs/words.md explains. Prose keeps
to 120 columns, a table's cell to two lines, README.md to 200 lines. Each check is first seen to
catch a planted mistake."""
import os
import re
import sys

from tree import METRIC, ROOT, code_only, read, source_files

EVENT = re.compile(
    r'(?:\btd_(?:debug|info|warn|error)(?:_limited)?\(\s*|\bTD_LOG_(?:INFO|WARN|ERROR|DEBUG),\s+'
    r'|\bdead \? |(?<=_dead") : )"([a-z0-9_]+)"')
ENDINGS = (".md", )


def markdown_files():
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            d for d in subfolders if not d.startswith(".") and not (folder == ROOT and d == "build")
        ]
        for name in sorted(names):
            if name.endswith(ENDINGS):
                yield os.path.relpath(os.path.join(folder, name), ROOT)


def link_problems(path, text):
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not os.path.exists(
                os.path.join(ROOT, os.path.dirname(path), target)):
            yield f"{path}: link to {target}, which is not there"


def daemon_sources():
    return {
        p: code_only(read(ROOT, p), keep_strings=True) for p in source_files(ROOT, (".c", ".h"))
        if p.startswith(("common/", "router/", "prefill/", "decode/"))
    }


def logged_events(sources):
    return {name for text in sources.values() for name in EVENT.findall(text)}


def event_problems(page, logged):
    section = page.split("## Events in the logs", 1)[1].split("\n## ", 1)[0]
    told = set()
    for line in section.splitlines():
        cells = line.split("|")
        told.update(re.findall(r"`([a-z0-9_]+)`", cells[1] if line.startswith("|") else line))
    for name in sorted(logged - told):
        yield f"docs/operations.md: the log event {name} is missing"
    for name in sorted(told - logged):
        yield f"docs/operations.md: {name} is not a log event"


def metric_problems(page, sources):
    have = {
        m for text in sources.values()
        for m in re.findall(METRIC, text)
    }
    told = set(re.findall(r"`((?:td_|vllm:)[a-z0-9_]+)[` ]", page.split("## Metrics", 1)[1]))
    for name in sorted(have - told):
        yield f"docs/operations.md: the metric {name} is missing"
    for name in sorted(told - have):
        yield f"docs/operations.md: {name} is not a metric"


def enum_numbers(header, first):
    """{number: name} of the enum whose first member is given, as C counts them."""
    body = re.search(r"\{([^}]*\b" + first + r"\b[^}]*)\}", code_only(read(ROOT, header))).group(1)
    numbers, next_number = {}, 0
    for member in (m.strip() for m in body.split(",")):
        if not member:
            continue
        name, _, value = (x.strip() for x in member.partition("="))
        next_number = int(value) if value else next_number
        numbers[next_number] = name
        next_number += 1
    return numbers


def table_numbers(page, heading):
    """{number: name} of the table below a header row."""
    rows = page.split(heading, 1)[1].split("\n\n", 1)[0]
    return {int(n): name for n, name in re.findall(r"^\| (\d+) \| (\w+)", rows, re.MULTILINE)}


def number_problems(page):
    for heading, header, first, prefix in (("| type | name | from | payload |",
                                            "common/transfer/wire.h", "TD_XFER_HELLO", "TD_XFER_"),
                                           ("| event kind | name |", "router/core/core.h",
                                            "TD_EV_TICK", "TD_EV_"),
                                           ("| action kind | name |", "router/core/core.h",
                                            "TD_ACT_START_DECODE", "TD_ACT_")):
        want = {
            n: name[len(prefix):] for n, name in enum_numbers(header, first).items()
            if not name.endswith("_N_TYPES")
        }
        got = table_numbers(page, heading)
        if got != want:
            yield (f"docs/wire.md: below '{heading}': "
                   f"{sorted(set(got.items()) ^ set(want.items()))} differ from {header}")


MAX_PROSE = 120  # columns


def prose_problems(path, text):
    """Lines of prose over 120 columns. Tables, commands and drawings cannot be wrapped."""
    is_code = False
    for i, line in enumerate(text.split("\n"), 1):
        is_code ^= line.startswith("```")
        if len(line) > MAX_PROSE and not is_code and not line.startswith(("|", "    ")):
            yield f"{path}:{i}: {len(line)} columns, at most {MAX_PROSE}"


MAX_CELL = 2 * MAX_PROSE  # characters


def cell_problems(path, text):
    """Cells over two lines of prose: what they say wants a list or a paragraph. The row of model
    families is compared by config_test, and docs/config.md is written from --help."""
    is_code = False
    for i, line in enumerate(text.split("\n"), 1):
        is_code ^= line.startswith("```")
        if is_code or not line.startswith("|") or line.startswith("| architectures | Llama"):
            continue
        longest = max(len(c.strip()) for c in re.split(r"(?<!\\)\|", line)[1:])
        if longest > MAX_CELL and path != "docs/config.md":
            yield f"{path}:{i}: a cell of {longest} characters, at most {MAX_CELL}"


MAX_README_LINES = 200


def length_problems(page):
    """README.md is what a stranger reads first; what does not fit has a page of its own."""
    n = len(page.splitlines())
    if n > MAX_README_LINES:
        yield f"README.md: {n} lines, at most {MAX_README_LINES}"


def walk_problems(page):
    """Each line that a reader is sent to, and its function, are in the file that the row links."""
    rows = re.findall(r"^\| .*\]\(([^)]+)\) \| `(\w+)` \| `(.+)` \|$", page, re.MULTILINE)
    if not rows:
        yield "CONTRIBUTING.md: the table of lines is not there"
    for path, function, line in rows:
        text = read(ROOT, path)
        body = re.search(r"\b" + function + r"\([^;]*?\)\n\{\n(.*?)\n\}", text, re.DOTALL)
        if not body or line not in body.group(1):
            yield f"CONTRIBUTING.md: {function} of {path} has no line {line}"


def word_problems(page, texts):
    """A word that nobody uses needs no explanation; one in two rows has two meanings."""
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.MULTILINE)
    for word in words:
        spelt = r"\b" + word.replace(" ", r"[\s_]+") + r"(?:s|es|d|ed)?(?:\b|_)"
        used = re.compile(spelt, re.IGNORECASE)
        if not any(used.search(text) for text in texts):
            yield f"docs/words.md: {word} is used nowhere else"
    for word in sorted({w for w in words if words.count(w) > 1}):
        yield f"docs/words.md: {word} is there twice"


def main():
    operations, wire = read(ROOT, "docs/operations.md"), read(ROOT, "docs/wire.md")
    readme = read(ROOT, "README.md")
    walk, sources = read(ROOT, "CONTRIBUTING.md"), daemon_sources()
    logged = logged_events(sources)
    mistakes = {
        "a dead link": list(link_problems(
            "README.md", "see [this](docs/nothing.md)")), "an event not told": list(
                event_problems(operations, logged | {"new_event"})), "an event that is none": list(
                    event_problems(operations.replace("`leg_broken`", "`leg_borken`"),
                                   logged)), "a metric not told": list(
                                       metric_problems(
                                           operations.replace("td_prompt_tokens_total", "td_x"),
                                           sources)), "a wrong number": list(
                                               number_problems(
                                                   wire.replace("| 7 | FINAL", "| 8 | FINAL"))),
        "a long line":
        list(prose_problems("README.md", "```\n" + "x" * 121 + "\n```\n" + "x" * 121)),
        "a long cell": list(cell_problems("README.md", "| a | " + "x " * 121 + "|")),
        "a README too long": list(
            length_problems("a line\n" * (MAX_README_LINES + 1))),
        "a word that nobody uses": list(
            word_problems("| **zorkmid** | a coin |", sources.values())),
        "a word with two meanings": list(
            word_problems("| **slot** | a |\n| **slot** | b |", sources.values())),
        "a line that is gone": list(walk_problems(walk.replace("TD_VB_WRITE", "TD_VB_PUT"))),
    }
    missed = [name for name, problems in mistakes.items() if not problems]
    if missed:
        sys.exit(f"docs_names: these planted mistakes pass: {', '.join(missed)}")
    pages = [(path, read(ROOT, path)) for path in markdown_files()]
    problems = [
        p for page in pages
        for p in (*link_problems(*page), *prose_problems(*page), *cell_problems(*page))
    ]
    problems += [
        *event_problems(operations, logged), *metric_problems(operations, sources),
        *number_problems(wire), *walk_problems(walk), *length_problems(readme),
        *word_problems(read(ROOT, "docs/words.md"),
                       [*sources.values(), *(t for p, t in pages if p != "docs/words.md")])
    ]
    if problems:
        sys.exit("docs_names:\n  " + "\n  ".join(problems))
    print(f"docs_names: {len(logged)} log events, links, metrics and numbers agree")


if __name__ == "__main__":
    main()
