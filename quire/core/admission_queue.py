"""Waiting requests: the ready ones in the order of admission, and those blocked by more than a lack of room."""

import heapq

from quire.core.request import Request, RequestState


class AdmissionQueue:
    """Ready requests are a heap on the request's key: arrival for FCFS, (priority, arrival) for priority.

    A preempted or formerly blocked request keeps its key, so it comes back where it belongs without a second queue.
    """

    def __init__(self) -> None:
        self.blocked: set[Request] = set()
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._ready: set[Request] = set()  # removal is lazy: the heap may hold requests that have left
        self._draining: set[Request] = set()  # preempted and blocked until their plans in flight are back

    def __len__(self) -> int:
        return len(self._ready) + len(self.blocked)

    def push(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self._ready.add(request)
        heapq.heappush(self._heap, (request.key, request))

    def peek(self) -> Request | None:
        """The request to admit next, if any may be admitted now."""
        while self._heap:
            request = self._heap[0][1]
            if request in self._ready:
                # A preempted request is admitted again before any behind it can allocate the blocks it lost.
                return None if any(preempted.key < request.key for preempted in self._draining) else request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None, "pop() from an empty queue"
        heapq.heappop(self._heap)
        self._ready.discard(request)
        return request

    def remove(self, request: Request) -> None:
        self.blocked.discard(request)
        self._draining.discard(request)
        self._ready.discard(request)
        if len(self._heap) > 64 + 2 * len(self._ready):
            self._heap = [entry for entry in self._heap if entry[1] in self._ready]
            heapq.heapify(self._heap)

    def block(self, request: Request, state: RequestState) -> None:
        """Pass the request over; `state` says until when."""
        request.state = state
        self.blocked.add(request)

    def unblock(self, request: Request) -> None:
        if request in self.blocked:
            self.blocked.remove(request)
            self.push(request)

    def block_until_ready(self, request: Request) -> None:
        """Until `now_ready` is called as often as this was: for its grammar, for its adapter."""
        request.awaits += 1
        if request.state == RequestState.WAITING:  # else it waits for its sibling's prompt first
            self.remove(request)
            self.block(request, RequestState.WAITING_GRAMMAR)

    def now_ready(self, request: Request) -> None:
        request.awaits -= 1
        if request.state == RequestState.WAITING_GRAMMAR and not request.awaits:
            self.unblock(request)

    def fork_ready(self, request: Request) -> None:
        """Its parent's prompt can be shared, or will never be."""
        if request in self.blocked and request.awaits:
            request.state = RequestState.WAITING_GRAMMAR
        else:
            self.unblock(request)

    def push_preempted(self, request: Request) -> None:
        """Ready once `discard_frame` has been called for every plan in flight that the request is part of."""
        if request.frames_to_discard:
            self._draining.add(request)
            self.block(request, RequestState.WAITING)
        else:
            self.push(request)

    def discard_frame(self, request: Request) -> None:
        request.frames_to_discard -= 1
        if request.frames_to_discard == 0 and request in self._draining:
            self._draining.remove(request)
            self.unblock(request)

    def last_with_blocks(self) -> Request | None:
        """The ready request that is to be admitted last among those that hold blocks."""
        return max((r for r in self._ready if r.has_blocks), key=lambda r: r.key, default=None)
