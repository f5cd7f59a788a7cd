"""What hvdlite-run refuses before it starts anything: the code, and the words that name what is wrong."""

import shlex
import shutil

import pytest
from launching import answers

USAGE = [
    ("", "no command"),
    ("-np 2", "no command"),
    ("true", "the number of ranks is missing"),
    ("-np 0 true", "-np 0: there must be at least 1 rank [HVD704]\n"),
    ("-np 65 true", "more than 64 ranks"),
    ("-np 1000000 true", "more than 64 ranks"),
    ("-np 1025 -H " + ",".join(f"10.9.8.{i}:64" for i in range(1, 18)) + " true", "supports at most 1024"),
    ("-H localhost:2147483647 true", "more than 64 ranks"),
    ("-H localhost:99999999999999999999 true", "999999999999... slots are more than a host can have"),
    (f"-H localhost:{'9' * 5000} true", "are more than a host can have"),
    (f"-np {'9' * 5000} true", "must be a whole number of rank"),
    ("-np 1_0 true", "-np 1_0: must be a whole number"),
    ("--nnodes 1000000000 --rdzv-endpoint localhost true", "--nnodes 1000000000: this version"),
    ("-np 2 -x =5 true", "-x =5: needs the name of a variable"),
    ("-np 2 --ranks-to-console 0,5 true", "--ranks-to-console 0,5: there is no rank 5, they end with 1"),
    ("-np -3 true", "-np -3: there must be at least 1 rank"),
    ("-np x true", "-np x: must be a whole number"),
    ("--config-file /no/such -np 1 true", "--config-file /no/such: No such file"),
    ("-np 1 --wdir /no/such/folder true", "--wdir /no/such/folder cannot be used: No such file"),
    ("-np 1 --max-restarts x true", "--max-restarts x: must be a whole number"),
    ("--nump 2 true", "unknown option --nump; did you mean --num-proc?"),
    ("--output-filname x -np 1 true", "did you mean --output-filename?"),
    ("--zzz", "unknown option --zzz"),
    ("-q", "unknown option -q"),
    ("--jsrun -np 2 true", "not yet: --jsrun"),
    ("--ssh-port", "needs a value"),
    ("--ssh_prt 2 true", "did you mean --ssh-port"),
    ("-np", "needs a value"),
    ("-np 2 -H elsewhere.invalid:2 true", "elsewhere.invalid: "),
    ("-np 3 -H localhost:2 true", "more processes (3) than there are available slots (2): write localhost:3 (a host"),
    ("-np 6 -H a:2,[2001:db8::1] true", "(6) than there are available slots (3): write [2001:db8::1]:4 (a host"),
    ("-np 2 -H localhost:0 true", "at least one slot: write name:1"),
    ("--min-np 3 -H a:2 true", "--min-np 3 is more than the 2 slots of all hosts: write host:slots"),
    ("-np 2 -H localhost:x true", "localhost:x"),
    ("-np 2 --hostfile /no/such/file true", "--hostfile /no/such/file: No such file"),
    ("-np 2 --start-timeout soon true", "--start-timeout='soon': must be a number"),
    ("-np 2 --failure-grace -1 true", "--failure-grace"),
    ("-np 2 --network-interface nosuch true", "--network-interface nosuch: this host has only"),
    ("-np 2 --stdin 1 true", "--stdin 1: must be 0 (rank 0 reads"),
    ("-np 2 --mpi --stdin all true", "--stdin all"),
    ("-np 2 --cycle-time-ms fast true", "--cycle-time-ms: invalid float value: 'fast'"),
    ("-np 2 --autotune-gaussian-process-noise loud true", "--autotune-gaussian-process-noise: invalid float"),
    ("-np 2 --autotune-steps-per-sample 0 true", "--autotune-steps-per-sample='0': must be at least 1"),
    ("-np 2 --autotune=1 true", "--autotune"),
    ("--nnodes 2 true", "--rdzv-endpoint HOST:PORT"),
    ("--nnodes 2 --rdzv-endpoint localhost:1 --node-rank 2 true", "the numbers 0 to 1"),
    ("--nnodes 2 --rdzv-endpoint localhost:1 -H a true", "exclude each other"),
    ("--nnodes 1:4 --rdzv-endpoint localhost true", "not yet"),
    ("--nnodes 2 --rdzv-endpoint localhost:x true", "the port of --rdzv-endpoint x"),
    ("--nnodes 2 --rdzv-endpoint localhost:65536 true", "must be a port, 1 to 65535"),
    ("-H elsewhere --ssh-port 0 true", "--ssh-port 0: must be a port"),
    ("-np \u0663 true", "must be a whole number of ranks"),
    ("-H a:\u0663 true", "is not a host"),
    ("--nnodes 2 --rdzv-endpoint localhost --nproc-per-node many true", "--nproc-per-node many"),
    ("--nnodes 2 --rdzv-endpoint localhost --rdzv-backend etcd true", "--rdzv-backend etcd"),
    ("--nnodes 2 --rdzv-endpoint 192.0.2.1 --node-rank 0 true", "not an address of this host"),
    ("--nnodes 2 --rdzv-endpoint localhost true", "export HVDLITE_SECRET_KEY"),
    ("-np 1 -x NOT_THERE true", "-x NOT_THERE"),
    ("doctor --nope", "--nope"),
    ("doctor -H 'a b'", "is not a host"),
    ("doctor --hostfile /not/there", "No such file"),
    ("doctor --start-timeout x -H a", "--start-timeout"),
    ("--mpi true", "the number of ranks is missing: give -np N"),
    ("--mpi -np x true", "-np x"),
    ("--mpi -np 2_0 true", "-np 2_0: must be a whole number"),
    ("--mpi -np 0 true", "-np 0: there must be at least 1"),
    ("--mpi -np 2 --ssh-port x true", "--ssh-port x: must be a whole number"),
    ("--mpi -np 2 --nnodes 2 true", "--nnodes does not work with --mpi"),
    ("--mpi -np 2 --rdzv-endpoint a:1 true", "--rdzv-endpoint does not work with --mpi"),
    ("--mpi -np 4 -H a:2 true", "Requested more processes (4)"),
    ("--mpi -np 65 true", "more than 64 ranks on one host (localhost)"),
    ("--mpi -np 65 -H a:65 true", "more than 64 ranks on one host (a)"),
    ("--mpi --oversubscribe -np 1025 -H a,b true", "a job of 1025 ranks: this version"),
    ("--mpi --oversubscribe -np 70000 true", "a job of 70000 ranks: this version"),
    ("--tcp -np 1 true", "they need --mpi"),
    ("--mpi-args '-x A' -np 1 true", "they need --mpi"),
]
FLAGS = [  # of a job that could start
    ("--log-level loud", "--log-level loud: must be one of TRACE, DEBUG, INFO, WARNING, ERROR, FATAL"),
    ("--timeline-filename=", "--timeline-filename='': must be the name of a file"),
    ("--stall-check-shutdown-time-seconds soon", "--stall-check-shutdown-time-seconds soon: must be a whole number"),
    ("--stall-check-shutdown-time-seconds -1", "must be a whole number of seconds, 0 to 1000000"),
    ("--stall-check-shutdown-time-seconds 99999999999", "must be a whole number of seconds, 0 to 1000000"),
    ("--stall-check-warning-time-seconds 1.5", "--stall-check-warning-time-seconds 1.5: must be a whole number"),
    ("--num-nccl-streams many", "--num-nccl-streams: invalid int value: 'many'"),
    ("--thread-affinity all", "--thread-affinity: invalid int value: 'all'"),
    ("--host-discovery-scrip x", "did you mean --host-discovery-script?"),
    ("--pty=1", "--pty"),
    ("--gloo --mpi", "--gloo and --mpi exclude each other"),
    ("--bind-to core --mpi", "--bind-to core: does not work with --mpi: give mpirun's own flags in"),
    ("--local-ranks-filter 0:1", "--local-ranks-filter 0:1: must be all, none, or numbers"),
    ("--local-ranks-filter 0,2", "--local-ranks-filter 0,2: no host has so many ranks, they end with 0 there"),
    ("--monitor-interval often", "--monitor-interval: invalid float value: 'often'"),
    ("--ranks-to-console 1-x", "--ranks-to-console 1-x: must be all, none, or numbers"),
    ("--output-file-mb 5", "needs --output-filename DIR"),
    ("--output-filename /tmp --output-file-mb much", "--output-file-mb much: must be a number"),
    ("--output-filename /tmp --output-file-mb 0", "must be greater than 0"),
]
USAGE += [(f"{words} -np 1 true", says) for words, says in FLAGS]
NOT_FOUND = [
    ("-np 2 no-such-command-anywhere", "no-such-command-anywhere: command not found"),
    ("-np 2 ./no/such/file", "./no/such/file: command not found"),
    ("--mpi -np 1 true", "neither mpirun, mpiexec nor mpiexec.hydra is on PATH"),
    ("--mpi -np 65 -H a:64,b true", "neither mpirun"),
    ("--mpi -np 65 '--mpi-args=-hostfile f' true", "neither mpirun"),
]
NOT_TO_BE_RUN = [
    ("-np 2 /etc/passwd", "/etc/passwd: permission denied"),
    ("-np 2 /tmp", "/tmp: is a directory"),
]
CASES = [
    (words, code, says) for code, rows in ((2, USAGE), (127, NOT_FOUND), (126, NOT_TO_BE_RUN)) for words, says in rows
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Answers by words. There is no mpirun on PATH."""
    folder = tmp_path_factory.mktemp("path")
    for name in ("true", "ssh"):
        (folder / name).symlink_to(shutil.which(name) or "/nowhere")
    found = answers([shlex.split(words) for words, _, _ in CASES], tmp_path_factory.mktemp("said"), PATH=str(folder))
    return dict(zip([words for words, _, _ in CASES], found))


@pytest.mark.parametrize("words, code, says", CASES, ids=[words[:60] for words, _, _ in CASES])
def test_what_cannot_be_is_refused_before_anything_starts(said, words, code, says):
    ended, out, err = said[words]
    assert (ended, out) == (code, "") and says in err and "Traceback" not in err, err
    assert err.startswith("hvdlite-run: "), err
