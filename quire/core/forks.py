"""The completions of one request: all but the first wait until its prompt is computed, then share its blocks."""

from collections.abc import Iterable

from quire.core.request import Request


class ForkTable:
    """A request's first completion is the parent of the others."""

    def __init__(self) -> None:
        self._parents: dict[Request, Request] = {}
        self._waiting: dict[Request, list[Request]] = {}  # parent -> children
        self._planned: list[Request] = []  # parents whose prompt the last plan completes

    def add(self, child: Request, parent: Request) -> bool:
        """Whether the child must wait."""
        self._parents[child] = parent
        if not parent.prompt_planned:
            self._waiting.setdefault(parent, []).append(child)
        return not parent.prompt_planned

    def parent(self, child: Request) -> Request | None:
        """The parent, if an earlier plan computes its whole prompt and the child has no token of its own."""
        parent = self._parents.get(child)
        if parent is None or not parent.prompt_planned or len(child.token_ids) != child.num_prompt_tokens:
            return None
        return parent

    def note_planned(self, requests: Iterable[Request], num_computed: Iterable[int]) -> None:
        """How many tokens of these requests will be computed, with the newest plan."""
        if not self._waiting:
            return
        for request, count in zip(requests, num_computed, strict=True):
            if not request.prompt_planned and count >= request.num_prompt_tokens:
                request.prompt_planned = True
                self._planned.append(request)

    def pop_ready(self) -> list[Request]:
        """Children that need not wait any longer."""
        if not self._planned:
            return []
        planned, self._planned = self._planned, []
        return [child for parent in planned for child in self._waiting.pop(parent, ())]

    def remove(self, request: Request) -> list[Request]:
        """The request has ended. Children that were waiting for it: they compute the prompt themselves."""
        request.prompt_planned = False
        self._parents.pop(request, None)
        return self._waiting.pop(request, [])
