"""How the processes of a job find their ranks and meet: discovery, the store's client, bootstrap."""
