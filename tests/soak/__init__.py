"""A long run against real node processes: kill -9, moves, disconnects, full disks and logins, while clients write.

Nodes answer a write when it is on disk (``--ack disk``), so an acknowledged write that is missing afterwards is a loss.
``make soak MINUTES=30`` prints the number of acknowledged and of lost writes, and the longest wait of a client.
"""
