"""The launcher: starts the ranks of a job, lets them meet, shows what they print, ends the job as its culprit did."""
