#!/usr/bin/python3
"""Refuses calls that this project does not make, naming what to use instead; lines of C, CUDA and
Python over 100 columns; and functions of C and CUDA over a page of 60 lines. First it sees itself
catch each of them."""
import re
import sys

from tree import ROOT, code_only, read, source_files

BOUNDED = "snprintf with the buffer's size"
PARSE = "strtoll/strtod with end and range checks, or td_parse_size"
RANDOM = "common/base/random.h, whose numbers can be had again, or td_random_u64"
WAIT = ("td_wakeup_wait, a condition or a deadline: a sleep waits for nothing; to pace work "
        "use clock_nanosleep with an absolute time")
BANNED = {
    "sprintf": BOUNDED, "vsprintf": "vsnprintf with the buffer's size",
    "strcpy": f"{BOUNDED} or memcpy of a known length",
    "stpcpy": f"{BOUNDED} or memcpy of a known length", "strcat": BOUNDED,
    "strncpy": f"{BOUNDED} (strncpy may leave no NUL)", "strncat": BOUNDED,
    "gets": "fgets or getline", "sleep": WAIT, "usleep": WAIT, "nanosleep": WAIT, "atoi": PARSE,
    "atol": PARSE, "atoll": PARSE, "atof": PARSE,
    "rand": RANDOM, "rand_r": RANDOM, "srand": RANDOM, "random": RANDOM,
    "strtok": "strsep or strtok_r",
    "localtime": "localtime_r", "gmtime": "gmtime_r", "asctime": "strftime", "ctime": "strftime",
    "tmpnam": "mkstemp", "mktemp": "mkstemp", "alloca": "a fixed buffer or a pool",
    "system": "posix_spawn", "assert": "TD_ASSERT, which release builds keep",
}
MAX_COLUMNS = 100  # .clang-format says the same
MAX_LINES = 60  # of a function, with both braces: what one screen shows
# A function that is one thing, and longer, says why in its first line.
WHOLE = re.compile(r" {4}/\* whole: \S.{15,}")

# Not a member (x.rand, x->rand), not the tail of a longer name, and followed by "(".
CALL = re.compile(r"(?<![\w.>])(" + "|".join(BANNED) + r")[ \t]*\(")


def check_text(path, text):
    text = code_only(text)
    return [
        f"{path}:{text.count(chr(10), 0, m.start()) + 1}: {m.group(1)}() is banned: use "
        f"{BANNED[m.group(1)]}" for m in CALL.finditer(text)
    ]


def check_columns(path, text):
    return [
        f"{path}:{i}: {len(line)} columns, at most {MAX_COLUMNS}"
        for i, line in enumerate(text.split("\n"), 1) if len(line) > MAX_COLUMNS
    ]


def check_functions(path, text):
    """A function's braces stand in the first column, and no others do."""
    problems, begin = [], 0
    lines = text.split("\n")
    for i, line in enumerate(lines, 1):
        if line == "{":
            begin = i
        elif line == "}" and begin:
            n = i - begin + 1
            if n > MAX_LINES and not WHOLE.match(lines[begin]):
                problems.append(f"{path}:{begin}: a function of {n} lines, at most {MAX_LINES}: "
                                "split it into functions that each do one named thing")
            begin = 0
    return problems


def self_test():
    def planted(n, first="    x();"):
        return "void f(void)\n{\n" + first + "\n" + "    x();\n" * (n - 3) + "}\n"

    for text, n in ((planted(60) + planted(59), 0), (planted(60) + planted(61), 1),
                    (planted(61, "    /* whole: */"), 1),
                    (planted(61, "    /* whole: one table of the wire's kinds */"), 0)):
        if len(check_functions("planted.c", text)) != n:
            sys.exit("banned_calls.py is broken: it cannot tell a function of 61 lines")
    wide = check_columns("planted.c", "x" * MAX_COLUMNS + "\n" + "x" * (MAX_COLUMNS + 1))
    if wide != ["planted.c:2: 101 columns, at most 100"]:
        sys.exit("banned_calls.py is broken: it cannot tell a line of 101 columns")
    for name in BANNED:
        text = (f'/* {name}(x) */\n// {name}(x)\nchar *s = "{name}(x)";\nmy_{name}(x); '
                f'td->{name}(x); td.{name}(x); {name}_s(x);\n    {name} (x);\n')
        found = check_text("planted.c", text)
        if len(found) != 1 or not found[0].startswith(f"planted.c:5: {name}() is banned: use "):
            sys.exit(f"banned_calls.py is broken: {name} planted once gave {found}")


def main():
    self_test()
    files = source_files(ROOT)
    texts = [(path, read(ROOT, path)) for path in files]
    scripts = [(path, read(ROOT, path)) for path in source_files(ROOT, (".py",))]
    problems = [p for path, text in texts for p in check_text(path, text)]
    problems += [p for path, text in texts + scripts for p in check_columns(path, text)]
    problems += [p for path, text in texts for p in check_functions(path, text)
    ]
    for problem in problems:
        print(problem)
    print(f"banned_calls: {len(files)} files, {len(problems)} banned calls, long lines or long "
          "functions")
    if not files:
        sys.exit("no file found: the check looked at nothing")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
