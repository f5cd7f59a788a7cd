"""The store, at which ranks meet: a TCP server, and its books of who is in the job."""
