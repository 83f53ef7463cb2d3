"""Rows of a data set's files, one at a time: JSON lines, zip members, one large JSON array, parquet.

The readers use zipfile, json and pyarrow only: `datasets` refuses the script-based sets since its version 4 and needs
the features spelled out where columns are null or missing in a file.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.select import PrepError

_CHUNK = 8 << 20


class RowError(ValueError):
    """A row does not have the public schema."""


def located(path: Path, row: int, error: Exception) -> PrepError:
    """The one line for a row that cannot be used."""
    return PrepError(
        f"{path}, row {row}: {error}; the file is not the published one, fetch it again or give another with source="
    )


def read_rows(path: Path, columns: Sequence[str], member: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 0, row) for each row of a .parquet, .jsonl, .zip or .json file, chosen by its suffix.

    columns: parquet columns to read (others are never decoded). member: file name of the zip's JSON-lines member.
    Raises PrepError with file and row.
    """
    if path.suffix == ".parquet":
        return read_parquet(path, columns)
    if path.suffix == ".zip":
        return _zip_lines(path, member)
    if path.suffix == ".json":
        return _json_array(path)
    return _json_lines(path)


def read_parquet(path: Path, columns: Sequence[str], batch_size: int = 64) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a parquet file, streamed: at most `batch_size` rows are decoded at a time, whatever the row groups' size.

    Written schemas may carry features of a newer `datasets` in their metadata; pyarrow ignores them.
    """
    try:
        # No pre-buffering: it would read a whole row group, and Long Code Arena's are gigabytes.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        missing = [name for name in columns if name.split(".")[0] not in file.schema_arrow.names]
        if missing:
            raise PrepError(
                f"{path} has no column {', '.join(map(repr, missing))} (it has {', '.join(file.schema_arrow.names)}); "
                "it is another data set, give the right file with source="
            )
        row = 0
        for batch in file.iter_batches(batch_size=batch_size, columns=list(columns), use_threads=False):
            for item in batch.to_pylist():
                yield row, item
                row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise PrepError(f"{path} is not a readable parquet file ({first}); fetch it again") from None


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as stream:
        yield from _lines(path, stream)


def _lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    # By newline only: str.splitlines would also split at U+2028 and other characters that occur inside JSON strings.
    row = 0
    for line in stream:
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise located(path, row, error) from None
        if not isinstance(item, dict):
            raise located(path, row, RowError(f"a JSON object was expected, found {type(item).__name__}"))
        yield row, item
        row += 1


def _zip_lines(path: Path, member: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with zipfile.ZipFile(path) as archive:
            # The whole name: macOS adds a "._" file beside each of an archive's.
            names = [name for name in archive.namelist() if PurePosixPath(name).name == member]
            if not names:
                raise PrepError(f"{path} has no member {member}: another archive; give the right one with source=")
            with archive.open(names[0]) as stream:
                yield from _lines(path, stream)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError) as error:  # RuntimeError: encrypted
        raise PrepError(f"{path} is not a readable zip file ({error}); fetch it again") from None


def _json_array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of one top-level array, decoded one by one: LongBench v2 is an array of 465 MB."""
    decoder = json.JSONDecoder()
    with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream:
        text, position, row, ended = "", 0, -1, False

        def more() -> bool:
            nonlocal text, position, ended
            # Read as much again as is held, so that a long row is scanned a few times, not once per chunk.
            try:
                chunk = stream.read(max(_CHUNK, len(text) - position))
            except UnicodeDecodeError as error:
                raise located(path, max(row, 0), error) from None
            text, position, ended = text[position:] + chunk, 0, not chunk
            return not ended

        def next_char() -> str:
            nonlocal position
            while True:
                while position < len(text) and text[position] in " \t\r\n":
                    position += 1
                if position < len(text) or not more():
                    return text[position : position + 1]

        if next_char() != "[":
            raise located(path, 0, RowError("a JSON array was expected"))
        position += 1
        while (char := next_char()) != "]" or row == -1:
            if char == "]":
                break
            if row >= 0:
                if char != ",":
                    raise located(path, row, RowError("the array is cut off or damaged after this row"))
                position += 1
                next_char()
            row += 1
            while True:
                try:
                    item, position = decoder.raw_decode(text, position)
                    break
                except (ValueError, RecursionError) as error:
                    if isinstance(error, RecursionError) or not more():
                        raise located(path, row, error) from None
            if not isinstance(item, dict):
                raise located(path, row, RowError(f"a JSON object was expected, found {type(item).__name__}"))
            yield row, item
        position += 1
        if next_char():  # two arrays in one file, say: the second would be lost
            raise located(path, max(row, 0), RowError("text follows the end of the array"))
