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
import functools
import gc
import glob
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

FORMS = {"SHORT"}
SANITIZER_VARIABLE = "TANDEM_TEST_SANITIZER"
SHARED = {"share"}


def nodes_of(node):
    """The node and all below it. ast.walk does the same in twice the time, which is most of this
    program's."""
    found = [node]
    for n in found:
        for field in n._fields:
            value = getattr(n, field, None)
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found += [v for v in value if isinstance(v, ast.AST)]
    return found


class Statement:
    """One of a module: the names that it defines, and those that it uses: what it reads, and what
    its functions take, for a fixture is an argument."""
    def __init__(self, statement):
        self.defines, self.uses = set(), set()
        for n in nodes_of(statement):
            if isinstance(n, ast.Name):
                self.uses.add(n.id)
                if isinstance(n.ctx, ast.Store):
                    self.defines.add(n.id)
            elif isinstance(n, ast.arg):
                self.uses.add(n.arg)
            elif isinstance(n, ast.Attribute) and n.attr in FORMS:  # harness.SHORT
                self.uses.add(n.attr)
            elif isinstance(n, ast.Constant) and isinstance(n.value, str):
                if n.value == SANITIZER_VARIABLE:
                    self.uses |= FORMS
                elif n.value.isidentifier():
                    self.uses.add(n.value)  # usefixtures("cluster"), getfixturevalue("cluster")
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            self.defines = {statement.name}
        self.is_unasked = isinstance(statement, ast.FunctionDef) and any(
            "autouse" in ast.dump(d) for d in statement.decorator_list)


def depending_on(roots, statements):
    """The names that a module defines by any of these, directly or by one another. A fixture that
    all cases take unasked makes all of them depend."""
    found = set(roots)
    while True:
        new = set()
        for s in statements:
            if s.uses & found:
                new |= s.defines
                if s.is_unasked:
                    new |= {n for other in statements for n in other.defines}
        if new <= found:
            return found
        found |= new


@functools.cache
def forms_of(path):
    """What a file of tests has that depends on its form."""
    body = ast.parse(read(path)).body
    return depending_on(FORMS | imported_forms(body), [Statement(s) for s in body])


def imported_forms(body):
    """What is imported from another test file and depends on its form there."""
    found = set()
    for s in body:
        module = getattr(s, "module", None) or ""
        path = os.path.join(HERE, module + ".py")
        if module.startswith("test_") and os.path.exists(path):
            found |= {a.asname or a.name for a in s.names if a.name in forms_of(path)}
    return found


def builds_of(text):
    """{name of a case: "release", "dev" or "both"}"""
    body = ast.parse(text).body
    statements = [Statement(s) for s in body]
    full = depending_on(FORMS | imported_forms(body), statements)
    shared = depending_on(SHARED, statements)
    cases = [n for s in statements for n in s.defines if n.startswith(("test_", "Test"))]
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
    gc.disable()  # a tree of syntax is nodes by the ten thousand, and none is garbage
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
