"""Requests that want to run, first the one that should run first."""

import heapq

from quire.core.request import Request


class WaitingQueue:
    """A heap on the request's key: arrival for FCFS, (priority, arrival) for priority.

    A preempted or formerly blocked request keeps its key, so it comes back where it belongs without a second queue.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._members: set[Request] = set()  # removal is lazy: the heap may hold requests that have left

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        self._members.add(request)
        heapq.heappush(self._heap, (request.key, request))

    def remove(self, request: Request) -> None:
        self._members.discard(request)
        if len(self._heap) > 64 + 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if request in self._members:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None, "pop() from an empty queue"
        heapq.heappop(self._heap)
        self._members.discard(request)
        return request
