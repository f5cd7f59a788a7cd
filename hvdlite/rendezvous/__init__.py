"""Ranks and rendezvous of the processes of a job: discovery, the store's client, bootstrap."""
