"""The files of one table in a `data_home` of `sklearn.datasets.fetch_openml`, checked so that none is downloaded or removed.

scikit-learn removes a file that it cannot read, and downloads it again. It is therefore given a copy, of files that are whole.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlparse

ROOT = Path("openml", "openml.org")  # of scikit-learn's cache, inside its data home
CACHE = ROOT / "api" / "v1" / "json" / "data"


def ids_in(folder: Path) -> list[int]:
    """The tables that a folder describes, in order."""
    return sorted(int(path.stem) for path in (folder / CACHE).glob("*.gz") if path.stem.isdigit())


@contextmanager
def whole_copy(data_id: int, folder: Path) -> Iterator[Path]:
    """A data home, for as long as the context, with the files of one table of a folder, in which nothing is left to download.

    Raises OSError that names the table and the file where one is missing, damaged or without what scikit-learn needs; and for
    what that cannot parse inside the context.
    """
    description = Path(CACHE, f"{data_id}.gz")
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Invalid cache|A network error")  # neither is so
        home = Path(place)
        told = _described(data_id, folder, description, "data_set_description")
        for kind, key in (("features", "data_features"), ("qualities", "data_qualities")):
            _described(data_id, folder, CACHE / kind / f"{data_id}.gz", key)
            _copy(folder / CACHE / kind / f"{data_id}.gz", home / CACHE / kind / f"{data_id}.gz")
        url = urlparse(str(told.get("url"))).path.lstrip("/")
        by_url, by_id = (
            ROOT / f"{path}.gz" for path in (url, f"data/v1/download/{told.get('file_id')}")
        )  # new and old versions
        if ".." in (*by_url.parts, *by_id.parts):
            raise _damaged(data_id, folder / description, "its url or file_id leads out of the folder")
        data = by_url if (folder / by_url).is_file() or not (folder / by_id).is_file() else by_id
        if (found := hashlib.md5(_read(data_id, folder / data)).hexdigest()) != told.get("md5_checksum"):
            raise _damaged(data_id, folder / data, f"its MD5 is {found}, not {told.get('md5_checksum')}")
        for path in {by_url, by_id}:
            _copy(folder / data, home / path)
        told["url"] = f"file:///{url}"  # what cannot be parsed would be downloaded from there, and there is nothing
        (home / description).write_bytes(gzip.compress(json.dumps({"data_set_description": told}).encode()))
        try:
            yield home
        except (URLError, LookupError, TypeError, AttributeError) as error:
            cause = error.__context__ if isinstance(error, URLError) and error.__context__ else error
            raise _damaged(data_id, folder / data, f"it is no table as {description} tells: {cause!r}") from error


def _described(data_id: int, folder: Path, path: Path, key: str) -> dict[str, Any]:
    """What is under the one key of a JSON file."""
    content = _read(data_id, folder / path)
    try:
        told = json.loads(content)[key]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise _damaged(data_id, folder / path, f"it is no JSON with {key!r}") from error
    if not isinstance(told, dict):
        raise _damaged(data_id, folder / path, f"its {key!r} is {type(told).__name__}, not an object")
    return told


def _read(data_id: int, path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise _damaged(data_id, path, "it is missing") from error
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(data_id, path, str(error)) from error


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def _damaged(data_id: int, path: Path, why: str) -> OSError:
    return OSError(
        f"load_tables: table {data_id}: {path} cannot be read ({why}); restore it, or remove {CACHE / f'{data_id}.gz'} to do "
        "without the table"
    )
