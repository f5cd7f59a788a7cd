"""`Store`: a folder for data and checkpoints of an estimator that driver and executors all reach.

`Store.create("/shared/runs")` is a folder of this machine or of a file system that is mounted everywhere; an address
like hdfs:// or s3:// is opened by pyarrow.fs, and Spark must know it, too. A run has a folder in it: `train` and
`validation` hold Parquet as long as it trains, `checkpoint...` is rank 0's model after the last epoch that it finished.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any
from urllib.parse import quote

from ..executors import driver

_SCHEME = re.compile(r"[A-Za-z][\w+.-]*:(//[^/]*)?(?=/|$)")  # Spark's paths may begin with file:/


class Store:
    """A folder for the data and checkpoints of an estimator, which the driver and all executors reach.

    Args:
        prefix_path (str): a folder of a file system that is mounted everywhere, or an address such as ``hdfs://`` or
            ``s3://``, which Spark and pyarrow open.

    Example:
        ::

            store = Store.create("/shared/runs")
    """

    def __init__(self, prefix_path: str) -> None:
        text = os.fspath(prefix_path)
        self.url = text if _SCHEME.match(text) else "file://" + os.path.abspath(text)

    @classmethod
    def create(cls, prefix_path: str) -> Store:
        """Return ``Store(prefix_path)`` (Horovod's name).

        Args:
            prefix_path (str): as in ``Store``.

        Returns:
            Store: the folder.
        """
        return cls(prefix_path)

    def at(self, *names: str) -> tuple[Any, str]:
        """A file system of pyarrow, and the path in it."""
        end = _SCHEME.match(self.url).end()  # type: ignore[union-attr]
        uri = self.url[:end] + quote(self.url[end:])
        system, path = driver.library("pyarrow.fs", "spark").FileSystem.from_uri(uri)
        return system, posixpath.join(path, *names)

    def url_of(self, *names: str) -> str:
        """For Spark."""
        return posixpath.join(self.url, *names)

    def write(self, data: bytes, *names: str) -> None:
        """A file. Readers meanwhile see what was there, or all of this."""
        system, path = self.at(*names)
        system.create_dir(posixpath.dirname(path), recursive=True)
        with system.open_output_stream(path + ".half") as stream:
            stream.write(data)
        system.move(path + ".half", path)

    def read(self, *names: str) -> bytes:
        """The whole file. OSError where there is none."""
        system, path = self.at(*names)
        with system.open_input_stream(path) as stream:
            return bytes(stream.read())

    def delete(self, *names: str) -> None:
        """A folder with all that is in it, if it is there."""
        system, path = self.at(*names)
        if system.get_file_info(path).type.name == "Directory":
            system.delete_dir(path)


class LocalStore(Store):
    """A ``Store`` in a local folder, or in one that is mounted everywhere."""
