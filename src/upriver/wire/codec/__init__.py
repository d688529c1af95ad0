"""The columnar codec: whole buffers of changes, records or requests at once, compiled or in plain Python.

Decoding gives Arrow record batches, encoding gives runs of packets. `row_layout` derives from the declared messages
where each column stands, so that the compiled code knows no dialect by name.
"""
