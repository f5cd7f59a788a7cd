#!/bin/bash
# Eight ranks on two hosts under LSF: bsub < lsf.sh. Change the numbers and the last line.
#BSUB -J train
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -W 24:00
#BSUB -o train-%J.out

exec hvdlite-run python train.py
