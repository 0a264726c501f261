"""`make check` runs most cases in one of its builds: division.py says in which."""
from division import pytest_collection_modifyitems, pytest_sessionfinish  # noqa: F401
