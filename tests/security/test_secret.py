"""Where a secret comes from: what a file of it may be, and what happens where none can be made."""

import os
import stat
import tempfile

import pytest

from hvdlite import config
from hvdlite.errors import HvdInitError
from hvdlite.launcher import cli
from hvdlite.launcher.placement import host_flags
from hvdlite.rendezvous import bootstrap, standalone_store
from hvdlite.rendezvous.discovery import Place
from hvdlite.security import job_secret

KEY = bytes(range(32))
LINE = KEY.hex().encode() + b"\n"
NOBODY = 65534


def written(path, content=LINE, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("content", [KEY, KEY.hex().encode(), KEY.hex().encode() + b"\n", KEY.hex().upper().encode()])
def test_a_file_of_this_user_alone_keeps_a_secret(tmp_path, content):
    assert job_secret.of_file(written(tmp_path / "secret", content)) == KEY


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o677])
def test_a_file_that_others_reach_is_refused(tmp_path, mode):
    with pytest.raises(job_secret.SecretError, match="others than this user .*chmod 600"):
        job_secret.of_file(written(tmp_path / "secret", mode=mode))


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"x" * 64, KEY.hex().encode()[:-2], KEY * 3, b"0" * 66, bytes(31), b"\xff" * 64]
)
def test_a_file_that_holds_anything_else_is_refused(tmp_path, content):
    with pytest.raises(job_secret.SecretError, match="must hold 64 hexadecimal digits, or 32 bytes"):
        job_secret.of_file(written(tmp_path / "secret", content))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, why in (
        (tmp_path / "pipe", "no plain file"),  # and nobody waits for who writes
        (tmp_path, "no plain file"),
        ("/dev/zero", "no plain file"),
        (tmp_path / "absent", "No such file"),
        (tmp_path / "absent" / "too", "No such file"),
        ("", "No such file"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(job_secret.SecretError, match=why):
            job_secret.of_file(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_file_of_somebody_else_is_refused(tmp_path):
    path = written(tmp_path / "secret")
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(job_secret.SecretError, match=f"belongs to user {NOBODY}"):
        job_secret.of_file(path)


def test_a_key_in_the_environment_comes_first_and_an_error_names_variable_and_rank(tmp_path):
    values = dict(config.read({}).values, secret_file=str(tmp_path / "absent"), secret_key=KEY)
    bootstrap.settle_secret(values, None)
    assert values["secret_key"] == KEY
    values["secret_key"] = None
    with pytest.raises(HvdInitError, match=r"rank 3: HVDLITE_SECRET_FILE cannot be used: .*absent.*\[HVD117\]"):
        bootstrap.settle_secret(values, Place(3, 4, 3, 4, 0, 1, "torchrun"))
    values["secret_file"] = written(tmp_path / "secret")
    bootstrap.settle_secret(values, None)
    assert values["secret_key"] == KEY


def test_hosts_that_meet_by_themselves_take_a_file(tmp_path):
    asked = cli.read_flags(["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1"])
    told = host_flags._secret(asked, {"HVDLITE_SECRET_KEY": KEY.hex()})
    path = written(tmp_path / "secret")
    assert host_flags._secret(asked, {"HVDLITE_SECRET_FILE": path}) == told
    os.chmod(path, 0o644)
    with pytest.raises(host_flags.PlaceError, match=r"chmod 600.*\[HVD713\]"):
        host_flags._secret(asked, {"HVDLITE_SECRET_FILE": path})


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """An environment whose home cannot hold a key, and a folder for temporary files that anybody may write."""
    (tmp_path / "home").write_text("a file where a folder is to be")
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(shared))
    return {"XDG_CONFIG_HOME": str(tmp_path / "home")}, shared


def test_without_a_home_ranks_of_one_host_share_a_key_that_is_this_users_alone(homeless):
    environ, shared = homeless
    key = job_secret.of_user(environ, one_host=True)
    assert job_secret.of_user(environ, one_host=True) == key and len(key) == 32
    (folder,) = shared.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE((folder / "key").stat().st_mode) == 0o600


def test_without_a_home_ranks_of_several_hosts_are_told_how_to_give_a_secret(homeless):
    environ, shared = homeless
    with pytest.raises(HvdInitError, match=r"rank 2: .* no secret .*SECRET_KEY.*SECRET_FILE .*\[HVD117\]"):
        standalone_store._secret(environ, 2, one_host=False)
    assert not list(shared.iterdir())


@pytest.mark.parametrize("how", ["readable", "link", "foreign", "not sticky"])
def test_a_folder_that_somebody_else_has_prepared_is_refused(homeless, how, tmp_path):
    environ, shared = homeless
    folder = shared / f"hvdlite-{os.geteuid()}"
    if how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "not sticky":
        shared.chmod(0o777)
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o755 if how == "readable" else 0o700)
        if how == "foreign":
            if os.geteuid() != 0:
                pytest.skip("needs another user")
            os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(job_secret.SecretError, match="no folder of this user alone|others may rename"):
        job_secret.of_user(environ, one_host=True)


def test_a_key_that_others_may_read_is_not_replaced_by_another(tmp_path, homeless):
    """Ranks that see different files would not meet."""
    _, shared = homeless
    folder = tmp_path / "conf" / "hvdlite"
    folder.mkdir(parents=True)
    written(folder / "key", mode=0o644)
    with pytest.raises(job_secret.SecretError, match="chmod 600"):
        job_secret.of_user({"XDG_CONFIG_HOME": str(tmp_path / "conf")}, one_host=True)
    assert not list(shared.iterdir())


def test_only_the_first_port_is_one_that_a_stranger_can_compute():
    """Who holds all that he can compute keeps no job from its store."""
    mine, others = (standalone_store._ports("torchrun none 127.0.0.1:29500", key) for key in (KEY, bytes(32)))
    assert mine == standalone_store._ports("torchrun none 127.0.0.1:29500", KEY) and len(mine) == 8
    assert mine[0] == others[0] and all(10000 <= port < 20000 for port in mine)
    assert len(set(mine[1:]) - set(others)) >= 5


def test_the_secret_of_a_job_is_not_that_of_the_user(monkeypatch):
    """So that one job of a user is as much a stranger to another as anybody is, whoever has given the key."""
    seen = []
    monkeypatch.setattr(
        standalone_store,
        "_keep",
        lambda size, ip, ports, secret: seen.append(secret) or {"address": "", "port": ports[0]},
    )
    values = {"store_addr": None, "store_port": None, "secret_key": KEY, "start_timeout": 1.0}
    for run in ("a", "b"):
        environ = {"TORCHELASTIC_RUN_ID": run, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        monkeypatch.setattr(standalone_store, "_known", {})
        standalone_store.found(Place(0, 2, 0, 2, 0, 1, "torchrun"), environ, values)
    assert len({*seen, KEY}) == 3
