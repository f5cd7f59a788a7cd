#!/bin/bash
# Eight ranks on two nodes under PBS Pro, OpenPBS or Torque (nodes=2:ppn=4). Change the numbers and the last line.
#PBS -N train
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l walltime=24:00:00
#PBS -j oe

cd "$PBS_O_WORKDIR" || exit 1
exec hvdlite-run python train.py
