import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from calm.config import DataConfig
from calm.data import debian, load_corpus
from calm.errors import DataError

NEEDS_APT = pytest.mark.skipif(shutil.which("apt-get") is None, reason="this machine has no apt")


def repository(folder: Path, origin: str = "Debian", packages: int = 200) -> list[str]:
    """A package archive in ``folder``; returns the apt options that make it the only source."""
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()
    index, texts = "", ""
    for i in range(packages):
        name, source = (f"pkg{i}", f"Source: src{i // 2} (1.0)\n") if i % 2 else (f"src{i // 2}", "")
        index += f"Package: {name}\n{source}Architecture: all\nVersion: 1\nDescription: tool {i}\n"
        index += f"Description-md5: {i:032x}\nFilename: p{i}.deb\nSize: 1\nSHA256: {i:064x}\n\n"
        texts += f"Package: {name}\nDescription-md5: {i:032x}\nDescription-en: tool   number {i}\n"
        texts += f" The long text of tool {i} has\n two   lines.\n .\n  * and a point\n\n"
    texts += f"Package: odd\nDescription-md5: {'e' * 32}\nDescription-en: without long text\n\n"
    texts += f"Package: src0\nDescription-md5: {'f' * 32}\nDescription-en: again\n"
    texts += f" Described twice, in {'other ' * 12}words.\n\n"
    release = folder / "dists" / "testing"
    sums = ""
    for name, text in {f"main/binary-{architecture}/Packages": index, "main/i18n/Translation-en": texts}.items():
        path = release / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        sums += f" {hashlib.sha256(text.encode()).hexdigest()} {len(text)} {name}\n"
    (release / "Release").write_text(
        f"Origin: {origin}\nLabel: {origin}\nSuite: stable\nCodename: testing\nVersion: 12.0\n"
        f"Date: Sat, 01 Nov 2025 10:00:00 UTC\nArchitectures: {architecture} all\nComponents: main\nSHA256:\n{sums}"
    )
    sources = folder / "sources.list"
    sources.write_text(f"deb [trusted=yes] file:{folder} testing main\n")
    return ["-o", f"Dir::Etc::SourceList={sources}", "-o", "Dir::Etc::SourceParts=/dev/null"]


@NEEDS_APT
def test_both_indices_of_an_archive_become_rows(tmp_path: Path) -> None:
    info: dict[str, str] = {}
    rows = {row.id: row for row in debian.build(info, repository(tmp_path, packages=6))}
    assert sorted(rows) == ["pkg1", "pkg3", "pkg5", "src0", "src0#2", "src1", "src2"]
    assert rows["pkg3"].family == rows["src1"].family == "src1"
    assert rows["pkg3"].source == "The long text of tool 3 has two lines. * and a point"
    assert rows["pkg3"].target == "tool number 3"
    assert info == {"release": "Debian 12.0 (testing main)"}


@NEEDS_APT
def test_corpus_is_split_by_source_package_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = repository(tmp_path / "archive")
    monkeypatch.setattr(debian, "build", functools.partial(debian.build, options=options))
    config = DataConfig(name="debian", min_source_words=12, cache_dir=str(tmp_path / "cache"))
    corpus = load_corpus(config)
    assert corpus.audit["read"] == 201 and corpus.audit["overlap"] == {"families": 0, "texts": 0}
    assert corpus.audit["release"] == "Debian 12.0 (testing main)"
    assert {row.family for row in corpus.splits["train"]}.isdisjoint(row.family for row in corpus.splits["test"])
    shutil.rmtree(tmp_path / "archive")
    assert load_corpus(config).content_hash == corpus.content_hash


@NEEDS_APT
@pytest.mark.parametrize("missing", ["archive", "origin"])
def test_no_mirror_or_no_debian_names_the_offline_corpora(tmp_path: Path, missing: str) -> None:
    options = repository(tmp_path, origin="Elsewhere" if missing == "origin" else "Debian", packages=2)
    if missing == "archive":
        shutil.rmtree(tmp_path / "dists")
    with pytest.raises(DataError) as error:
        list(debian.build({}, options))
    told = str(error.value)
    assert "\n" not in told and "restaurants, pydoc, jsonl, parquet" in told
    assert ("Elsewhere testing/main" in told) == (missing == "origin")


def test_without_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        DataError, match="needs apt and a reachable Debian mirror: apt-get is not installed; .*restaurants"
    ):
        load_corpus(DataConfig(name="debian", cache_dir=str(tmp_path / "cache")))
    assert not list((tmp_path / "cache").glob("debian*/"))


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_apt_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    script(tmp_path / "apt-get", "echo 'E: the disk is on fire' >&2; exit 100")
    with pytest.raises(DataError, match="E: the disk is on fire"):
        list(debian.build({}))
    script(tmp_path / "apt-get", 'case "$*" in *update) echo "W: no route" >&2; exit 100;; esac')
    with pytest.raises(DataError, match="W: no route; corpora that need neither"):
        list(debian.build({}))


def test_an_apt_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(debian, "_TIMEOUT", 0.2)
    script(tmp_path / "apt-get", "exec sleep 30")
    with pytest.raises(DataError, match="apt-get update did not end within"):
        list(debian.build({}))


def test_a_list_that_cannot_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    index = tmp_path / "lists_main"
    index.write_text("x")
    target = f"Component: main\\nOrigin: Debian\\nLabel: Debian\\nCodename: sid\\nFilename: {index}"
    listing = f"{target}\\nCreated-By: Packages\\n\\n{target}\\nShortDesc: Translation-en\\n"
    script(tmp_path / "apt-get", f'case "$*" in *indextargets) printf "{listing}";; esac')
    script(tmp_path / "apt-helper", "exit 3")
    with pytest.raises(DataError, match="lists_main cannot be unpacked"):
        list(debian.build({}))
