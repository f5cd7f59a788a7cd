"""How agents get to other hosts: ssh, srun, mpirun, an agent of a scheduler, or the same command on each."""
