"""Compile training steps for TPUs and GPUs that this machine does not have, and analyze them.

XLA compiles a step from a description of the devices. The compiled program shows how much memory
each device needs and which collectives a step uses, but not how long the step takes.
"""
