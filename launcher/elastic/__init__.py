"""Jobs whose ranks come and go: who is in them, where they run, and what each end of a process means."""
