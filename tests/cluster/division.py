"""Which build runs a cluster case in `make check`. pytest loads it by conftest.py.

Most cases take the same form in every build. They assert tokens, states and counts, and do so as
strictly under AddressSanitizer, which sees memory besides: they run there. A case with a short form
(it depends on harness.SHORT, or asks which sanitizer there is) runs in release, in full. A case
whose parameters share() divides runs in both. All run in both with `scripts/check --long`, and
wherever TANDEM_TEST_DIVIDE is not set: scripts/check sets it when it runs both builds, and
tests/CMakeLists.txt takes it from files that are too precious to divide.

As a program: division.py           looks at itself first, then tells how many cases each build has
              division.py FILE      the build of each of its cases
              division.py --without BUILD    the files of which BUILD has no case, for CMake"""
import ast
import glob
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

FORMS = {"SHORT"}
SANITIZER_VARIABLE = "TANDEM_TEST_SANITIZER"
SHARED = {"share"}


def names_in(node):
    """What the node reads, and what its functions take: a fixture is an argument."""
    found = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            found.add(n.id)
        elif isinstance(n, ast.arg):
            found.add(n.arg)
        elif isinstance(n, ast.Attribute) and n.attr in FORMS:  # harness.SHORT
            found.add(n.attr)
        elif isinstance(n, ast.Constant) and n.value == SANITIZER_VARIABLE:
            found |= FORMS
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier():
            found.add(n.value)  # usefixtures("cluster"), getfixturevalue("cluster")
    return found


def defined_by(statement):
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    return {
        n.id for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def depending_on(roots, statements):
    """The names that a module defines by any of these, directly or by one another. A fixture that
    all cases take unasked makes all of them depend."""
    found, uses = set(roots), [(defined_by(s), names_in(s), s) for s in statements]
    while True:
        new = set()
        for defined, used, statement in uses:
            if used & found:
                new |= defined
                if "autouse" in ast.dump(statement):
                    new |= {n for d, _, _ in uses for n in d}
        if new <= found:
            return found
        found |= new


def imported_forms(statements):
    """What is imported from another test file and depends on its form there."""
    found = set()
    for s in statements:
        module = getattr(s, "module", None) or ""
        path = os.path.join(HERE, module + ".py")
        if module.startswith("test_") and os.path.exists(path):
            theirs = ast.parse(read(path)).body
            depending = depending_on(FORMS | imported_forms(theirs), theirs)
            found |= {a.asname or a.name for a in s.names if a.name in depending}
    return found


def builds_of(text):
    """{name of a case: "release", "dev" or "both"}"""
    statements = ast.parse(text).body
    forms = FORMS | imported_forms(statements)
    full, shared = depending_on(forms, statements), depending_on(SHARED, statements)
    cases = [n for s in statements for n in defined_by(s) if n.startswith(("test_", "Test"))]
    return {c: "both" if c in shared else "release" if c in full else "dev" for c in cases}


def this_build():
    sanitizer = os.environ.get(SANITIZER_VARIABLE, "")
    return "release" if not sanitizer else "dev" if "address" in sanitizer else None


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def pytest_collection_modifyitems(config, items):
    build = this_build()
    if not os.environ.get("TANDEM_TEST_DIVIDE") or not build:
        return
    builds, left_out = {}, []
    for item in items:
        path = str(item.fspath)
        if path not in builds:
            builds[path] = builds_of(read(path))
        name = item.nodeid.split("::")[1].split("[")[0]
        if builds[path][name] not in (build, "both"):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if i not in left_out]
        config.all_elsewhere = not items


def pytest_sessionfinish(session):
    if getattr(session.config, "all_elsewhere", False):
        session.exitstatus = 0  # not "no tests ran": the other build has them


PLANTED = '''
from harness import SHORT
N = 4 if SHORT else 8
REQUESTS = [0] * N
CASES = share([1, 2])
@pytest.fixture
def cluster(): return REQUESTS
@pytest.fixture
def usual(): return 1
def helper(): return len(REQUESTS)
def test_same(usual): assert usual
def test_fixture(cluster): assert cluster
@pytest.mark.usefixtures("cluster")
def test_unseen_fixture(): pass
def test_helper(): assert helper()
@pytest.mark.parametrize("n", [1] if SHORT else [1, 2])
def test_parameters(n): assert n
@pytest.mark.skipif(bool(os.environ.get("TANDEM_TEST_SANITIZER")), reason="memory")
def test_sanitizer(): pass
@pytest.mark.parametrize("n", CASES)
def test_shared(n): assert n < N
'''
WANT = {
    "test_same": "dev", "test_fixture": "release", "test_unseen_fixture": "release",
    "test_helper": "release", "test_parameters": "release", "test_sanitizer": "release",
    "test_shared": "both"
}
UNASKED = "@pytest.fixture(autouse=True)\ndef plant(): return SHORT\ndef test_a(): pass\n"


def check_file(path):
    """The builds of its cases; every line that begins a case is one."""
    text = read(path)
    n_lines = sum(line.startswith(("def test_", "class Test")) for line in text.splitlines())
    builds = builds_of(text)
    if len(builds) != n_lines or not builds:
        sys.exit(f"{path}: {n_lines} cases, {len(builds)} are divided: one is not a plain function,"
                 " or has another's name")
    return list(builds.values())


def main():
    files = sorted(glob.glob(os.path.join(HERE, "test_*.py")))
    if sys.argv[1:2] == ["--without"]:
        print(
            ";".join(
                os.path.basename(f) for f in files
                if not {sys.argv[2], "both"} & set(builds_of(read(f)).values())), end="")
    elif len(sys.argv) == 2:
        for name, build in builds_of(read(sys.argv[1])).items():
            print(f"{build:<8} {name}")
    else:
        if builds_of(PLANTED) != WANT or builds_of(UNASKED) != {"test_a": "release"}:
            sys.exit(f"division.py is broken: {builds_of(PLANTED)}, {builds_of(UNASKED)}")
        shorter = imported_forms(ast.parse("from test_invariance import REQUESTS, JOIN").body)
        if shorter != {"REQUESTS"}:
            sys.exit("division.py does not see what test_invariance makes shorter")
        builds = [b for f in files for b in check_file(f)]
        print(", ".join(f"{builds.count(b)} in {b}" for b in ("release", "dev", "both")))


if __name__ == "__main__":
    main()
