"""What the checks of the source tree share: which files are ours, and C without its comments and
strings."""
import os
import re
import sys

sys.dont_write_bytecode = True
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCE_ENDINGS = (".c", ".h", ".cu", ".cuh")
# The name of a metric where it is made: by a call, or by a row of a table.
METRIC = (r'(?:td_(?:counter|gauge|histogram|total)|COUNTER\w*|GAUGE\w*|HISTOGRAM|SIZES|ALIAS)'
          r'\(\s*"((?:td_|vllm:)\w+)"')


def source_files(root, endings=SOURCE_ENDINGS):
    """Paths of C and CUDA files relative to root, sorted; build outputs and hidden folders are
    left out."""
    found = []
    for folder, subfolders, names in os.walk(root):
        at_root = os.path.samefile(folder, root)
        subfolders[:] = [
            d for d in subfolders if not d.startswith(".") and not (at_root and d == "build")
        ]
        for name in names:
            if name.endswith(endings):
                found.append(os.path.relpath(os.path.join(folder, name), root))
    return sorted(found)


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as f:
        return f.read()


_TOKEN = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def code_only(text, keep_strings=False):
    """The text with comments blanked (strings too, unless kept); line breaks stay, so line
    numbers hold."""
    def blank(match):
        token = match.group(0)
        if token[0] in "\"'":
            return token if keep_strings else token[0] + token[0]
        return re.sub(r"[^\n]", " ", token)

    return _TOKEN.sub(blank, text)
