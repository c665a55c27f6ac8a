"""The simulated engine: a KV cache of blocks and a scheduler of steps, in times that are handed in.

Nothing here knows a clock, a loop or a socket. The live mock and the simulator drive the same code.
"""
