"""Connections without I/O: what the two sides of a stream say to each other, and when.

Messages and the time go in, messages come out. No socket, no clock, no thread: the same code runs in a node, in a
client and in a simulation of a whole cluster.
"""
