"""The user's own rows: JSON lines, or Parquet. Bounded memory per row; errors name file and line (or row).

Accepted without a word: a byte-order mark, CRLF, blank lines. Always an error: a line that is no JSON object, bytes
that are no UTF-8, a value that is no text, a row above the size limit, an empty or a compressed file. Missing,
null and empty fields are a matter of ``data.row_policy``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..config import DataConfig
from ..errors import DataError
from .rows import MAX_TEXT_BYTES, RawRow

_MAX_LINE_BYTES = 16 * MAX_TEXT_BYTES  # JSON may write six bytes for one character
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
_BATCH = 128  # Parquet rows decoded at a time


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read, and the config keys that set them."""

    source: str
    target: str
    family: str | None = None
    id: str | None = None

    @classmethod
    def of(cls, config: DataConfig) -> Columns:
        return cls(config.text_column, config.summary_column, config.family_column, config.id_column)

    def named(self) -> list[tuple[str, str, str]]:
        """(field, column, config key) of every column that is asked for."""
        keys = {"source": "text_column", "target": "summary_column", "family": "family_column", "id": "id_column"}
        return [(name, getattr(self, name), f"data.{key}") for name, key in keys.items() if getattr(self, name)]


def rows(config: DataConfig) -> Iterator[RawRow]:
    """Rows of ``data.path``: one file, or every file of the right suffix in a folder, in the order of their names.

    Raises:
        DataError: as the module says.
    """
    suffixes = (".jsonl", ".json", ".ndjson") if config.name == "jsonl" else (".parquet",)
    read = read_jsonl if config.name == "jsonl" else read_parquet
    for path in find_files(config, suffixes):
        yield from read(path, Columns.of(config))


def find_files(config: DataConfig, suffixes: Sequence[str]) -> list[Path]:
    """The file ``data.path`` itself, or the files below that folder with one of ``suffixes``."""
    if not config.path:
        raise DataError(f"data={config.name} needs data.path=FILE_OR_FOLDER")
    path = user_path(config.path)
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in suffixes and file.is_file())
        if not found:
            raise DataError(f"data.path={path}: the folder holds no {' or '.join(suffixes)} file")
        return found
    if not path.is_file():
        raise DataError(f"data.path={path}: there is no such file")
    return [path]


def user_path(text: str) -> Path:
    """A path as typed, where it exists; else with ~ and $VARIABLES expanded, as a shell would have done."""
    path = Path(text)
    return path if path.exists() else Path(os.path.expandvars(text)).expanduser()


def _open(path: Path) -> BinaryIO:
    """The file, looked at: not empty, not compressed."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    start = file.read(8)
    file.seek(0)
    packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)
    if packed or not start:
        file.close()
        raise DataError(f"{path}: the file is {f'compressed ({packed}); unpack it first' if packed else 'empty'}")
    return file


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of every line that is not blank."""
    with _open(path) as file:
        for number, line in _lines(file, path):
            where = f"{path}:{number}"
            yield where, _parse(line, where)


def read_jsonl(path: Path, columns: Columns) -> Iterator[RawRow]:
    """One row a line."""
    seen: set[str] = set()
    count = 0
    for where, values in json_lines(path):
        if len(seen) < 1000:
            seen.update(values)
        count += 1
        yield _row(values, columns, where.removeprefix(f"{path.parent}{os.sep}"), where)
    if not count:
        raise DataError(f"{path}: the file is empty: it holds blank lines only")
    _check_columns(seen, columns, str(path))


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of every line that is not blank, never holding more than the size limit."""
    number = 0
    while line := file.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise DataError(
                f"{path}:{number}: the line has more than {_MAX_LINE_BYTES:,} bytes; cut or remove that row"
            )
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is no UTF-8; convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: no JSON: {error.msg} at character {error.colno}; one JSON object a line") from None
    except (RecursionError, ValueError):
        raise DataError(f"{where}: no JSON that can be read: nested too deeply, or a number too long") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: a JSON object is needed, got {type(values).__name__}")
    return values


def _row(values: Mapping[str, Any], columns: Columns, default_id: str, where: str) -> RawRow:
    text = {name: _text(values.get(column), column, key, where) for name, column, key in columns.named()}
    return RawRow(
        id=text.get("id") or default_id,
        source=text["source"],
        target=text["target"],
        family=(text["family"] or "") if columns.family else None,
        where=where,
    )


def _text(value: Any, column: str, key: str, where: str) -> str | None:
    """A string, or None; ids and families may also be whole numbers."""
    if value is None or isinstance(value, str):
        return value
    if key in ("data.id_column", "data.family_column") and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"{where}: {column!r} holds {type(value).__name__}, not text; repair the row or choose another {key}"
    )


def _check_columns(available: Iterable[str], columns: Columns, where: str) -> None:
    """Raise DataError for a column that no row has, listing those that there are."""
    names = sorted(set(available))
    for _, column, key in columns.named():
        if column not in names:
            shown = ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
            raise DataError(f"{where}: no column {column!r}; available: {shown or 'none'}; set {key}")


def read_parquet(path: Path, columns: Columns) -> Iterator[RawRow]:
    """One row a record; the columns must be of string type (whole numbers too for id and family)."""
    import pyarrow as pa
    from pyarrow import parquet

    _open(path).close()
    try:
        with parquet.ParquetFile(path) as file:
            if not file.metadata.num_rows:
                raise DataError(f"{path}: the file is empty: it has no rows")
            schema = file.schema_arrow
            _check_columns(schema.names, columns, str(path))
            names = [column for _, column, _ in columns.named()]
            _check_sizes(file.metadata, set(names), path)
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=list(dict.fromkeys(names))):
                _check_types(batch.schema, columns, path)
                for values in batch.to_pylist():
                    yield _row(values, columns, f"{path.name}:{number}", f"{path}: row {number}")
                    number += 1
    except pa.ArrowException as error:
        raise DataError(f"{path}: no Parquet file that can be read: {str(error).splitlines()[0]}") from error
    except UnicodeDecodeError:
        raise DataError(f"{path}: row {number} or one of the {_BATCH} after it holds bytes that are no UTF-8") from None


def _check_sizes(metadata: Any, names: set[str], path: Path) -> None:
    """Refuse before reading what must hold a row above the size limit: its bytes exceed the limit times the rows."""
    first = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for position in range(group.num_columns):
            chunk = group.column(position)
            if (
                chunk.path_in_schema in names
                and chunk.total_uncompressed_size > group.num_rows * MAX_TEXT_BYTES + 65536
            ):
                raise DataError(
                    f"{path}: column {chunk.path_in_schema!r} has {chunk.total_uncompressed_size:,} bytes in rows "
                    f"{first} to {first + group.num_rows - 1}: at least one is above {MAX_TEXT_BYTES:,} bytes"
                )
        first += group.num_rows


def _check_types(schema: Any, columns: Columns, path: Path) -> None:
    import pyarrow.types as types

    for name, column, key in columns.named():
        kind = schema.field(column).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)
        if not text and not (name in ("id", "family") and types.is_integer(kind)):
            raise DataError(f"{path}: column {column!r} has type {kind}, not string; choose another {key}")
