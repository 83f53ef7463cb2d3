"""The units of a run as SLURM jobs, or one after the other on the GPUs of this machine."""
