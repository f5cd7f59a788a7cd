"""The launcher's side of the agents: registration, orders, heartbeats, the end of a job."""
