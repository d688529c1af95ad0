"""One connection of the node, without I/O: the session, its request buffer, its answer queue, and refusals."""

from upriver.node.session.answer_queue import Answer, AnswerQueue, Deferred
from upriver.node.session.refusals import header_refusal, malformed, refusal
from upriver.node.session.request_buffer import RequestBuffer
from upriver.node.session.session import Command, Session

__all__ = [
    "Answer",
    "AnswerQueue",
    "Command",
    "Deferred",
    "RequestBuffer",
    "Session",
    "header_refusal",
    "malformed",
    "refusal",
]
