"""The launcher: starts the ranks, serves their rendezvous, shows their output, ends the job with one exit code."""
