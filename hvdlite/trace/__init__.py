"""What happened on all ranks, and when: the flight recorder, the timeline, and what reads both.

Every rank remembers its last events in a ring that is always on (csrc/trace). `recorder` turns that into files while a
job runs: a record where it fails or is asked, a timeline while one is wanted (`timeline`). Afterwards the program
hvdlite-trace (`cli`) reads them: `analyze` names the rank at fault, `merge` makes one picture of all ranks. In between
lie `events` (what an event is, from a ring or a file), `spans` (events become spans in lanes, as Horovod names them),
and `clock` (times of all ranks on the clock of rank 0).
"""
