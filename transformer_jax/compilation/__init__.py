"""Compile training steps for TPUs and GPUs that this machine does not have, and read the programs.

XLA compiles for a description of the devices. The compiled program shows the memory that each
device needs and the collectives of a step. The result does not say how long a step takes.
"""
