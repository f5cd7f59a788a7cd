"""A real Spark for tests: Java, and pyspark beside the environment. What cannot be had is skipped, with the reason.

pyspark is published as sources only, and to build them takes minutes, for nothing: what lies in the archive runs as it
is. So pip only fetches the archive, and it is unpacked into the cache, once (0.5 GB). pip asks it for its metadata
meanwhile, which is why the environment's own setuptools must do (--no-build-isolation).
"""

import os
import shutil
import tarfile

import overlays
import parts
import pytest

PYSPARK = "4.3.0"


def found():
    """Folders and variables of a driver that may import pyspark, pyarrow and pandas."""
    if parts.debian("java", "default-jre-headless") is None:
        pytest.skip("Spark needs Java")
    home = _unpacked()
    settings = {"SPARK_HOME": str(home / "deps"), "SPARK_LOCAL_IP": "127.0.0.1"}
    return [home, overlays.library("spark")], settings


def _unpacked():
    home = overlays.CACHE / f"pyspark-{PYSPARK}"
    with parts.alone():
        if not home.exists():
            half = home.with_name(f"{home.name}.half")
            shutil.rmtree(half, ignore_errors=True)
            words = ("--no-deps", "--no-build-isolation", "--no-binary", "pyspark", "-d", str(half))
            overlays.pip("download", "-q", *words, f"pyspark=={PYSPARK}")
            archive = half / f"pyspark-{PYSPARK}.tar.gz"
            with tarfile.open(archive) as opened:
                opened.extractall(half)
            os.rename(half / f"pyspark-{PYSPARK}", home)
            shutil.rmtree(half)
    return home
