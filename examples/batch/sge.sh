#!/bin/bash
# Eight slots of the parallel environment `mpi` under Grid Engine. Change its name, the number and the last line.
#$ -N train
#$ -pe mpi 8
#$ -cwd
#$ -j y

exec hvdlite-run python train.py
