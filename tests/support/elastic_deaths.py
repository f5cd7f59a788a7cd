"""An elastic job (elastic_training.py) whose members meet planned ends: where, at which time of all, and in what way.

    hvdlite-run -np 4 --min-np 1 --tolerate exception sh wrap.sh python elastic_deaths.py FOLDER PLAN

FOLDER/deaths.json: {member: [place, count, way, seconds]}. A way is a signal's number or name below; a signal comes so
many seconds after the place is reached, by another thread. FOLDER/<member>.met says that it has come.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import elastic_training

import hvdlite as hvd
from hvdlite import elastic

MEMBER = os.environ["HVDLITE_MEMBER"]


def meet(way, seconds):
    """The end, or a stop after which it goes on."""
    open(os.path.join(sys.argv[1], f"{MEMBER}.met"), "w").close()
    if way == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif way == "raise":
        raise RuntimeError("an ECC error")
    elif way == "exit":
        sys.exit(0)
    elif way == "exit 143":
        sys.exit(143)
    elif way == "_exit":
        os._exit(0)
    else:
        threading.Timer(seconds, os.kill, (os.getpid(), way)).start()


def watched(place, call, planned):
    """The call, at one of which the end comes."""
    left = [planned[1]]

    def reached(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            meet(*planned[2:])
        return call(*args, **kwargs)

    return reached if planned[0] == place else call


planned = json.loads(open(os.path.join(sys.argv[1], "deaths.json")).read()).get(MEMBER, ["", 0, "", 0])
hvd.init = watched("join", hvd.init, planned)
for name in ("save", "restore", "sync"):
    setattr(elastic.ObjectState, name, watched(name, getattr(elastic.ObjectState, name), planned))
elastic.State.check_host_updates = watched("commit", elastic.State.check_host_updates, planned)
elastic_training.gradient = watched("step", elastic_training.gradient, planned)
elastic_training.main(sys.argv[1], elastic_training.Plan(**json.loads(sys.argv[2])))
if planned[0] == "after":
    meet(*planned[2:])
    time.sleep(60)
