"""Compile and analyze training steps for TPUs and GPUs that this machine does not have.

XLA needs only a description of the devices to compile a step for them. The compiled program shows
how much memory each device needs and which collectives a step uses, but not how long the step
takes.
"""
