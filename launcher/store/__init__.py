"""The store: the TCP server of the ranks' rendezvous, and the membership of the job."""
