"""Debian's package descriptions: the long text is the source, the one-line synopsis the target.

Read through the apt client into a private folder, as an ordinary user too, from the mirror that this machine's
own apt sources name. Nothing of the machine's package state is read or changed. Family = source package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import DataError
from ..records import Example

KEY = "debian-2"  # raise the number when the extraction changes
OFFLINE = "restaurants, pydoc, jsonl, parquet"
_HELPER = "/usr/lib/apt/apt-helper"
_TIMEOUT = 600.0  # seconds for a whole download
_CONFIG = """\
Dir::State "{0}/state";
Dir::State::Lists "{0}/lists";
Dir::State::status "{0}/status";
Dir::Cache "{0}/cache";
APT::Sandbox::User "";
APT::Get::List-Cleanup "false";
Acquire::Retries "1";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
#clear Acquire::Languages;
Acquire::Languages {{ "en"; }};
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


def _unavailable(reason: str) -> DataError:
    return DataError(
        f"data=debian needs apt and a reachable Debian mirror: {reason}; corpora that need neither: {OFFLINE}"
    )


def _apt(arguments: Sequence[str], config: Path) -> str:
    """Output of one apt-get call under the private configuration."""
    program = shutil.which("apt-get")
    if program is None:
        raise _unavailable("apt-get is not installed")
    command = [program, f"--config-file={config}", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, env={**os.environ, "LC_ALL": "C"}, check=False
        )
    except subprocess.TimeoutExpired:
        raise _unavailable(f"apt-get {arguments[-1]} did not end within {_TIMEOUT:.0f} s") from None
    if done.returncode != 0 and arguments[-1] != "update":  # one broken third-party source must not stop us
        raise _unavailable(_last_line(done.stderr))
    return done.stdout if arguments[-1] != "update" else done.stderr


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


def _stanzas(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Paragraphs of a control file as dicts; continuation lines stay joined by newlines."""
    stanza: dict[str, str] = {}
    key = ""
    for line in lines:
        line = line.rstrip("\n")
        if not line.strip():
            if stanza:
                yield stanza
            stanza = {}
        elif line[0] in " \t":
            stanza[key] = f"{stanza.get(key, '')}\n{line[1:]}"
        else:
            key, _, value = line.partition(":")
            stanza[key] = value.strip()
    if stanza:
        yield stanza


def _read_index(path: str) -> Iterator[dict[str, str]]:
    """Stanzas of a list file, decompressed by apt's own helper, streamed."""
    helper = shutil.which("apt-helper") or _HELPER
    if not Path(helper).exists():
        raise _unavailable(f"{_HELPER} is missing")
    with subprocess.Popen(
        [helper, "cat-file", path], stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stdout is not None
        yield from _stanzas(process.stdout)
    if process.returncode != 0:
        raise _unavailable(f"{Path(path).name} cannot be unpacked")


def _pick(targets: Sequence[dict[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """The Packages and the Translation-en index of the first release of Debian's own main archive."""
    ours = [
        t
        for t in targets
        if t.get("Component") == "main" and t.get("Origin") == "Debian" and t.get("Label") == "Debian"
    ]
    for packages in ours:
        release = packages.get("Codename", "")
        if packages.get("Created-By") != "Packages" or "-" in release:  # bookworm-updates, -backports
            continue
        for translation in ours:
            if translation.get("Codename") == release and translation.get("ShortDesc") == "Translation-en":
                return packages, translation
    found = sorted({f"{t.get('Origin', '?')} {t.get('Codename', '?')}/{t.get('Component', '?')}" for t in targets})
    raise _unavailable(
        f"no index of Debian main with English descriptions was fetched (got: {', '.join(found) or 'nothing'})"
    )


def _pairs(packages: str, translation: str) -> Iterator[Example]:
    """Rows of two index files: the source package from one, both texts from the other."""
    families = {}
    for stanza in _read_index(packages):
        name = stanza.get("Package", "")
        families[name] = stanza.get("Source", name).split(" ")[0] or name
    seen: Counter[str] = Counter()
    for stanza in _read_index(translation):
        name = stanza.get("Package", "")
        synopsis, _, rest = stanza.get("Description-en", "").partition("\n")
        long = " ".join(" ".join(line for line in rest.split("\n") if line.strip() != ".").split())
        if name and long and synopsis.strip():
            seen[name] += 1  # a few packages are described twice
            row_id = name if seen[name] == 1 else f"{name}#{seen[name]}"
            yield Example(row_id, families.get(name, name), long, " ".join(synopsis.split()))


def build(info: dict[str, str], options: Sequence[str] = ()) -> Iterator[Example]:
    """Fetch the indices and yield one row per described package; ``info`` is told which release it was.

    Args:
        options: further apt-get options, such as another source list.

    Raises:
        DataError: no apt, no mirror, or no Debian main among the sources; it names the corpora that need none.
    """
    with tempfile.TemporaryDirectory(prefix="calm-apt-") as name:
        folder = Path(name)
        for sub in ("lists/partial", "state", "cache/archives/partial"):
            (folder / sub).mkdir(parents=True)
        (folder / "status").touch()
        config = folder / "apt.conf"
        config.write_text(_CONFIG.format(folder), encoding="utf-8")
        complaints = _apt([*options, "update"], config)
        targets = list(_stanzas(iter(_apt([*options, "indextargets"], config).splitlines())))
        targets = [t for t in targets if Path(t.get("Filename", "")).is_file()]
        if not targets:
            raise _unavailable(_last_line(complaints))
        packages, translation = _pick(targets)
        info["release"] = f"Debian {packages.get('Version', '')} ({packages.get('Codename', '')} main)"
        yield from _pairs(packages["Filename"], translation["Filename"])
