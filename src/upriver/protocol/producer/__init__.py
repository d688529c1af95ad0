"""The sending side of UPR and DCP: answers stream requests and schedules what goes out on one connection.

`Producer` is the connection, `ProducerStream` one vbucket's stream, `dialects` what each text calls its messages.
"""
