"""Secret of a job that no launcher has made one for: a file that only this user can read.

    HVDLITE_SECRET_KEY    64 hexadecimal digits
    HVDLITE_SECRET_FILE   a file that holds them, or 32 bytes: of this user, mode 0600
    the key of the user   ~/.config/hvdlite/key, made once, in a home that the nodes share; where no such file can be
                          made and all ranks are on one host, a file in a folder of this host that is this user's alone

All that has one of the last two is for this user's jobs as a whole, so the secret of a job is drawn from it and from
what tells the job from others. There is always a secret: where none can be had, init() fails and says how to give one.

A file is looked at by its open descriptor, never waited for (a pipe), and never read beyond what it may hold. Standard
library only, since the launcher reads the file, too.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Mapping
from typing import Any

KEY_BYTES = 32
POD = "KUBERNETES_SERVICE_HOST"  # is set in every container of Kubernetes
_LARGEST = 2 * KEY_BYTES + 2  # digits and a line's end
_CANNOT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT}


class SecretError(ValueError):
    """A file that cannot keep a secret; the text names it and says why."""


def settled(values: Mapping[str, Any]) -> bytes | None:
    """The secret that the options give, HVDLITE_SECRET_KEY before HVDLITE_SECRET_FILE; None: neither. Raises
    SecretError."""
    path: str | None = values["secret_file"]
    given: bytes | None = values["secret_key"]
    return of_file(path) if given is None and path is not None else given


def of_file(path: str) -> bytes:
    """The 32 bytes that a file keeps. Raises SecretError for one that is not there, not this user's alone, no plain
    file, or does not hold them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # a path with a null byte
        raise SecretError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise SecretError(f"{path} is no plain file")
        if about.st_uid != os.geteuid():
            raise SecretError(f"{path} belongs to user {about.st_uid}, and this is user {os.geteuid()}")
        if about.st_mode & 0o077:
            raise SecretError(f"{path}: others than this user may read or change it (chmod 600 {path})")
        held = os.read(descriptor, _LARGEST + 1)
    finally:
        os.close(descriptor)
    try:
        key = held if len(held) == KEY_BYTES else bytes.fromhex(held.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or len(held) > _LARGEST:
        raise SecretError(f"{path} must hold 64 hexadecimal digits, or {KEY_BYTES} bytes")
    return key


def of_user(environ: Mapping[str, str], one_host: bool) -> bytes:
    """This user's key, made if there is none. All ranks may come here at once, on several nodes. one_host: all ranks of
    the job are on this host. Raises SecretError."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = os.path.join(home, "hvdlite", "key")
    if POD in environ and not one_host and not os.path.lexists(path):
        raise SecretError(f"{path} would be another one in each pod")
    try:
        return _kept(path)
    except OSError as error:
        if error.errno not in _CANNOT or not one_host:
            raise SecretError(f"{path}: {error.strerror or error}") from None
    folder = _folder_of_host(environ)
    try:
        return _kept(os.path.join(folder, "key"))
    except OSError as error:
        raise SecretError(f"{path} cannot be made, nor {folder}/key: {error.strerror or error}") from None


def giving(environ: Mapping[str, str]) -> str:
    """How a user gives a job of several hosts a secret of its own."""
    if POD in environ:
        return (
            "set HVDLITE_SECRET_KEY in all pods from a Secret of Kubernetes: kubectl create secret generic hvdlite "
            "--from-literal=HVDLITE_SECRET_KEY=$(openssl rand -hex 32), and envFrom: [{secretRef: {name: hvdlite}}] in "
            "the container"
        )
    return "in the job file: export HVDLITE_SECRET_KEY=$(openssl rand -hex 32)"


def _kept(path: str) -> bytes:
    """The key in a file, which is made where there is none. OSError where it cannot be made."""
    if not os.path.lexists(path):
        _make(path)
    return of_file(path)


def _folder_of_host(environ: Mapping[str, str]) -> str:
    """A folder that is this user's alone, made where it is missing. Raises SecretError for one that others reach."""
    base = environ.get("XDG_RUNTIME_DIR") or ""
    base = base if base and os.path.isdir(base) and os.access(base, os.W_OK) else tempfile.gettempdir()
    folder = os.path.join(base, f"hvdlite-{os.geteuid()}")
    mode = os.stat(base).st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise SecretError(f"{base}: others may rename what is in it")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise SecretError(f"{folder}: {error.strerror}") from None
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise SecretError(f"{folder} is no folder of this user alone (mode 0700): somebody else may have made it")
    return folder


def _make(path: str) -> None:
    """Whole or not at all: the first link of several wins."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fresh = f"{path}.{socket.gethostname()}.{os.getpid()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, os.urandom(KEY_BYTES).hex().encode() + b"\n")
        os.close(descriptor)
        os.link(fresh, path)
    except FileExistsError:
        pass  # another rank was faster
    finally:
        os.unlink(fresh)
