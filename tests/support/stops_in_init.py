"""A rank is stopped in the middle of init, once it has given its part of the first exchange: program of tests.

python stops_in_init.py RANK [crowd]

crowd: and strangers come before the other ranks, so many that rank 0's queue is full.
"""

import os
import signal
import socket
import sys
import time

import hvdlite as hvd
from hvdlite.lifecycle import init

inner = init._Boot.allgather
strangers = []


def allgather(self, mine):
    everyone = inner(self, mine)
    if self.store.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif "crowd" in sys.argv:
        time.sleep(0.5)
        name = "\0hvdlite-" + everyone[0][:16].hex()
        while True:
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].setblocking(False)
            if strangers[-1].connect_ex(name) != 0:
                break
    return everyone


init._Boot.allgather = allgather
hvd.init()
