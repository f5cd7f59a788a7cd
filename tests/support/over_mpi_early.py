"""Rank 1 ends before it has called init, while the others wait for it in MPI_Init: parts of over_mpi.py."""

import os

import hvdlite.numpy as hvd


def early_raise():
    """With words of its own."""

    def end():
        raise ValueError("too early to be a rank")

    early(end)


def early__exit():
    """Without a word."""
    early(lambda: os._exit(3))


def early(end):
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", ""))) == 1:
        end()
    hvd.init()
