"""News of adapters from several workers: told once all of them have said so."""

from collections.abc import Sequence

from quire.messages.lora import AdapterNews


class NewsOfAll:
    def __init__(self) -> None:
        self._told: dict[tuple[int, bool], list[AdapterNews]] = {}

    def add(self, replies: Sequence[Sequence[AdapterNews]]) -> list[AdapterNews]:
        """`replies`: what each worker told. An error of any of them is the adapter's."""
        complete = []
        for news in (one for reply in replies for one in reply):
            key = news.lora_id, news.slot is not None
            told = self._told.setdefault(key, [])
            told.append(news)
            if len(told) == len(replies):
                del self._told[key]
                complete.append(next((one for one in told if one.error is not None), _agreed(told)))
        return complete


def _agreed(told: Sequence[AdapterNews]) -> AdapterNews:
    if len({news.content for news in told}) == 1:
        return told[0]
    return AdapterNews(told[0].lora_id, error="workers have read different files; the folder must be the same for all")
