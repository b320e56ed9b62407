"""The supervisor's messages, without processes."""

import asyncio
from types import SimpleNamespace
from typing import Any

from quire.entrypoints.http.process_messages import GetMetrics, PeerReplies
from quire.entrypoints.http.supervisor import Supervisor


class Channel:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_question_is_answered_while_the_other_processes_start() -> None:
    supervisor, channel = Supervisor.__new__(Supervisor), Channel()
    asking: Any = SimpleNamespace(channel=channel)
    supervisor._apis = [asking, SimpleNamespace(channel=None)]  # type: ignore[list-item]
    supervisor._pending_replies, supervisor._num_questions = {}, 0
    asyncio.run(supervisor._ask_peers(asking, channel, 7, GetMetrics()))  # type: ignore[arg-type]
    assert channel.sent == [PeerReplies(7, [], complete=True)]
