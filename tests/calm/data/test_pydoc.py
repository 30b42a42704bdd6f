import sys
from pathlib import Path

import pytest

from calm.config import DataConfig
from calm.data import load_corpus, pydoc

MODULE = '''
"""Module text."""

class HTTPServer2:
    """Serve files over a socket.

    It listens until it is closed.

        an example
    """
    def __init__(self, *, root_dir, maxSize=3, **options): ...

    def close_all(self, timeout):
        """Close every open
        connection now.
        """

if True:
    async def fetch(url, /, retries=0, *others):
        "Fetch one page of text."

def undocumented(a, b): ...

def terse(a, b):
    """Does it."""
'''


def test_rows_of_a_module() -> None:
    rows = {row.id: row for row in pydoc.module_rows("pkg.web", MODULE)}
    assert sorted(rows) == ["pkg.web:HTTPServer2.close_all:13", "pkg.web:HTTPServer2:4", "pkg.web:fetch:19"]
    server = rows["pkg.web:HTTPServer2:4"]
    assert server.source.startswith(
        "class http server2 ( root dir, max size, options ). It listens until it is closed."
    )
    assert server.target == "Serve files over a socket." and server.family == "pkg.web"
    close = rows["pkg.web:HTTPServer2.close_all:13"]
    assert close.source == "method close all ( timeout ) of http server2."
    assert close.target == "Close every open connection now."
    assert rows["pkg.web:fetch:19"].source == "function fetch ( url, retries, others )."


@pytest.mark.parametrize("text", ['def f(:\n """', '"""' + "(" * 5000, 'x = """\x00"""'])
def test_what_does_not_parse_gives_no_rows(text: str) -> None:
    assert list(pydoc.module_rows("m", text)) == []


def test_corpus_of_installed_packages_never_imports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    (site / "pkg" / "tests").mkdir(parents=True)
    names = [f"part{i:03d}" for i in range(120)]
    for name in names:
        body = f'raise SystemExit\ndef make_{name}(a, b):\n    """Make the {name} of a and b."""\n'
        (site / "pkg" / f"{name}.py").write_text(body)
    (site / "pkg" / "tests" / "test_x.py").write_text(body)
    (site / "pkg" / "bad.py").write_bytes(b'"""\xff"""')
    monkeypatch.setattr(pydoc, "key", lambda: "pydoc-test")
    monkeypatch.setattr(
        pydoc.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path), "purelib": str(site), "platlib": str(site)}
    )
    config = DataConfig(name="pydoc", cache_dir=str(tmp_path / "cache"))
    corpus = load_corpus(config)
    assert corpus.audit["read"] == 120
    assert {row.family for part in corpus.splits.values() for row in part} == {f"pkg.{name}" for name in names}
    assert load_corpus(config).content_hash == corpus.content_hash
    assert sys.version.split()[0] in corpus.audit["release"]


def test_key_follows_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pydoc.key()
    assert before == pydoc.key() and before.startswith("pydoc-")
    monkeypatch.setattr(pydoc.metadata, "distributions", lambda: iter(()))
    assert pydoc.key() != before
