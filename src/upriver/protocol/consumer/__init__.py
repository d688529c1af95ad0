"""The receiving side of UPR and DCP: negotiates streams, follows rollbacks and passes changes to a sink."""

from upriver.protocol.consumer.consumer import Answered, ConsumerConnection, ConsumerOptions
from upriver.protocol.consumer.consumer_stream import ConsumerStream, Run
from upriver.protocol.consumer.draft_translation import DraftTranslator
from upriver.protocol.consumer.replica import Replica

__all__ = [
    "Answered",
    "ConsumerConnection",
    "ConsumerOptions",
    "ConsumerStream",
    "DraftTranslator",
    "Replica",
    "Run",
]
