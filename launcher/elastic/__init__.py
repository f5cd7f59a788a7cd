"""Jobs whose ranks come and go: their members, where these run, and what each end of a process means."""
