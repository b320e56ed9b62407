"""What several workers tell of adapters, as one."""

from quire.executor.adapter_news import NewsOfAll
from quire.messages.lora import AdapterNews


def test_news_is_told_once_all_workers_have():
    news = NewsOfAll()
    read, placed = AdapterNews(1, b"content"), AdapterNews(1, slot=0)
    assert news.add([[read], []]) == []
    assert news.add([[AdapterNews(2, b"other")], [read]]) == [read]
    assert news.add([[placed], [AdapterNews(2, b"other"), placed]]) == [AdapterNews(2, b"other"), placed]


def test_an_error_of_any_worker_is_the_adapters():
    news = NewsOfAll()
    wrong = AdapterNews(1, error="it is wrong")
    assert news.add([[AdapterNews(1, b"content")], [wrong]]) == [wrong]
    lost = AdapterNews(1, slot=0, error="no memory")
    assert news.add([[lost], [AdapterNews(1, slot=0)]]) == [lost]


def test_workers_that_have_read_different_files():
    (found,) = NewsOfAll().add([[AdapterNews(1, b"one")], [AdapterNews(1, b"other")]])
    assert found.error is not None and "different files" in found.error
