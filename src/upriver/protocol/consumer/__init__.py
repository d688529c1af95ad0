"""The receiving side of UPR and DCP: negotiates, asks for streams, follows rollbacks, hands changes to a sink."""
