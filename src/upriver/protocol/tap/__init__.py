"""Both sides of TAP: connects, acknowledgements, checkpoints, takeovers, and clients that reconnect by name."""

from upriver.protocol.tap.clients import TapClient, TapClients
from upriver.protocol.tap.connect_plan import TapPlan, TapSettings, plan_of
from upriver.protocol.tap.consumer import ReceivedChange, TapConsumer
from upriver.protocol.tap.flush_mark import FlushMark
from upriver.protocol.tap.position import LOST, NEVER, TapPosition
from upriver.protocol.tap.position_table import PositionTable
from upriver.protocol.tap.producer import TapProducer, check_takeover

__all__ = [
    "LOST",
    "NEVER",
    "FlushMark",
    "PositionTable",
    "ReceivedChange",
    "TapClient",
    "TapClients",
    "TapConsumer",
    "TapPlan",
    "TapPosition",
    "TapProducer",
    "TapSettings",
    "check_takeover",
    "plan_of",
]
